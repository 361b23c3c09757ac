// What a worker's process has of the trainer's: the given descriptors and no more,
// and no threads where it may have none.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "runtime/layout/wire.h"
#include "tests/testing/child_process.h"
#include "tests/testing/forbidden_calls.h"
#include "tests/testing/holdings.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/save_test.h"

namespace holdfast::testing {
namespace {

/// Descriptors of a host that never heard of close-on-exec: a file, a pipe, a socket, and one with
/// a high number.
class HostFds {
 public:
  explicit HostFds(const std::string& file) {
    int pipe_ends[2] = {-1, -1};
    int socket_ends[2] = {-1, -1};
    EXPECT_EQ(pipe(pipe_ends), 0);
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, socket_ends), 0);
    const int opened = open(file.c_str(), O_CREAT | O_WRONLY, 0600);
    constexpr int kHigh = 200;
    fds_ = {pipe_ends[0],   pipe_ends[1], socket_ends[0],
            socket_ends[1], opened,       fcntl(opened, F_DUPFD, kHigh)};
    for (const int fd : fds_) {
      EXPECT_GE(fd, 0);
      std::error_code error;
      targets_.push_back(
          std::filesystem::read_symlink(absl::StrCat("/proc/self/fd/", fd), error).string());
    }
  }
  ~HostFds() {
    for (const int fd : fds_) close(fd);
  }
  HostFds(const HostFds&) = delete;
  HostFds& operator=(const HostFds&) = delete;
  bool Have(const std::string& target) const {
    return std::find(targets_.begin(), targets_.end(), target) != targets_.end();
  }

 private:
  std::vector<int> fds_;
  std::vector<std::string> targets_;
};

/// The number of threads of an idle child: one, and the threads of an emulator.
size_t ThreadsOfAnIdleChild() {
  Mailbox mailbox;
  const ChildProcess child([&mailbox] {
    mailbox.ToParent("here");
    pause();
  });
  EXPECT_TRUE(mailbox.FromChild(kLong).has_value());
  const std::filesystem::directory_iterator tasks(absl::StrCat("/proc/", child.pid(), "/task"));
  return static_cast<size_t>(std::distance(begin(tasks), end(tasks)));
}

class WorkerProcess : public SaveTest, public ::testing::WithParamInterface<Setting> {
 protected:
  void SetUp() override {
    SaveTest::SetUp();
    HOLDFAST_SKIP_WITHOUT_RING(std::get<1>(GetParam()));
  }
  static bool IsFork() { return std::get<0>(GetParam()) == Launcher::kFork; }
  static bool IsPwrite() { return std::get<1>(GetParam()) == EngineRung::kPwrite; }
  CheckpointerOptions Options() const {
    CheckpointerOptions options = SmallOptions(directory());
    options.launcher = std::get<0>(GetParam());
    options.engine = std::get<1>(GetParam());
    // The first chunk is written at once, the next ones only after the look.
    options.qos.bytes_per_second_max = 1u << 20;
    return options;
  }
  void LookAtWorker();
};
INSTANTIATE_TEST_SUITE_P(All, WorkerProcess,
                         ::testing::Combine(kProcessLaunchers,
                                            ::testing::Values(EngineRung::kUringFixed,
                                                              EngineRung::kPwrite)),
                         SettingName);

void WorkerProcess::LookAtWorker() {
  // Before a kept worker is started, and before the others are.
  const HostFds early(directory() + "/early");
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  const HostFds late(directory() + "/late");
  const auto handle = Begin(checkpointer.get(), "slow", TrainingState::Uniform(4, 4u << 20, 1));
  ASSERT_TRUE(handle.ok()) << handle.status();
  ASSERT_TRUE(WaitFor([&] { return handle->progress().bytes_written > 0; }));
  const pid_t worker = handle->worker_pid();
  std::map<int, std::string> fds = Holdings::Of(worker).fds;
  const size_t threads = Names(absl::StrCat("/proc/", worker, "/task")).size();
  ASSERT_TRUE(handle->Cancel().ok());
  EXPECT_TRUE(absl::IsCancelled(handle->WaitDurable(kLong).status()));

  EXPECT_EQ(fds[STDIN_FILENO], "/dev/null");
  EXPECT_EQ(fds[STDOUT_FILENO], "/dev/null");
  EXPECT_EQ(fds[STDERR_FILENO], "/dev/null");
  for (const auto& [fd, target] : fds) {
    EXPECT_FALSE(early.Have(target) || late.Have(target)) << fd << " " << target;
  }
  // Those three, the socket, the ring or the doorbell of threads, the directory, the file, and what
  // is sent.
  EXPECT_LE(fds.size(), 3 + 1 + 1 + 1 + 1 + layout::kAttachFds + layout::kRunFds);
  // A child of a process with threads may not start any: a lock may be held for ever there.
  if (!kThreadSanitizer && IsPwrite()) {
    EXPECT_EQ(threads,
              ThreadsOfAnIdleChild() + (IsFork() ? 0 : checkpointer->options().pwrite_threads));
  }
}

TEST_P(WorkerProcess, HoldsOnlyWhatItWasGiven) { LookAtWorker(); }

TEST_P(WorkerProcess, HoldsOnlyWhatItWasGivenByKernelsWithoutCloseRange) {
  if (kThreadSanitizer) GTEST_SKIP() << "TSan's children start no threads";
  const ChildResult result = RunInChild([this] {
    if (!ForbidCalls({SYS_close_range}, ENOSYS)) return std::string("no seccomp filters here");
    LookAtWorker();
    return std::string();
  });
  if (!result.skipped.empty()) GTEST_SKIP() << result.skipped;
  EXPECT_EQ(result.status, 0);
}

}  // namespace
}  // namespace holdfast::testing
