// A small training state, its directory, and its loading: shared by tests of whole saves.
#ifndef HOLDFAST_TESTS_TESTING_TRAINING_STATE_H_
#define HOLDFAST_TESTS_TESTING_TRAINING_STATE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "holdfast/checkpointer.h"
#include "holdfast/plan.h"

namespace holdfast::testing {

/// A directory below TMPDIR (default /tmp), removed with its contents.
class ScratchDirectory {
 public:
  ScratchDirectory();
  ~ScratchDirectory();
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;
  const std::string& path() const { return path_; }
  /// Names of its entries, sorted.
  std::vector<std::string> Names() const;

 private:
  std::string path_;
};

/// Named host tensors with bytes made from a seed, so that a test needs no copy of a saved state.
class TrainingState {
 public:
  struct Tensor {
    std::string name;
    std::string dtype;
    std::vector<int64_t> shape;
    std::vector<char> bytes;
  };

  /// `count` F32 tensors of about `tensor_bytes` each (odd sizes, so that they cross chunk borders
  /// anywhere).
  static TrainingState Uniform(uint32_t count, uint64_t tensor_bytes, uint64_t seed);
  /// Every dtype, 0-d, zero-size, one byte, across chunk borders, names in several scripts.
  static TrainingState Assorted(uint64_t seed);

  /// A training step: every byte changes.
  void Step(uint64_t seed);
  std::vector<TensorSource> Sources() const;
  uint64_t bytes() const;
  std::vector<Tensor>& tensors() { return tensors_; }
  const std::vector<Tensor>& tensors() const { return tensors_; }

  /// Loads the checkpoint at `path` with verification and compares every byte with this state.
  absl::Status CompareWith(const std::string& path) const;

 private:
  std::vector<Tensor> tensors_;
};

/// Options that suit tests: a small arena, short deadlines.
CheckpointerOptions SmallOptions(const std::string& directory);

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_TESTING_TRAINING_STATE_H_
