#include "tools/trainer/state.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

namespace holdfast::trainer {
namespace {

constexpr uint64_t kStride = 0x9e3779b97f4a7c15;  // as in states.py

std::vector<char> BytesOf(const Recipe& recipe, const std::vector<uint64_t>& pool) {
  constexpr size_t kWord = sizeof(uint64_t);
  std::vector<char> bytes((recipe.bytes + kWord - 1) / kWord * kWord);  // whole words, cut below
  const size_t tile_words = pool.size();
  size_t at = 0;
  for (uint64_t tile = 0; at < bytes.size(); ++tile) {
    const uint64_t mask = (recipe.key + tile * kStride) ^ (uint64_t{1} << 63);
    size_t from = recipe.at % tile_words;
    for (size_t word = 0; word < tile_words && at < bytes.size(); ++word, at += kWord) {
      const uint64_t value = pool[from] ^ mask;
      std::memcpy(bytes.data() + at, &value, kWord);
      if (++from == tile_words) from = 0;
    }
  }
  bytes.resize(recipe.bytes);
  if (recipe.dtype == "BOOL") {
    for (char& byte : bytes) byte &= 1;
  }
  return bytes;
}

std::vector<char> IdBytes(uint64_t number, uint32_t rank) {
  const uint64_t words[] = {number, rank};
  std::vector<char> bytes(sizeof(words));
  std::memcpy(bytes.data(), words, sizeof(words));
  return bytes;
}

}  // namespace

absl::StatusOr<std::vector<uint64_t>> ReadPool(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return absl::ErrnoToStatus(errno, absl::StrCat("open ", path));
  std::vector<uint64_t> words(static_cast<size_t>(file.tellg()) / sizeof(uint64_t));
  file.seekg(0);
  file.read(reinterpret_cast<char*>(words.data()),
            static_cast<std::streamsize>(words.size() * sizeof(uint64_t)));
  if (!file || words.empty()) return absl::DataLossError(absl::StrCat("read ", path));
  return words;
}

std::string FileName(uint32_t index, uint32_t files, uint32_t rank, uint32_t world_size) {
  if (files == 1) return absl::StrFormat("model-%05u-of-%05u.safetensors", rank, world_size);
  return absl::StrCat("model-", rank, "-", index, ".safetensors");
}

State::State(const std::vector<Recipe>& recipes, const std::vector<uint64_t>& pool, uint64_t number,
             uint32_t rank, Device* device)
    : device_(device) {
  Add({.name = kId, .dtype = "I64", .shape = {2}}, IdBytes(number, rank));
  for (const Recipe& recipe : recipes) Add(recipe, BytesOf(recipe, pool));
}

void State::Add(const Recipe& recipe, std::vector<char> bytes) {
  bytes_.push_back(std::move(bytes));
  tensors_.push_back({.name = recipe.name,
                      .dtype = recipe.dtype,
                      .shape = recipe.shape,
                      .data = bytes_.back().data(),
                      .bytes = bytes_.back().size(),
                      .device = device_});
}

absl::StatusOr<SavePlan> State::Plan(uint32_t files, uint32_t rank, uint32_t world_size,
                                     const AttemptId& attempt) const {
  SavePlan plan;
  for (uint32_t file = 0; file < files; ++file) {
    std::vector<TensorSource> sources;
    for (size_t i = file; i < tensors_.size(); i += files) sources.push_back(tensors_[i]);
    auto part =
        PlanSafetensors(FileName(file, files, rank, world_size), sources, {.attempt = attempt});
    if (!part.ok()) return part.status();
    for (PlannedFile& planned : part->files) {
      for (Segment& segment : planned.segments) {
        if (segment.tensor != Segment::kLiteral)
          segment.tensor += static_cast<uint32_t>(plan.tensors.size());
      }
      plan.files.push_back(std::move(planned));
    }
    for (PlannedTensor& tensor : part->tensors) {
      tensor.file = file;
      plan.tensors.push_back(std::move(tensor));
    }
  }
  return plan;
}

void State::Mutate() {
  for (std::vector<char>& bytes : bytes_) {
    for (char& byte : bytes) byte = static_cast<char>(~byte);
  }
}

std::string State::OtherEntry(const CheckpointReader& reader) const {
  std::map<absl::string_view, const PlannedTensor*> entries;
  for (const PlannedTensor& entry : reader.tensors()) entries[entry.name] = &entry;
  for (const TensorSource& tensor : tensors_) {
    const auto entry = entries.find(tensor.name);
    if (entry == entries.end()) return absl::StrCat(tensor.name, " is absent");
    if (entry->second->dtype != tensor.dtype || entry->second->shape != tensor.shape)
      return absl::StrCat(tensor.name, " is of another dtype or shape");
    entries.erase(entry);
  }
  return entries.empty() ? "" : absl::StrCat(entries.begin()->first, " was never saved");
}

absl::StatusOr<std::string> State::Compare(const CheckpointReader& reader) const {
  if (std::string other = OtherEntry(reader); !other.empty()) return other;
  std::vector<std::vector<char>> loaded;
  std::vector<TensorTarget> targets;
  for (const TensorSource& tensor : tensors_) {
    loaded.emplace_back(tensor.bytes);
    targets.push_back({.name = tensor.name, .data = loaded.back().data(), .bytes = tensor.bytes});
  }
  const auto report = reader.Load(targets, LoadOptions());
  if (!report.ok()) return report.status();
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (loaded[i] != bytes_[i]) return absl::StrCat(tensors_[i].name, " differs");
  }
  return std::string();
}

}  // namespace holdfast::trainer
