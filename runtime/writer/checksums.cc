#include "runtime/writer/checksums.h"

#include <algorithm>
#include <unordered_map>

#include "holdfast/pod.h"
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

bool Checksums::Complete(const Extent& extent) const {
  for (const Place& place : extent.places) {
    if (tensors_[place.tensor].missing != 0) return false;
  }
  return true;
}

bool Checksums::Wants(uint32_t index, uint32_t offset) const {
  const std::vector<Part>& parts = extents_[index].parts;
  const auto found =
      std::lower_bound(parts.begin(), parts.end(), offset,
                       [](const Part& part, uint32_t at) { return part.offset < at; });
  return found != parts.end() && found->offset == offset;
}

void Checksums::Add(uint32_t index, const std::vector<uint32_t>& crcs,
                    std::vector<uint32_t>* ready) {
  const base::MutexLock lock(&mutex_);
  AddLocked(index, crcs, ready);
}

void Checksums::AddLocked(uint32_t index, const std::vector<uint32_t>& crcs,
                          std::vector<uint32_t>* ready) {
  Extent& extent = extents_[index];
  for (size_t i = 0; i < crcs.size(); ++i) {
    const Part& part = extent.parts[i];
    Tensor& tensor = tensors_[part.tensor];
    tensor.parts[part.part] = crcs[i];
    if (--tensor.missing != 0) continue;
    for (size_t k = 0; k < tensor.parts.size(); ++k) {
      tensor.crc = format::Crc32Combine(tensor.crc, tensor.parts[k], tensor.bytes[k]);
    }
  }
  extent.taken = true;
  for (size_t i = 0; i < parked_.size() && !crcs.empty();) {
    if (Complete(extents_[parked_[i]])) {
      ready->push_back(parked_[i]);
      parked_[i] = parked_.back();
      parked_.pop_back();
    } else {
      ++i;
    }
  }
}

bool Checksums::Take(uint32_t index, char* memory, std::vector<uint32_t>* ready) {
  const Extent& extent = extents_[index];
  std::vector<uint32_t> crcs;
  if (!extent.taken) {
    for (const Part& part : extent.parts) {
      crcs.push_back(format::Crc32(0, memory + part.offset, part.bytes));
    }
  }
  const base::MutexLock lock(&mutex_);
  AddLocked(index, crcs, ready);
  if (!Complete(extent)) {
    parked_.push_back(index);
    return false;
  }
  for (const Place& place : extent.places) {
    memory[place.offset] =
        static_cast<char>(tensors_[place.tensor].crc >> (kBitsPerByte * place.byte) & 0xff);
  }
  return true;
}

}  // namespace holdfast::writer
