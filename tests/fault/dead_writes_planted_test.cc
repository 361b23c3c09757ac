// Proof that the test of dead writes can fail: if the end of the process counts as the end of its
// writes, the next save's bytes appear in the dead worker's file.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/base/planted_bugs.h"
#include "runtime/worker/planted_bugs.h"
#include "tests/fault/dead_writes.h"

namespace holdfast::testing {
namespace {

TEST(PlantedBug, TrustInThePidfdIsFoundInTheDeadFile) {
  for (const EngineRung engine : {EngineRung::kUring, EngineRung::kUringFixed}) {
    base::g_bug = base::Bug::kTrustThePidfd;
    const DeadWritesResult result =
        KillWorkersInWrites({.launcher = Launcher::kSpawn, .engine = engine, .kills = 1});
    base::g_bug = base::Bug::kNone;
    if (!result.skipped.empty()) GTEST_SKIP() << result.skipped;
    EXPECT_THAT(result.problems, ::testing::IsEmpty());
    EXPECT_GT(result.pages_dirty, 0u);
  }
}

TEST(PlantedBug, ALockThatEndsWithTheProcessIsFoundInTheDeadFile) {
  worker::testing::g_lock_ends_with_process = true;
  const DeadTrainerResult result = LockDuringWrites(Launcher::kFork, EngineRung::kUring);
  worker::testing::g_lock_ends_with_process = false;
  if (!result.skipped.empty()) GTEST_SKIP() << result.skipped;
  EXPECT_LT(result.pages_at_lock, result.pages_landed);
}

TEST(PlantedBug, MemoryThatIsKeptBehindAClosedCheckpointerIsFoundInTheProcess) {
  base::g_bug = base::Bug::kKeepUnlanded;
  const ClosedResult result = CloseInWrites(Launcher::kSpawn, EngineRung::kUring, absl::Seconds(5));
  base::g_bug = base::Bug::kNone;
  if (!result.skipped.empty()) GTEST_SKIP() << result.skipped;
  EXPECT_THAT(result.problems, ::testing::IsEmpty());
  EXPECT_THAT(result.stays, ::testing::Contains(::testing::HasSubstr("mapping")));
}

}  // namespace
}  // namespace holdfast::testing
