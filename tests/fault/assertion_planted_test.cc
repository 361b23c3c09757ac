// A worker whose assertion fails ends with its text, and the trainer lives.

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/worker/planted_bugs.h"
#include "tests/testing/child_process.h"
#include "tests/testing/save_test.h"

namespace holdfast::testing {
namespace {

using ::testing::HasSubstr;

class FailedAssertion : public LauncherTest {};
// The planted bug is in this process's memory; a started program has no planted bug.
INSTANTIATE_TEST_SUITE_P(InThisProgram, FailedAssertion,
                         ::testing::Values(Launcher::kFork, Launcher::kThread), LauncherName);

TEST_P(FailedAssertion, EndsTheWorkerAndNotTheTrainer) {
  // In a child: memory in reach of a sleeping thread is never freed.
  ChildProcess child([this] {
    CheckpointerOptions options = Options();
    options.staging.arena_bytes = 96u << 20;
    const auto checkpointer = Make(options);
    ASSERT_NE(checkpointer, nullptr);
    const TrainingState state = TrainingState::Uniform(2, 8u << 20, 1);
    worker::testing::g_forget_transfer = true;
    const auto report = Save(checkpointer.get(), "broken", state);
    worker::testing::g_forget_transfer = false;
    EXPECT_THAT(Text(report.status()), HasSubstr("its own state wrong"));
    EXPECT_THAT(Text(report.status()), HasSubstr("in_flight > 0"));
    const auto next = Save(checkpointer.get(), "next", state, 2);
    ASSERT_TRUE(next.ok()) << next.status();
    EXPECT_TRUE(state.CompareWith(next->path).ok());
    EXPECT_EQ(checkpointer->staging().bytes_quarantined > 0, IsThread());
  });
  EXPECT_EQ(child.Wait(kLong), 0);
}

}  // namespace
}  // namespace holdfast::testing
