#include "runtime/writer/checksums.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "holdfast/pod.h"
#include "runtime/base/planted_bugs.h"
#include "runtime/format/torch_zip.h"

namespace holdfast::writer {
namespace {

constexpr uint32_t kCrc32Bytes = 4;
constexpr uint32_t kBitsPerByte = 8;

uint32_t ExtentCount(const PlannedFile& file) {
  return static_cast<uint32_t>((file.bytes + kChunkBytes - 1) / kChunkBytes);
}

bool OnDevice(const Segment& segment) {
  return segment.device != nullptr && !segment.device->is_host();
}

}  // namespace

std::unique_ptr<Checksums> Checksums::For(const SavePlan& plan) {
  bool wanted = false;
  uint32_t extents = 0;
  for (const PlannedFile& file : plan.files) {
    extents += ExtentCount(file);
    wanted = wanted || std::any_of(file.segments.begin(), file.segments.end(),
                                   [](const Segment& s) { return !s.crc32_slots.empty(); });
  }
  if (!wanted) return nullptr;
  auto checksums = std::make_unique<Checksums>();
  checksums->extents_.resize(extents);
  uint32_t first = 0;
  for (const PlannedFile& file : plan.files) {
    checksums->AddFile(file, first);
    first += ExtentCount(file);
  }
  const auto by_offset = [](const auto& a, const auto& b) { return a.offset < b.offset; };
  for (Extent& extent : checksums->extents_) {
    std::sort(extent.parts.begin(), extent.parts.end(), by_offset);
    std::sort(extent.places.begin(), extent.places.end(), by_offset);
  }
  return checksums;
}

void Checksums::AddFile(const PlannedFile& file, uint32_t extent_first) {
  const base::MutexLock lock(&mutex_);
  std::unordered_map<uint32_t, uint32_t> known;  // segment to tensor
  for (const Segment& segment : file.segments) {
    for (const Crc32Slot& slot : segment.crc32_slots) {
      const Segment& source = file.segments[slot.segment];
      const auto [found, is_new] =
          known.emplace(slot.segment, static_cast<uint32_t>(tensors_.size()));
      if (is_new) {
        Tensor tensor;
        const uint64_t end = source.file_offset + source.bytes;
        for (uint64_t at = source.file_offset; at < end;) {
          const uint64_t chunk = at / kChunkBytes;
          const uint64_t to = std::min<uint64_t>(end, (chunk + 1) * kChunkBytes);
          extents_[extent_first + chunk].parts.push_back(
              {.tensor = found->second,
               .part = static_cast<uint32_t>(tensor.parts.size()),
               .offset = static_cast<uint32_t>(at % kChunkBytes),
               .bytes = static_cast<uint32_t>(to - at)});
          tensor.parts.push_back(0);
          tensor.bytes.push_back(to - at);
          at = to;
        }
        tensor.missing = static_cast<uint32_t>(tensor.parts.size());
        tensors_.push_back(std::move(tensor));
      }
      // Byte by byte: a chunk may end inside of the four.
      for (uint32_t byte = 0; byte < kCrc32Bytes; ++byte) {
        const uint64_t at = segment.file_offset + slot.offset + byte;
        Extent& extent = extents_[extent_first + at / kChunkBytes];
        extent.places.push_back({.tensor = found->second,
                                 .byte = byte,
                                 .offset = static_cast<uint32_t>(at % kChunkBytes)});
        if (OnDevice(source) && source.file_offset / kChunkBytes != at / kChunkBytes)
          extent.waits_for_device = true;
      }
    }
  }
}

const Checksums::Part* Checksums::FindPart(uint32_t index, uint32_t offset) const {
  const std::vector<Part>& parts = extents_[index].parts;
  const auto found =
      std::lower_bound(parts.begin(), parts.end(), offset,
                       [](const Part& part, uint32_t at) { return part.offset < at; });
  return found != parts.end() && found->offset == offset ? &*found : nullptr;
}

bool Checksums::Wants(uint32_t index, uint32_t offset) const {
  return FindPart(index, offset) != nullptr;
}

std::vector<Checksums::Place>::const_iterator Checksums::PlaceAt(uint32_t index,
                                                                 uint32_t offset) const {
  const std::vector<Place>& places = extents_[index].places;
  return std::lower_bound(places.begin(), places.end(), offset,
                          [](const Place& place, uint32_t at) { return place.offset < at; });
}

bool Checksums::HasPlaces(uint32_t index, uint32_t offset, uint32_t bytes) const {
  const auto place = PlaceAt(index, offset);
  return place != extents_[index].places.end() && place->offset - offset < bytes;
}

void Checksums::Add(uint32_t index, uint32_t offset, uint32_t crc) {
  extents_[index].taken = true;
  const base::MutexLock lock(&mutex_);
  AddLocked(*FindPart(index, offset), crc);
}

void Checksums::AddLocked(const Part& part, uint32_t crc) {
  Tensor& tensor = tensors_[part.tensor];
  tensor.parts[part.part] = crc;
  if (--tensor.missing != 0) return;
  for (size_t k = 0; k < tensor.parts.size(); ++k)
    tensor.crc = format::Crc32Combine(tensor.crc, tensor.parts[k], tensor.bytes[k]);
}

std::vector<uint32_t> Checksums::Ready() {
  const base::MutexLock lock(&mutex_);
  return ReadyLocked();
}

std::vector<uint32_t> Checksums::ReadyLocked() {
  std::vector<uint32_t> ready;
  for (size_t i = 0; i < parked_.size();) {
    if (Complete(parked_[i], 0, kChunkBytes)) {
      ready.push_back(parked_[i]);
      parked_[i] = parked_.back();
      parked_.pop_back();
    } else {
      ++i;
    }
  }
  return ready;
}

bool Checksums::Complete(uint32_t index, uint32_t begin, uint32_t end) const {
  const auto last = PlaceAt(index, end);
  for (auto place = PlaceAt(index, begin); place != last; ++place) {
    if (tensors_[place->tensor].missing != 0) return false;
  }
  return true;
}

bool Checksums::FillLocked(uint32_t index, uint32_t begin, uint32_t end, char* memory) const {
  if (!Complete(index, begin, end)) return false;
  const auto last = PlaceAt(index, end);
  for (auto place = PlaceAt(index, begin); place != last; ++place) {
    memory[place->offset] =
        static_cast<char>(tensors_[place->tensor].crc >> (kBitsPerByte * place->byte) & 0xff);
  }
  return true;
}

bool Checksums::Fill(uint32_t index, uint32_t offset, uint32_t bytes, char* memory) {
  const base::MutexLock lock(&mutex_);
  return FillLocked(index, offset, offset + bytes, memory);
}

void Checksums::Keep(uint32_t index, const BegunDigest& begun) {
  extents_[index].begun = std::make_unique<BegunDigest>(begun);
}

std::unique_ptr<BegunDigest> Checksums::TakeBegun(uint32_t index) {
  return std::move(extents_[index].begun);
}

bool Checksums::Take(uint32_t index, char* memory, std::vector<uint32_t>* ready) {
  Extent& extent = extents_[index];
  std::vector<uint32_t> crcs;
  if (!extent.taken || base::Planted(base::Bug::kAddChecksumsTwice)) {
    for (const Part& part : extent.parts)
      crcs.push_back(format::Crc32(0, memory + part.offset, part.bytes));
  }
  extent.taken = true;
  const base::MutexLock lock(&mutex_);
  for (size_t i = 0; i < crcs.size(); ++i) AddLocked(extent.parts[i], crcs[i]);
  if (!crcs.empty()) *ready = ReadyLocked();
  if (FillLocked(index, 0, kChunkBytes, memory)) return true;
  parked_.push_back(index);
  return false;
}

}  // namespace holdfast::writer
