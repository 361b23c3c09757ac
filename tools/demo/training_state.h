// The state of the training: named tensors in a block of memory, and the training steps.
#ifndef HOLDFAST_TOOLS_DEMO_TRAINING_STATE_H_
#define HOLDFAST_TOOLS_DEMO_TRAINING_STATE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "holdfast/load.h"
#include "holdfast/plan.h"

namespace holdfast::demo {

/// \threadsafety One caller at a time; steps and fingerprints start threads.
class TrainingState {
 public:
  /// Makes the tensors of a safetensors file, with its values. If `file` is empty, makes GPT-2
  /// small with its Adam moments, freshly initialised. `threads` 0: one per CPU, at most 8.
  static absl::StatusOr<std::unique_ptr<TrainingState>> Make(const std::string& file,
                                                             uint32_t threads, uint64_t seed);
  ~TrainingState();
  TrainingState(const TrainingState&) = delete;
  TrainingState& operator=(const TrainingState&) = delete;

  /// Makes one training step, which changes every element of every tensor.
  void Step();
  uint64_t steps() const { return steps_; }

  /// Returns the tensors of the state, for SaveRequest::tensors.
  const std::vector<TensorSource>& tensors() const { return tensors_; }
  /// The same memory, to load into.
  std::vector<TensorTarget> Targets() const;
  uint64_t bytes() const { return bytes_; }
  const std::string& origin() const { return origin_; }

  /// Returns one fingerprint per tensor, in the tensors' order. Shares no code with the runtime's
  /// digests.
  std::vector<uint64_t> Fingerprints() const;

  /// Fills every tensor with a pattern that cannot be mistaken for loaded bytes.
  void Poison();

 private:
  TrainingState(uint32_t threads, uint64_t seed) : threads_(threads), seed_(seed) {}
  void Add(const std::string& name, const std::string& dtype, std::vector<int64_t> shape,
           uint64_t bytes);
  void AddGpt2();
  absl::Status Allocate();
  void InParallel(uint64_t count, const std::function<void(uint64_t)>& body) const;

  std::vector<TensorSource> tensors_;
  char* memory_ = nullptr;
  uint64_t memory_bytes_ = 0;
  uint64_t bytes_ = 0;
  uint32_t threads_;
  uint64_t seed_;
  uint64_t steps_ = 0;
  std::string origin_;
};

}  // namespace holdfast::demo

#endif  // HOLDFAST_TOOLS_DEMO_TRAINING_STATE_H_
