// One run of the demo: a training loop whose state is saved while it goes on.
#ifndef HOLDFAST_TOOLS_DEMO_SESSION_H_
#define HOLDFAST_TOOLS_DEMO_SESSION_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "holdfast/checkpointer.h"
#include "tools/demo/live_progress.h"
#include "tools/demo/options.h"
#include "tools/demo/outcome.h"
#include "tools/demo/saboteur.h"
#include "tools/demo/training_state.h"

namespace holdfast::demo {

/// \threadsafety One thread.
class Session {
 public:
  Session(const Options& options, LiveProgress* progress);

  /// Makes the state. Before anything else.
  absl::Status Prepare();

  /// Trains and saves (with Mischief::kMutateSealed one of the saves is attacked), then proves what
  /// was saved. \error what kept it from going on; faults that were found are in the outcome.
  absl::Status TrainAndSave();

  /// Shows what only read-back finds: the same damage without and with it.
  absl::Status ShowReadBack();

  const Outcome& outcome() const { return outcome_; }

 private:
  CheckpointerOptions MakeOptions() const;
  absl::Status Open(const CheckpointerOptions& options);
  void TrainSteps(uint32_t steps);
  absl::Status StartSave(const std::string& name, bool attack);
  void TakeEnded(bool wait);
  absl::Status Prove();
  absl::Status VerifyRow(SaveRow* row);
  absl::Status LoadNewest();
  void Judge();
  double MedianStepSeconds() const;
  /// One round of ShowReadBack; true when the damage went the way that was to be shown.
  absl::StatusOr<bool> AttackOnce(bool read_back, uint32_t attempt);
  absl::Status AttackUntilShown(bool read_back);
  uint32_t Victim() const;

  const Options options_;
  LiveProgress* const progress_;
  Outcome outcome_;
  std::vector<double> step_seconds_;
  uint64_t file_bytes_ = 0;
  std::unique_ptr<TrainingState> state_;
  // After what a checkpointer's threads call, so that they end first.
  std::unique_ptr<Saboteur> saboteur_;
  std::unique_ptr<Checkpointer> checkpointer_;
};

}  // namespace holdfast::demo

#endif  // HOLDFAST_TOOLS_DEMO_SESSION_H_
