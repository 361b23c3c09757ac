// A plan as kept between saves: the constant data of a structure, packed into a few runs of memory.
// The addresses of the tensors' bytes are not included.
#ifndef HOLDFAST_RUNTIME_FORMAT_PACKED_PLAN_H_
#define HOLDFAST_RUNTIME_FORMAT_PACKED_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "holdfast/plan.h"

namespace holdfast::format {

/// Names, dtypes, shapes and places: 48 bytes for each tensor, its text, and 8 for each dimension.
class TensorTable {
 public:
  /// Reserves memory for these totals.
  void Reserve(size_t tensors, size_t text_bytes, size_t dimensions);
  void Add(absl::string_view name, absl::string_view dtype, absl::Span<const int64_t> shape,
           uint32_t file, uint64_t begin, uint64_t end);

  size_t size() const { return rows_.size(); }
  absl::string_view name(size_t i) const {
    return absl::string_view(text_).substr(rows_[i].text, rows_[i].name_bytes);
  }
  absl::string_view dtype(size_t i) const {
    return absl::string_view(text_).substr(rows_[i].text + rows_[i].name_bytes,
                                           rows_[i].dtype_bytes);
  }
  absl::Span<const int64_t> shape(size_t i) const {
    return absl::MakeConstSpan(dimensions_).subspan(rows_[i].dimensions, rows_[i].rank);
  }
  uint32_t file(size_t i) const { return rows_[i].file; }
  uint64_t begin(size_t i) const { return rows_[i].begin; }
  uint64_t end(size_t i) const { return rows_[i].end; }

  /// The memory of the table.
  size_t memory_bytes() const;

 private:
  struct Row {
    uint64_t begin = 0;
    uint64_t end = 0;
    uint64_t text = 0;        // of the name; the dtype follows
    uint64_t dimensions = 0;  // of the first dimension
    uint32_t name_bytes = 0;
    uint32_t dtype_bytes = 0;
    uint32_t rank = 0;
    uint32_t file = 0;
  };
  std::vector<Row> rows_;
  std::string text_;
  std::vector<int64_t> dimensions_;
};

/// A run of a file's bytes: a literal, or tensors that are adjacent in the table and in the file.
/// Tensors without bytes may be included.
struct PackedRun {
  static constexpr uint32_t kTensors = 0xffffffffu;
  uint32_t literal = kTensors;  // Index into PackedPlan::literals, or kTensors.
  uint32_t tensor_first = 0;
  uint32_t tensor_count = 0;
};

struct PackedFile {
  std::string name;
  uint64_t bytes = 0;
  std::vector<PackedRun> runs;  // The runs cover [0, bytes) in order.
  bool replicated = false;      // See PlannedFile.
};

struct PackedPlan {
  std::vector<PackedFile> files;
  std::vector<std::string> literals;
  TensorTable tensors;
  /// Filled by CountPacked.
  uint64_t piece_count = 0;            // Parts of literals and tensors, cut at the chunks' borders.
  uint64_t manifest_tensor_bytes = 0;  // Length of the array `tensors` in a manifest.

  /// Bytes of the files that `rank` writes.
  uint64_t WrittenBytes(uint32_t rank) const;
  bool has_replicas() const;
  size_t memory_bytes() const;
};

/// Fills the counts of an otherwise complete plan.
void CountPacked(PackedPlan* plan);

/// Packs a valid plan. A plan without segments gets files without runs.
PackedPlan Pack(const SavePlan& plan);

}  // namespace holdfast::format

#endif  // HOLDFAST_RUNTIME_FORMAT_PACKED_PLAN_H_
