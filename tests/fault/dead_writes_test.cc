// A killed process's direct writes continue in its ring. No byte of a later save enters them, on
// any launcher and rung.
#include <cstdlib>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/fault/dead_writes.h"
#include "tests/testing/settings.h"

namespace holdfast::testing {
namespace {

class DeadWrites : public ::testing::TestWithParam<Setting> {};
INSTANTIATE_TEST_SUITE_P(All, DeadWrites, ::testing::Combine(kProcessLaunchers, kEveryEngine),
                         SettingName);

TEST_P(DeadWrites, CarryNoByteOfTheNextSave) {
  const DeadWritesResult result =
      KillWorkersInWrites({.launcher = std::get<0>(GetParam()),
                           .engine = std::get<1>(GetParam()),
                           .kills = std::getenv("HOLDFAST_LONG") != nullptr ? 200u : 1u});
  if (!result.skipped.empty()) GTEST_SKIP() << result.skipped;
  EXPECT_THAT(result.problems, ::testing::IsEmpty());
  EXPECT_GT(result.pages_written, 0u);
  EXPECT_EQ(result.pages_dirty, 0u) << "of " << result.pages_written;
  RecordProperty("pages_written", static_cast<int>(result.pages_written));
}

// The trainer is dead as well: nobody but the ring holds the save's lock.
TEST_P(DeadWrites, HaveLandedWhenTheLockOfTheSaveIsFree) {
  const DeadTrainerResult result =
      LockDuringWrites(std::get<0>(GetParam()), std::get<1>(GetParam()));
  if (!result.skipped.empty()) GTEST_SKIP() << result.skipped;
  EXPECT_THAT(result.problems, ::testing::IsEmpty());
  EXPECT_GT(result.pages_landed, 0u);
  EXPECT_EQ(result.pages_at_lock, result.pages_landed);
}

// A Checkpointer that is closed waits for no disk, and takes away no memory that a disk reads.
TEST_P(DeadWrites, AreFollowedByTheReleaseOfAClosedCheckpointersMemory) {
  const ClosedResult result =
      CloseInWrites(std::get<0>(GetParam()), std::get<1>(GetParam()), absl::Minutes(1));
  if (!result.skipped.empty()) GTEST_SKIP() << result.skipped;
  EXPECT_THAT(result.problems, ::testing::IsEmpty());
  EXPECT_THAT(result.stays, ::testing::IsEmpty());
  EXPECT_EQ(result.pages_at_release, result.pages_landed);
  // Else the kernel ends a process after its write.
  if (std::get<1>(GetParam()) != EngineRung::kPwrite) {
    EXPECT_LT(result.pages_at_close, result.pages_landed);
  }
}

}  // namespace
}  // namespace holdfast::testing
