// Staging memory that nobody uses goes back to the system by itself, and comes back with the next
// save: for every launcher, with workers and rings that have it mapped and registered.

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "tests/testing/child_process.h"
#include "tests/testing/holdings.h"
#include "tests/testing/save_test.h"

namespace holdfast::testing {
namespace {

constexpr uint64_t kArena = 32u << 20;
constexpr uint64_t kNearlyNothing = 4u << 20;  ///< Job tables, and what is shared anyway.

class IdleTrim : public LauncherTest {
 protected:
  void SetUp() override {
    LauncherTest::SetUp();
    HOLDFAST_SKIP_WITHOUT_RING(EngineRung::kUringFixed);
  }
  CheckpointerOptions Options() const {
    CheckpointerOptions options = LauncherTest::Options();
    options.engine = EngineRung::kUringFixed;
    options.staging.arena_bytes = kArena;
    options.staging.idle_trim = absl::Milliseconds(100);
    // Those whose memory /proc counts to the process.
    options.staging.pages = PageRung::kSmall;
    // Each save takes several times as long.
    options.qos.bytes_per_second_max = 24u << 20;
    return options;
  }
};
INSTANTIATE_TEST_SUITE_P(All, IdleTrim, kEveryLauncher, LauncherName);

TEST_P(IdleTrim, GivesThePagesBackOnceBetweenSavesAndNeverInOne) {
  const uint64_t before = Holdings::OfSelf().resident_shared_bytes;
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  // The first is of the pages that were taken at Create.
  for (uint64_t trims = 1; trims <= 3; ++trims) {
    SCOPED_TRACE(trims);
    ASSERT_TRUE(WaitFor([&] { return !checkpointer->staging().resident; }));
    EXPECT_EQ(checkpointer->staging().trims, trims);
    EXPECT_LE(Holdings::OfSelf().resident_shared_bytes, before + kNearlyNothing);
    const TrainingState state = TrainingState::Uniform(5, 2'500'000, trims);
    const auto report = Save(checkpointer.get(), absl::StrCat("step-", trims), state, trims);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->engine, EngineRung::kUringFixed) << report->engine_reason;
    EXPECT_TRUE(state.CompareWith(report->path).ok()) << state.CompareWith(report->path);
  }
  ExpectMemoryBack(checkpointer.get());
}

}  // namespace
}  // namespace holdfast::testing
