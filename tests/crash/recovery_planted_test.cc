// Plants each mistake that recovery must not make; the campaign for the mistake must find the bug.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/base/planted_bugs.h"
#include "runtime/worker/planted_bugs.h"
#include "tests/crash/campaigns.h"

namespace holdfast::testing {
namespace {

using base::Bug;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class PlantedBug : public ::testing::Test {
 protected:
  void TearDown() override {
    base::g_bug = Bug::kNone;
    worker::testing::g_remove_unnamed_files = false;
    worker::testing::g_remove_before_parent_sync = false;
  }
};

TEST_F(PlantedBug, NoneIsNotSeen) { EXPECT_THAT(Oddities().violations, IsEmpty()); }

TEST_F(PlantedBug, PromotionWithoutTheSizesIsSeen) {
  base::g_bug = Bug::kPromoteWithoutSizes;
  EXPECT_THAT(Oddities().violations, Contains(HasSubstr("not what was sealed")));
}

TEST_F(PlantedBug, PromotionOfAnotherAttemptIsSeen) {
  base::g_bug = Bug::kPromoteOtherAttempt;
  EXPECT_THAT(Oddities().violations, Contains(HasSubstr("they were promoted")));
}

TEST_F(PlantedBug, ReplacingWithoutProofIsSeen) {
  base::g_bug = Bug::kReplaceUnproven;
  EXPECT_THAT(Oddities().violations, Contains(HasSubstr("replaced without proof")));
}

TEST_F(PlantedBug, RemovingWithoutProofIsSeen) {
  base::g_bug = Bug::kRemoveUnproven;
  EXPECT_THAT(Oddities().violations, Contains(HasSubstr("removed without proof")));
}

TEST_F(PlantedBug, RemovingFilesOfOthersIsSeen) {
  worker::testing::g_remove_unnamed_files = true;
  EXPECT_THAT(KillRemovals().violations, Contains(HasSubstr("a file of others was removed")));
}

TEST_F(PlantedBug, CleaningUpBeforePromotingIsSeen) {
  base::g_bug = Bug::kRemoveBeforePromotion;
  EXPECT_THAT(KillCommits({}).violations, Contains(HasSubstr("was thrown away")));
}

TEST_F(PlantedBug, PromotionWithoutSyncingTheDirectoryIsSeen) {
  base::g_bug = Bug::kPromoteWithoutDirectorySync;
  EXPECT_THAT(CutPower({}).violations, Contains(HasSubstr("was reported complete and is lost")));
}

TEST_F(PlantedBug, PromotionWithoutACommitRecordIsSeen) {
  base::g_bug = Bug::kPromoteWithoutRecord;
  EXPECT_THAT(KillCommits({}).violations, Contains(HasSubstr("was thrown away")));
}

TEST_F(PlantedBug, ACommitRecordThatIsNamedBeforeItsFsyncIsSeen) {
  EXPECT_THAT(CutPower({.sync_record = false}).violations,
              Contains(HasSubstr("an acknowledged save is lost")));
}

TEST_F(PlantedBug, ReportingWithoutSyncingTheParentIsSeen) {
  base::g_bug = Bug::kReportWithoutParentSync;
  EXPECT_THAT(CutPower({}).violations, Contains(HasSubstr("was reported complete and is lost")));
}

TEST_F(PlantedBug, RemovingTheReplacedOneBeforeTheExchangeIsDurableIsSeen) {
  base::g_bug = Bug::kRemoveBeforeParentSync;
  worker::testing::g_remove_before_parent_sync = true;  // the removal syncs once more
  EXPECT_THAT(CutPower({.replace = true}).violations,
              Contains(HasSubstr("neither the old nor the new one")));
}

TEST_F(PlantedBug, IgnoringLocksIsSeen) {
  base::g_bug = Bug::kIgnoreLocks;
  EXPECT_THAT(KillOneRankOfARunningSave().violations,
              Contains(HasSubstr("acted on a running save")));
}

TEST_F(PlantedBug, LettingAnOrphanGoOnIsSeen) {
  base::g_bug = Bug::kNoFence;
  EXPECT_THAT(Oddities().violations, Contains(HasSubstr("behind the new trainer's back")));
}

}  // namespace
}  // namespace holdfast::testing
