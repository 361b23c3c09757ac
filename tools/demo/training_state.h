// The state that is trained and saved: named tensors in one block of memory, and the steps that
// change them.
#ifndef HOLDFAST_TOOLS_DEMO_TRAINING_STATE_H_
#define HOLDFAST_TOOLS_DEMO_TRAINING_STATE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "holdfast/plan.h"
#include "tools/demo/update_rule.h"

namespace holdfast::demo {

/// \threadsafety One caller at a time; steps and fingerprints use threads of their own.
class TrainingState {
 public:
  /// The tensors of a safetensors file, with its values.
  static absl::StatusOr<std::unique_ptr<TrainingState>> FromFile(const std::string& path,
                                                                 uint32_t threads, uint64_t seed);
  /// GPT-2 small with its Adam moments, freshly initialised.
  static absl::StatusOr<std::unique_ptr<TrainingState>> Gpt2(uint32_t threads, uint64_t seed);

  ~TrainingState();
  TrainingState(const TrainingState&) = delete;
  TrainingState& operator=(const TrainingState&) = delete;

  /// One training step: changes every element of every tensor.
  void Step();
  uint64_t steps() const { return noise_.step; }

  /// What it consists of, for SaveRequest::tensors.
  const std::vector<TensorSource>& tensors() const { return tensors_; }
  uint64_t bytes() const { return bytes_; }
  const std::string& origin() const { return origin_; }

  /// One fingerprint per tensor, in their order.
  std::vector<uint64_t> Fingerprints() const;

  /// Fills every tensor with a pattern, so that nothing of it can be mistaken for loaded bytes.
  void Poison();

 private:
  struct Work {  // a run of a tensor, small enough that threads share the load evenly
    uint32_t tensor;
    uint64_t begin;
    uint64_t bytes;
  };

  TrainingState(uint32_t threads, uint64_t seed);
  absl::Status Allocate();
  void CutWork();
  void StepRun(const Work& work);
  template <typename Body>
  void InParallel(uint64_t count, const Body& body) const;

  std::vector<TensorSource> tensors_;
  std::vector<Work> work_;
  /// Adam: tensor i < adam_ is a parameter, its moments are i + adam_ and i + 2 * adam_.
  uint32_t adam_ = 0;
  char* memory_ = nullptr;
  uint64_t memory_bytes_ = 0;
  uint64_t bytes_ = 0;
  uint32_t threads_;
  StepNoise noise_;
  std::string origin_;
};

}  // namespace holdfast::demo

#endif  // HOLDFAST_TOOLS_DEMO_TRAINING_STATE_H_
