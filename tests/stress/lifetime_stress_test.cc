// No memory is reused before its writer is provably done: for all launchers and engines, on the
// best pages of the machine and on small pages, under an allocator that refills released memory at
// once. HOLDFAST_LONG=1 runs ten thousand saves.
#include <cstdlib>

#include "gtest/gtest.h"
#include "tests/stress/hostile_saves.h"
#include "tests/testing/settings.h"

namespace holdfast::testing {
namespace {

constexpr uint32_t kCombinations = 12;

uint32_t SavesPerCombination() {
  constexpr uint32_t kLongSaves = 10'000;
  return std::getenv("HOLDFAST_LONG") != nullptr ? (kLongSaves + kCombinations - 1) / kCombinations
                                                 : 8;
}

class Lifetime : public ::testing::TestWithParam<Setting> {
 protected:
  void SetUp() override { HOLDFAST_SKIP_WITHOUT_RING(std::get<1>(GetParam())); }
  static void ExpectClean(HostileOptions options) {
    options.launcher = std::get<0>(GetParam());
    options.engine = std::get<1>(GetParam());
    // Every other case, and of each combination at least one: every engine and every launcher runs
    // on both kinds of pages.
    const int square = static_cast<int>(options.launcher) + static_cast<int>(options.engine) +
                       static_cast<int>(options.streamed);
    options.pages = square % 2 == 0 ? PageRung::kAuto : PageRung::kSmall;
    const HostileResult result = RunHostileSaves(options);
    EXPECT_EQ(result.saves, options.saves);
    EXPECT_GE(result.refills, options.saves);
    if (options.pages != PageRung::kAuto) {
      EXPECT_EQ(result.pages, options.pages);
    }
    for (const std::string& problem : result.problems) ADD_FAILURE() << problem;
  }
};

INSTANTIATE_TEST_SUITE_P(All, Lifetime, ::testing::Combine(kEveryLauncher, kEveryEngine),
                         SettingName);

TEST_P(Lifetime, NoDirtyByteReachesTheDiskWithSeveralSavesInFlight) {
  ExpectClean({.saves = SavesPerCombination()});
}

TEST_P(Lifetime, NoDirtyByteReachesTheDiskOfASaveThatStreams) {
  ExpectClean(
      {.saves = std::max(2u, SavesPerCombination() / 8), .read_back = true, .streamed = true});
}

TEST_P(Lifetime, NoStaleByteReachesTheDiskAfterATrim) {
  ExpectClean({.saves = std::max(3u, SavesPerCombination() / 16), .trim_between = true});
}

}  // namespace
}  // namespace holdfast::testing
