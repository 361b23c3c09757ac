#include "runtime/format/packed_plan.h"

#include <algorithm>

#include "runtime/format/manifest.h"

namespace holdfast::format {

void TensorTable::Reserve(size_t tensors, size_t text_bytes, size_t dimensions) {
  rows_.reserve(tensors);
  text_.reserve(text_bytes);
  dimensions_.reserve(dimensions);
}

void TensorTable::Add(absl::string_view name, absl::string_view dtype,
                      absl::Span<const int64_t> shape, uint32_t file, uint64_t begin,
                      uint64_t end) {
  rows_.push_back({.begin = begin,
                   .end = end,
                   .text = text_.size(),
                   .dimensions = dimensions_.size(),
                   .name_bytes = static_cast<uint32_t>(name.size()),
                   .dtype_bytes = static_cast<uint32_t>(dtype.size()),
                   .rank = static_cast<uint32_t>(shape.size()),
                   .file = file});
  text_.append(name.data(), name.size());
  text_.append(dtype.data(), dtype.size());
  dimensions_.insert(dimensions_.end(), shape.begin(), shape.end());
}

size_t TensorTable::memory_bytes() const {
  return rows_.size() * sizeof(Row) + text_.size() + dimensions_.size() * sizeof(int64_t);
}

uint64_t PackedPlan::WrittenBytes(uint32_t rank) const {
  uint64_t bytes = 0;
  for (const PackedFile& file : files) bytes += file.replicated && rank != 0 ? 0 : file.bytes;
  return bytes;
}

bool PackedPlan::has_replicas() const {
  return std::any_of(files.begin(), files.end(),
                     [](const PackedFile& file) { return file.replicated; });
}

size_t PackedPlan::memory_bytes() const {
  size_t bytes = tensors.memory_bytes();
  for (const std::string& literal : literals) bytes += literal.size() + sizeof(literal);
  for (const PackedFile& file : files) bytes += file.runs.size() * sizeof(PackedRun);
  return bytes;
}

void CountPacked(PackedPlan* plan) {
  plan->piece_count = 0;
  const auto count = [plan](uint64_t begin, uint64_t end) {
    if (begin != end) plan->piece_count += (end - 1) / kChunkBytes - begin / kChunkBytes + 1;
  };
  for (const PackedFile& file : plan->files) {
    uint64_t at = 0;
    for (const PackedRun& run : file.runs) {
      if (run.literal != PackedRun::kTensors) {
        count(at, at + plan->literals[run.literal].size());
        at += plan->literals[run.literal].size();
      }
      for (uint32_t i = run.tensor_first; i < run.tensor_first + run.tensor_count; ++i) {
        count(plan->tensors.begin(i), plan->tensors.end(i));
        if (plan->tensors.begin(i) != plan->tensors.end(i)) at = plan->tensors.end(i);
      }
    }
  }
  plan->manifest_tensor_bytes = ManifestTensorBytes(*plan);
}

PackedPlan Pack(const SavePlan& plan) {
  PackedPlan packed;
  size_t text_bytes = 0;
  size_t dimensions = 0;
  for (const PlannedTensor& tensor : plan.tensors) {
    text_bytes += tensor.name.size() + tensor.dtype.size();
    dimensions += tensor.shape.size();
  }
  packed.tensors.Reserve(plan.tensors.size(), text_bytes, dimensions);
  for (const PlannedTensor& tensor : plan.tensors) {
    packed.tensors.Add(tensor.name, tensor.dtype, tensor.shape, tensor.file, tensor.begin,
                       tensor.end);
  }
  for (const PlannedFile& planned : plan.files) {
    PackedFile& file = packed.files.emplace_back();
    file.name = planned.name;
    file.bytes = planned.bytes;
    file.replicated = planned.replicated;
    for (const Segment& segment : planned.segments) {
      if (segment.tensor == Segment::kLiteral) {
        file.runs.push_back({.literal = static_cast<uint32_t>(packed.literals.size())});
        packed.literals.push_back(segment.literal);
        continue;
      }
      PackedRun* const last = file.runs.empty() ? nullptr : &file.runs.back();
      if (last != nullptr && last->literal == PackedRun::kTensors &&
          last->tensor_first + last->tensor_count == segment.tensor) {
        ++last->tensor_count;
      } else {
        file.runs.push_back({.tensor_first = segment.tensor, .tensor_count = 1});
      }
    }
  }
  CountPacked(&packed);
  return packed;
}

}  // namespace holdfast::format
