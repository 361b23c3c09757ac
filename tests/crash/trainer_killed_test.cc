// Kills a real trainer in the middle of a real save, for every launcher with a worker process, and
// recovers from the orphan worker.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <vector>

#include "absl/time/clock.h"
#include "holdfast/checkpointer.h"
#include "holdfast/recovery.h"
#include "tests/testing/child_process.h"
#include "tests/testing/settings.h"
#include "tests/testing/training_state.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::ScratchDirectory;
using ::testing::SizeIs;
using testing::SmallOptions;
using testing::TrainingState;

constexpr uint64_t kSeed = 7;

TrainingState State() { return TrainingState::Uniform(3, 2u << 20, kSeed); }

class TrainerKilled : public ::testing::TestWithParam<Launcher> {
 protected:
  void TearDown() override { Kill(); }

  /// Starts a trainer process with one staged save whose worker writes at most `bytes_per_second`.
  /// Returns after the last extent was sealed and the first one written.
  void StartSaving(uint64_t bytes_per_second) {
    int ready[2];
    ASSERT_EQ(pipe2(ready, O_CLOEXEC), 0);
    trainer_ = fork();
    if (trainer_ == 0) {
      CheckpointerOptions options = SmallOptions(scratch_.path());
      options.launcher = GetParam();
      options.qos.bytes_per_second_max = bytes_per_second;
      auto checkpointer = Checkpointer::Create(options);
      if (!checkpointer.ok()) _exit(1);
      const TrainingState state = State();
      const std::vector<TensorSource> sources = state.Sources();
      auto handle = (*checkpointer)->SaveAsync({.name = "step-1", .step = 1, .tensors = sources});
      // Captured is not sealed: a worker without its trainer can finish only sealed extents. Sealed
      // is not begun: a worker that finds its directory fenced at the start removes it and ends.
      while (handle.ok() && (handle->progress().bytes_sealed < handle->progress().bytes_total ||
                             handle->progress().bytes_written == 0)) {
        absl::SleepFor(absl::Milliseconds(1));
      }
      if (!handle.ok() || write(ready[1], "r", 1) != 1) _exit(1);
      while (true) pause();
    }
    close(ready[1]);
    char byte = 0;
    ASSERT_EQ(read(ready[0], &byte, 1), 1) << "the trainer did not come to its save";
    close(ready[0]);
  }

  void Kill() {
    if (trainer_ <= 0) return;
    testing::SendSignal(trainer_, SIGKILL);
    waitpid(trainer_, nullptr, 0);
    trainer_ = 0;
  }

  RecoveryReport Recovered(absl::Duration wait) {
    auto report = Recover(scratch_.path(), {.wait_for_orphans = wait});
    EXPECT_TRUE(report.ok()) << report.status();
    return report.ok() ? *std::move(report) : RecoveryReport{};
  }

  ScratchDirectory scratch_;
  pid_t trainer_ = 0;
};

INSTANTIATE_TEST_SUITE_P(All, TrainerKilled, testing::kProcessLaunchers, testing::LauncherName);

TEST_P(TrainerKilled, TheOrphanFinishesAndRecoveryWaitsForIt) {
  StartSaving(16u << 20);
  Kill();
  const RecoveryReport report = Recovered(absl::Minutes(4));
  EXPECT_THAT(report.fenced, IsEmpty());
  EXPECT_THAT(report.kept_incomplete, IsEmpty());
  ASSERT_THAT(report.complete, SizeIs(1));
  EXPECT_TRUE(State().CompareWith(report.complete[0].path).ok());
  EXPECT_THAT(scratch_.Names(), ElementsAre("step-1"));
}

TEST_P(TrainerKilled, WhileItLivesItsSaveIsLeftAloneAndAfterwardsTheOrphanIsFenced) {
  // Slow enough to run until recovery looks, fast enough to end before the test.
  StartSaving(2u << 20);
  RecoveryReport report = Recovered(absl::ZeroDuration());
  EXPECT_THAT(report.fenced, IsEmpty());
  EXPECT_THAT(report.removed, IsEmpty());
  ASSERT_THAT(report.kept_incomplete, ElementsAre(HasSubstr("a save is running")));

  Kill();
  report = Recovered(absl::ZeroDuration());
  ASSERT_THAT(report.fenced, SizeIs(1)) << "the orphan ended sooner than its rate allows";
  EXPECT_THAT(report.complete, IsEmpty());
  // The lock shows the worker's end. The worker must not have committed.
  const int fenced = open((scratch_.path() + "/" + report.fenced[0]).c_str(), O_RDONLY);
  ASSERT_GE(fenced, 0);
  ASSERT_EQ(flock(fenced, LOCK_EX), 0);
  close(fenced);
  report = Recovered(absl::ZeroDuration());
  EXPECT_THAT(report.complete, IsEmpty());
  EXPECT_THAT(report.removed, SizeIs(1));
  EXPECT_THAT(scratch_.Names(), IsEmpty());
}

}  // namespace
}  // namespace holdfast
