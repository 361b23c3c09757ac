// Hosts with manners of their own: they ignore SIGCHLD, wait for all children, or run out of fds.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "tests/testing/child_process.h"
#include "tests/testing/save_test.h"

namespace holdfast::testing {
namespace {

using ::testing::HasSubstr;

class HostProcess : public LauncherTest {
 protected:
  /// Saves work, and a killed worker is told.
  void ExpectNeitherHungNorFooled() {
    CheckpointerOptions options = Options();
    options.qos.bytes_per_second_max = 32u << 20;
    const auto checkpointer = Make(options);
    if (checkpointer == nullptr) return;
    const TrainingState state = TrainingState::Uniform(3, 4u << 20, 1);
    for (int i = 0; i < 3; ++i) {
      const auto report = Save(checkpointer.get(), absl::StrCat("step-", i), state);
      EXPECT_TRUE(report.ok()) << report.status();
    }
    const auto handle = Begin(checkpointer.get(), "victim", state);
    ASSERT_TRUE(handle.ok()) << handle.status();
    ASSERT_TRUE(WaitFor([&] { return handle->progress().bytes_written > 0; }));
    if (!IsThread()) {
      ASSERT_EQ(kill(handle->worker_pid(), SIGKILL), 0);
      const auto report = handle->WaitDurable(absl::Seconds(30));
      EXPECT_TRUE(absl::IsAborted(report.status())) << report.status();
      EXPECT_THAT(Text(report.status()), HasSubstr("victim"));
    } else {
      EXPECT_TRUE(handle->WaitDurable(kLong).ok());
    }
    const auto next = Save(checkpointer.get(), "next", state);
    EXPECT_TRUE(next.ok()) << next.status();
    ExpectMemoryBack(checkpointer.get());
  }
};
INSTANTIATE_TEST_SUITE_P(All, HostProcess, kEveryLauncher, LauncherName);

TEST_P(HostProcess, IgnoresSigchld) {
  const ChildResult result = RunInChild([this] {
    signal(SIGCHLD, SIG_IGN);
    ExpectNeitherHungNorFooled();
    EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
    return std::string();
  });
  EXPECT_EQ(result.status, 0);
}

TEST_P(HostProcess, WaitsForAllChildrenInAThread) {
  const ChildResult result = RunInChild([this] {
    std::atomic<bool> stop{false};
    std::thread reaper([&stop] {
      while (!stop.load()) {
        if (waitpid(-1, nullptr, WNOHANG) <= 0) absl::SleepFor(absl::Microseconds(100));
      }
    });
    ExpectNeitherHungNorFooled();
    stop.store(true);
    reaper.join();
    return std::string();
  });
  EXPECT_EQ(result.status, 0);
}

TEST_P(HostProcess, RunsOutOfFds) {
  SavePrevious(directory());
  const ChildResult result = RunInChild([this] {
    const auto checkpointer = Make(Options());
    if (checkpointer == nullptr) return std::string();
    const TrainingState state = TrainingState::Uniform(2, 200'000, 1);
    EXPECT_TRUE(Save(checkpointer.get(), "warm", state).ok());
    std::filesystem::remove_all(absl::StrCat(directory(), "/warm"));
    const Holdings before = Holdings::OfSelf();
    // The limit is on numbers, so the gaps below the highest one are filled.
    const int highest = before.fds.rbegin()->first;
    std::vector<int> fillers;
    for (int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);; fd = fcntl(fd, F_DUPFD_CLOEXEC, 0)) {
      if (fd > highest) {
        close(fd);
        break;
      }
      fillers.push_back(fd);
    }
    const Holdings filled = Holdings::OfSelf();
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    const rlim_t unlimited = limit.rlim_cur;
    int failed = 0;
    int saved = 0;
    for (int more = 0; more < 24; ++more) {
      SCOPED_TRACE(absl::StrCat(more, " fds to spare"));
      limit.rlim_cur = static_cast<rlim_t>(highest + 1 + more);
      setrlimit(RLIMIT_NOFILE, &limit);
      const auto report = Save(checkpointer.get(), "tight", state);
      limit.rlim_cur = unlimited;
      setrlimit(RLIMIT_NOFILE, &limit);
      if (report.ok()) {
        ++saved;
      } else {
        ++failed;
        EXPECT_THAT(Text(report.status()), HasSubstr("tight"));
        EXPECT_FALSE(absl::IsInternal(report.status()) || absl::IsUnknown(report.status()))
            << report.status();
      }
      ExpectMemoryBack(checkpointer.get());
      std::filesystem::remove_all(absl::StrCat(directory(), "/tight"));
      ExpectPreviousAnd(directory(), {});
    }
    EXPECT_GT(failed, 0);
    EXPECT_GT(saved, 0);
    if (GetParam() != Launcher::kPersistent && GetParam() != Launcher::kThread) {
      EXPECT_THAT(Holdings::OfSelf().Beyond(filled), ::testing::IsEmpty());
    }
    for (const int fd : fillers) close(fd);
    ExpectRecovered(checkpointer.get());
    return std::string();
  });
  EXPECT_EQ(result.status, 0);
}

}  // namespace
}  // namespace holdfast::testing
