// Which checkpoints a rollback has abandoned.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "holdfast/recovery.h"

namespace holdfast {
namespace {

using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

/// A save: its step, its place in the order of the saves, and the place of its parent; 0: none.
struct Made {
  uint64_t step;
  uint64_t number;
  uint64_t parent = 0;
  std::string name;  // default "s-STEP"
};

std::vector<CheckpointInfo> Of(const std::vector<Made>& saves) {
  std::vector<CheckpointInfo> complete;
  for (const Made& save : saves) {
    CheckpointInfo info;
    info.name = save.name.empty() ? absl::StrCat("s-", save.step) : save.name;
    info.step = save.step;
    info.saved_at = absl::FromUnixSeconds(static_cast<int64_t>(1'700'000'000 + save.number));
    info.attempt = {.high = 1, .low = save.number};
    if (save.parent != 0) info.parent = {.high = 1, .low = save.parent};
    complete.push_back(info);
  }
  return complete;
}

std::vector<std::string> Abandoned(const std::vector<CheckpointInfo>& complete) {
  const std::vector<bool> abandoned = FindAbandoned(complete);
  EXPECT_EQ(abandoned.size(), complete.size());
  std::vector<std::string> names;
  for (size_t i = 0; i < complete.size(); ++i) {
    if (abandoned[i]) names.push_back(complete[i].name);
  }
  return names;
}

TEST(FindAbandoned, FindsNoneInALine) {
  EXPECT_THAT(Abandoned({}), IsEmpty());
  EXPECT_THAT(Abandoned(Of({{100, 1}, {200, 2, 1}, {300, 3, 2}})), IsEmpty());
  EXPECT_THAT(Abandoned(Of({{0, 1}, {0, 2, 1, "s-b"}, {0, 3, 2, "s-c"}})), IsEmpty()) << "no steps";
}

TEST(FindAbandoned, FindsWhatBranchedOff) {
  // 200 and 300 were rolled back to 100. All later steps are higher: only the links show it.
  std::vector<CheckpointInfo> complete =
      Of({{100, 1}, {200, 2, 1}, {300, 3, 2}, {310, 4, 1}, {410, 5, 4}});
  EXPECT_THAT(Abandoned(complete), UnorderedElementsAre("s-200", "s-300"));
  std::reverse(complete.begin(), complete.end());
  EXPECT_THAT(Abandoned(complete), UnorderedElementsAre("s-200", "s-300")) << "in any order";
}

TEST(FindAbandoned, FindsAHigherStepBeforeALowerOneOfTheLine) {
  // Retention has removed the links.
  EXPECT_THAT(Abandoned(Of({{200, 2, 9}, {300, 3, 9}, {110, 4, 9}})),
              UnorderedElementsAre("s-200", "s-300"));
}

TEST(FindAbandoned, ClaimsNothingAcrossAMissingLink) {
  EXPECT_THAT(Abandoned(Of({{100, 1}, {200, 2, 9}, {300, 3, 8}})), IsEmpty());
  std::vector<CheckpointInfo> unrecorded = Of({{300, 1}, {100, 2}});
  for (CheckpointInfo& checkpoint : unrecorded) checkpoint.attempt = checkpoint.parent = {};
  EXPECT_THAT(Abandoned(unrecorded), IsEmpty());
}

TEST(FindAbandoned, JudgesEachSeriesByItsOwnNewest) {
  EXPECT_THAT(Abandoned(Of({{1000, 1, 0, "a-1000"}, {10, 2, 0, "b-10"}})), IsEmpty()) << "two runs";
  // Between two members of the series the run saved "best".
  EXPECT_THAT(Abandoned(Of({{100, 1}, {150, 2, 1, "best"}, {200, 3, 2}, {210, 4, 2}})),
              UnorderedElementsAre("s-200"));
}

TEST(FindAbandoned, TakesACopyForItsOriginal) {
  std::vector<CheckpointInfo> complete = Of({{100, 1}, {200, 2, 1}});
  complete.push_back(complete[0]);
  complete.back().name = "s-99";
  EXPECT_THAT(Abandoned(complete), IsEmpty());
}

}  // namespace
}  // namespace holdfast
