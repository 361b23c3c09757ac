// The time in which a loop did not run.
#include "runtime/sys/own_gap.h"

#include <gtest/gtest.h>

namespace holdfast::sys {
namespace {

TEST(OwnGap, IsNoRoundOfTheLoop) {
  OwnGap gap;
  EXPECT_EQ(gap.Round(100 * kNsPerSecond), 0u);
  EXPECT_EQ(gap.Round(104 * kNsPerSecond), 0u);
  EXPECT_EQ(gap.Round(110 * kNsPerSecond), 6 * kNsPerSecond);
  EXPECT_EQ(gap.Round(109 * kNsPerSecond), 0u) << "another clock";
  EXPECT_EQ(gap.Round(111 * kNsPerSecond, kNsPerSecond), 2 * kNsPerSecond);
}

TEST(OwnGap, MovesTheBeginOfASilence) {
  uint64_t since = 10;
  OwnGap::Forgive(0, 100, &since);
  EXPECT_EQ(since, 10u);
  OwnGap::Forgive(50, 100, &since);
  EXPECT_EQ(since, 60u);
  OwnGap::Forgive(50, 100, &since);
  EXPECT_EQ(since, 100u) << "not into the future";
}

}  // namespace
}  // namespace holdfast::sys
