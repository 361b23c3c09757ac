// The last steps of one save hang: in a file system that does not answer.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "runtime/sys/system.h"
#include "tests/testing/child_process.h"
#include "tests/testing/save_test.h"

namespace holdfast::testing {
namespace {

std::atomic<int> g_hanging{0};
std::atomic<bool> g_released{false};

/// The trainer removes what is left of a save whose worker was killed.
int HangingUnlinkat(int directory, const char* name, int flags) {
  if (absl::StrContains(name, "hung") && (flags & AT_REMOVEDIR) != 0) {
    ++g_hanging;
    while (!g_released) usleep(1000);
    --g_hanging;
  }
  return sys::kKernel.unlinkat(directory, name, flags);
}

class HungEnd : public LauncherTest {
 protected:
  void SetUp() override {
    LauncherTest::SetUp();
    g_released = false;
    sys::g_system.unlinkat = HangingUnlinkat;
  }
  void TearDown() override {
    sys::g_system = sys::kKernel;
    LauncherTest::TearDown();
  }
};
INSTANTIATE_TEST_SUITE_P(All, HungEnd, kProcessLaunchers, LauncherName);

TEST_P(HungEnd, KeepsNoOtherSaveFromEnding) {
  SavePrevious(directory());
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  CheckpointerOptions options = Options();
  options.qos.bytes_per_second_max = 64u << 10;  // killed long before the second chunk
  const auto slow = checkpointer->CreateBeside(options);
  ASSERT_TRUE(slow.ok()) << slow.status();
  const TrainingState state = TrainingState::Uniform(2, 2u << 20, 1);
  std::vector<SaveHandle> hung;
  const absl::Cleanup release = [] { g_released = true; };
  for (const char* name : {"hung-1", "hung-2"}) {
    const auto handle = Begin(slow->get(), name, state);
    ASSERT_TRUE(handle.ok()) << handle.status();
    ASSERT_TRUE(WaitFor([&] { return handle->progress().bytes_written > 0; }));
    ASSERT_TRUE(SendSignal(handle->worker_pid(), SIGKILL));
    hung.push_back(*handle);
    // A kept worker may otherwise get the next job while it dies.
    ASSERT_TRUE(WaitFor([&] { return g_hanging == static_cast<int>(hung.size()); }));
  }
  const auto other = Save(checkpointer.get(), "other", state);
  EXPECT_TRUE(other.ok()) << other.status();
  for (const SaveHandle& handle : hung) EXPECT_FALSE(handle.IsDone());
  EXPECT_EQ(checkpointer->staging().bytes_held, 0u);
  g_released = true;
  for (const SaveHandle& handle : hung)
    EXPECT_TRUE(absl::IsAborted(handle.WaitDurable(kLong).status()));
  (void)(*slow)->Flush(kLong);
  ExpectPreviousAnd(directory(), {"other"});
}

}  // namespace
}  // namespace holdfast::testing
