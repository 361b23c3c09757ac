// Recovery after every crash of the model. recovery_planted_test.cc proves that these campaigns
// find planted bugs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/crash/campaigns.h"

namespace holdfast::testing {
namespace {

using ::testing::IsEmpty;

class Commits : public ::testing::TestWithParam<CommitCase> {};

TEST_P(Commits, SurviveAKillBeforeEachCall) {
  const Outcome outcome = KillCommits(GetParam());
  EXPECT_THAT(outcome.violations, IsEmpty());
  EXPECT_GT(outcome.states, 30);
  RecordProperty("states", outcome.states);
}

TEST_P(Commits, SurviveAPowerCutAfterEachCallOfTheSaveAndOfItsRecovery) {
  const Outcome outcome = CutPower(GetParam());
  EXPECT_THAT(outcome.violations, IsEmpty());
  EXPECT_GT(outcome.states, 100);
  RecordProperty("states", outcome.states);
}

INSTANTIATE_TEST_SUITE_P(TwoRanks, Commits,
                         ::testing::Values(CommitCase{}, CommitCase{.replace = true},
                                           CommitCase{.replace = true, .exchange = false}),
                         [](const auto& tested) {
                           return std::string(tested.param.replace ? "Replacing" : "New") +
                                  (tested.param.exchange ? "" : "WithoutExchange");
                         });

TEST(Recoveries, SurviveAKillBeforeEachCall) {
  for (const bool exchange : {true, false}) {
    const Outcome outcome = KillRecoveries(exchange);
    EXPECT_THAT(outcome.violations, IsEmpty());
    EXPECT_GT(outcome.states, 30);
  }
}

TEST(Removals, TakeNoFileOfOthersWhereverACrashEndedThem) {
  const Outcome outcome = KillRemovals();
  EXPECT_THAT(outcome.violations, IsEmpty());
  EXPECT_GT(outcome.states, 15);
}

TEST(Recoveries, LeaveARunningSaveUntouchedWhereverAnotherRankDied) {
  const Outcome outcome = KillOneRankOfARunningSave();
  EXPECT_THAT(outcome.violations, IsEmpty());
  EXPECT_GT(outcome.states, 10);
}

TEST(Recoveries, NeverPromoteOddities) { EXPECT_THAT(Oddities().violations, IsEmpty()); }

}  // namespace
}  // namespace holdfast::testing
