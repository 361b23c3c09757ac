// The tensors of one save. Their bytes follow from recipes, so that they can be computed again.
#ifndef HOLDFAST_TOOLS_TRAINER_STATE_H_
#define HOLDFAST_TOOLS_TRAINER_STATE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "holdfast/load.h"
#include "holdfast/plan.h"

namespace holdfast::trainer {

/// A tensor of `states.py`: words of the pool from `at` on, changed by `key`.
struct Recipe {
  std::string name;
  std::string dtype;  ///< As TensorSource::dtype.
  std::vector<int64_t> shape;
  uint64_t bytes = 0;
  uint64_t at = 0;   ///< Index of a word.
  uint64_t key = 0;  ///< Of the mask of each tile of the pool.
};

/// Reads the pool's words. \error errors of the file.
absl::StatusOr<std::vector<uint64_t>> ReadPool(const std::string& path);

/// The name of file `index` of `files` in a plan; of a single one as SaveRequest::tensors has it.
std::string FileName(uint32_t index, uint32_t files, uint32_t rank, uint32_t world_size);

class State {
 public:
  /// The name of the tensor that says which save it is: the number and the rank.
  static constexpr char kId[] = "id";

  /// `device`: of the tensors' memory; null is the host.
  State(const std::vector<Recipe>& recipes, const std::vector<uint64_t>& pool, uint64_t number,
        uint32_t rank, Device* device = nullptr);

  const std::vector<TensorSource>& tensors() const { return tensors_; }

  /// Plans the tensors as `files` safetensors files of an attempt. \error of PlanSafetensors.
  absl::StatusOr<SavePlan> Plan(uint32_t files, uint32_t rank, uint32_t world_size,
                                const AttemptId& attempt) const;

  /// Changes every byte.
  void Mutate();

  /// Compares names, dtypes and shapes, loads every tensor and compares it; returns the first
  /// difference, or an empty text.
  /// \error of the load.
  absl::StatusOr<std::string> Compare(const CheckpointReader& reader) const;

 private:
  void Add(const Recipe& recipe, std::vector<char> bytes);
  std::string OtherEntry(const CheckpointReader& reader) const;

  Device* const device_;
  std::vector<TensorSource> tensors_;
  std::vector<std::vector<char>> bytes_;  // of each tensor
};

}  // namespace holdfast::trainer

#endif  // HOLDFAST_TOOLS_TRAINER_STATE_H_
