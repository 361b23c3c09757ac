// Which checkpoints retention removes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "holdfast/recovery.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// Checkpoints "s-STEP", saved in this order.
std::vector<CheckpointInfo> Saved(const std::vector<uint64_t>& steps) {
  std::vector<CheckpointInfo> complete;
  for (uint64_t step : steps) {
    CheckpointInfo info;
    info.name = absl::StrCat("s-", step);
    info.step = step;
    info.saved_at = absl::FromUnixSeconds(1'700'000'000) + absl::Seconds(complete.size());
    complete.push_back(info);
  }
  return complete;
}

/// The same, each with an attempt, and the one before as its parent.
std::vector<CheckpointInfo> Chain(const std::vector<uint64_t>& steps) {
  std::vector<CheckpointInfo> complete = Saved(steps);
  for (size_t i = 0; i < complete.size(); ++i) {
    complete[i].attempt = {.high = 1, .low = i + 1};
    if (i > 0) complete[i].parent = complete[i - 1].attempt;
  }
  return complete;
}

TEST(SelectForRemoval, KeepsEverythingByDefault) {
  EXPECT_THAT(SelectForRemoval(Saved({1, 2, 3}), {}, "s-3"), IsEmpty());
  EXPECT_THAT(SelectForRemoval(Saved({1, 2, 3}), {.keep_last = 0, .keep_every = 2}, "s-3"),
              IsEmpty());
}

TEST(SelectForRemoval, LetsTheOldestGoFirst) {
  EXPECT_THAT(SelectForRemoval(Saved({1, 2, 3, 4}), {.keep_last = 2}, "s-4"),
              ElementsAre("s-1", "s-2"));
}

TEST(SelectForRemoval, GoesByTheTimeOfTheSaves) {
  EXPECT_THAT(SelectForRemoval(Saved({100, 200, 300, 110}), {.keep_last = 2}, "s-110"),
              ElementsAre("s-100", "s-200"));
  std::vector<CheckpointInfo> listed = Saved({100, 200, 300, 110});
  std::reverse(listed.begin(), listed.end());
  EXPECT_THAT(SelectForRemoval(listed, {.keep_last = 2}, "s-110"), ElementsAre("s-100", "s-200"));
}

TEST(SelectForRemoval, LetsAnAbandonedBranchGoFirst) {
  // 300 was rolled back to 100; 110 and 120 followed.
  std::vector<CheckpointInfo> complete = Chain({100, 200, 300, 110, 120});
  complete[3].parent = complete[0].attempt;
  EXPECT_THAT(SelectForRemoval(complete, {.keep_last = 4}, "s-120"), ElementsAre("s-200"));
  EXPECT_THAT(SelectForRemoval(complete, {.keep_last = 3}, "s-120"), ElementsAre("s-200", "s-300"));
  EXPECT_THAT(SelectForRemoval(complete, {.keep_last = 2}, "s-120"),
              ElementsAre("s-100", "s-200", "s-300"));
  EXPECT_THAT(SelectForRemoval(complete, {.keep_last = 2, .keep_every = 100}, "s-120"), IsEmpty())
      << "a milestone stays on whatever branch";
}

TEST(SelectForRemoval, KeepsMultiplesBesides) {
  EXPECT_THAT(SelectForRemoval(Saved({0, 50, 100, 150, 200, 250}),
                               {.keep_last = 1, .keep_every = 100}, "s-250"),
              ElementsAre("s-50", "s-150"));
}

TEST(SelectForRemoval, NeverLetsTheNewestGo) {
  for (uint32_t keep = 1; keep < 5; ++keep) {
    const auto names = SelectForRemoval(Saved({1, 2, 3}), {.keep_last = keep}, "s-3");
    EXPECT_THAT(names, ::testing::Not(::testing::Contains("s-3")));
  }
  EXPECT_THAT(SelectForRemoval(Saved({5}), {.keep_last = 1}, "s-5"), IsEmpty());
  EXPECT_THAT(SelectForRemoval({}, {.keep_last = 1}, "s-5"), IsEmpty());
}

TEST(SelectForRemoval, NeverLetsGoWhatHasJustBecomeDurable) {
  EXPECT_THAT(SelectForRemoval(Saved({1, 2, 3}), {.keep_last = 1}, "s-1"), ElementsAre("s-2"))
      << "a long save that ended after younger ones";
}

TEST(SelectForRemoval, CountsOnlyWholeOnesAsKept) {
  const auto is_whole = [](const CheckpointInfo& info) { return info.step != 4; };
  EXPECT_THAT(SelectForRemoval(Saved({1, 2, 3, 4, 5}), {.keep_last = 2}, "s-5", is_whole),
              ElementsAre("s-1", "s-2"));
  EXPECT_THAT(SelectForRemoval(Saved({3, 4}), {.keep_last = 2}, "s-4", is_whole), IsEmpty());
}

TEST(SelectForRemoval, LeavesOtherSeriesAlone) {
  std::vector<CheckpointInfo> complete = Saved({1, 2, 3});
  complete[0].name = "best";
  complete[1].name = "s-2-final";
  EXPECT_THAT(SelectForRemoval(complete, {.keep_last = 1}, "s-3"), IsEmpty());
}

}  // namespace
}  // namespace holdfast
