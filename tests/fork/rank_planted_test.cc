// Proof that the tests of failing ranks can fail: the other rank finds a trainer that withholds its
// dead worker's failure, or gives no signs of life.
#include <signal.h>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "holdfast/ranks.h"
#include "runtime/base/planted_bugs.h"
#include "tests/testing/child_process.h"
#include "tests/testing/save_test.h"

namespace holdfast::testing {
namespace {

using base::Bug;

class PlantedRanks : public SaveTest {
 protected:
  void TearDown() override {
    base::g_bug = Bug::kNone;
    SaveTest::TearDown();
  }
  CheckpointerOptions Rank(uint32_t rank) const {
    CheckpointerOptions options = SmallOptions(directory());
    options.staging.arena_bytes = 16u << 20;
    options.rank = rank;
    options.world_size = 2;
    return options;
  }
  absl::StatusOr<SaveHandle> Begin(Checkpointer* checkpointer, uint32_t rank) {
    const TrainingState state = TrainingState::Uniform(3, 3u << 20, rank);
    const std::vector<TensorSource> sources = state.Sources();
    return checkpointer->SaveAsync(
        {.name = "step-1", .step = 1, .tensors = sources, .attempt = attempt_});
  }
  /// Returns true if rank 0 has the reason soon after the worker of rank 1 was killed.
  bool ToldOfAKilledWorker() {
    const auto zero = Make(Rank(0));
    CheckpointerOptions slow = Rank(1);
    slow.qos.bytes_per_second_max = 64u << 10;
    const auto one = Make(slow);
    if (zero == nullptr || one == nullptr) return false;
    const auto first = Begin(zero.get(), 0);
    const auto second = Begin(one.get(), 1);
    EXPECT_TRUE(first.ok() && second.ok());
    if (!first.ok() || !second.ok()) return false;
    EXPECT_TRUE(WaitFor([&] { return second->progress().bytes_written > 0; }));
    SendSignal(second->worker_pid(), SIGKILL);
    EXPECT_FALSE(second->WaitDurable(kLong).ok());
    const bool bug = base::g_bug == Bug::kTrainerKeepsFailures;
    const absl::Status status = first->WaitDurable(bug ? absl::Seconds(5) : kLong).status();
    const bool told = absl::StrContains(Text(status), "rank 1 failed");
    (void)first->Cancel();
    (void)first->WaitDurable(kLong);
    return told;
  }
  /// Returns true if rank 0 waits for a rank that is announced and slow.
  bool WaitsForABusyRank() {
    CheckpointerOptions options = Rank(0);
    options.time_liveness_max = absl::Seconds(2);
    const auto zero = Make(options);
    const auto announced = RankAnnouncement::Make({.directory = directory(),
                                                   .name = "step-1",
                                                   .attempt = attempt_,
                                                   .rank = 1,
                                                   .world_size = 2,
                                                   .time_liveness_max = absl::Seconds(2)});
    EXPECT_TRUE(announced.ok()) << announced.status();
    if (zero == nullptr || !announced.ok()) return false;
    const auto begun = Begin(zero.get(), 0);
    EXPECT_TRUE(begun.ok()) << begun.status();
    if (!begun.ok()) return false;
    const bool waits = !WaitFor([&] { return begun->IsDone(); }, absl::Seconds(6));
    (void)begun->Cancel();
    (void)begun->WaitDurable(kLong);
    (*announced)->Abandon(absl::CancelledError("the test is over"));
    return waits;
  }
  AttemptId attempt_ = NewAttemptId();
};

TEST_F(PlantedRanks, TrainerThatKeepsAFailureIsFound) {
  EXPECT_TRUE(ToldOfAKilledWorker());
  base::g_bug = Bug::kTrainerKeepsFailures;
  attempt_ = NewAttemptId();
  EXPECT_FALSE(ToldOfAKilledWorker());
}

TEST_F(PlantedRanks, TrainerWithoutSignsOfLifeIsFound) {
  EXPECT_TRUE(WaitsForABusyRank());
  base::g_bug = Bug::kTrainerGivesNoSigns;
  attempt_ = NewAttemptId();
  EXPECT_FALSE(WaitsForABusyRank());
}

}  // namespace
}  // namespace holdfast::testing
