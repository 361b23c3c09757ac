// Unusual hosts: ignoring SIGCHLD, waiting for all children, or out of fds.
#include <fcntl.h>
#include <linux/capability.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "runtime/sys/system.h"
#include "tests/testing/child_process.h"
#include "tests/testing/save_test.h"

namespace holdfast::testing {
namespace {

using ::testing::HasSubstr;

class HostProcess : public LauncherTest {
 protected:
  /// Saves work, and a killed worker is reported.
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
      ASSERT_TRUE(SendSignal(handle->worker_pid(), SIGKILL));
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

// As in a container without CAP_SYS_NICE. Dropped not only from the bounding set: a thread of this
// process has the process's capabilities, and a program started by root has the bounding set.
std::string DropPriorityRights() {
  __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
  __user_cap_data_struct rights[2] = {};
  if (syscall(SYS_capget, &header, rights) != 0) return "capget is forbidden";
  for (const unsigned right : {CAP_SYS_NICE, CAP_SYS_ADMIN}) {
    const uint32_t bit = 1u << (right % 32);
    if ((rights[0].permitted & bit) != 0) prctl(PR_CAPBSET_DROP, right, 0, 0, 0);
    rights[0].effective &= ~bit;
    rights[0].permitted &= ~bit;
    rights[0].inheritable &= ~bit;
  }
  return syscall(SYS_capset, &header, rights) == 0 ? "" : "capset is forbidden";
}

TEST_P(HostProcess, MayNotRaiseItsIoPriorityAndLosesNoSave) {
  for (const EngineRung engine : {EngineRung::kUring, EngineRung::kPwrite}) {
    const ChildResult result = RunInChild([this, engine] {
      if (std::string why = DropPriorityRights(); !why.empty()) return why;
      CheckpointerOptions options = Options();
      options.engine = engine;
      options.qos.io_priority_class = 1;  // real-time
      const auto checkpointer = Make(options);
      if (checkpointer == nullptr) return std::string();
      const auto report =
          Save(checkpointer.get(), NameOf(engine), TrainingState::Uniform(2, 1'000'000, 1));
      EXPECT_TRUE(report.ok()) << report.status();
      if (report.ok()) {
        EXPECT_THAT(report->engine_reason, HasSubstr("I/O priority: EPERM"));
      }
      return std::string();
    });
    if (!result.skipped.empty()) GTEST_SKIP() << result.skipped;
    EXPECT_EQ(result.status, 0);
  }
}

template <int kError>
int NoPidfd(pid_t, unsigned) {
  errno = kError;
  return -1;
}

TEST_P(HostProcess, HasNoPidfds) {
  for (const auto refuse : {NoPidfd<ENOSYS>, NoPidfd<EPERM>}) {
    sys::g_system.pidfd_open = refuse;
    auto made = Checkpointer::Create(Options());  // starts a kept worker
    absl::Status status = made.status();
    if (made.ok()) {
      status = Save(made->get(), "step-1", TrainingState::Uniform(3, 1u << 20, 1)).status();
      ExpectMemoryBack(made->get());
      made->reset();
    }
    EXPECT_EQ(status.ok(), IsThread()) << status;
    if (!IsThread()) {
      EXPECT_THAT(Text(status), HasSubstr("launcher thread"));
    }
    sys::g_system = sys::kKernel;
    std::filesystem::remove_all(absl::StrCat(directory(), "/step-1"));
  }
}

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
