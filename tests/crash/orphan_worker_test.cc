// Kills a trainer while its worker, a real process, continues: recovery waits for the worker or
// fences it.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <functional>
#include <utility>

#include "absl/time/time.h"
#include "holdfast/recovery.h"
#include "runtime/directory/entries.h"
#include "runtime/directory/locks.h"
#include "runtime/format/directory_names.h"
#include "runtime/sys/system.h"
#include "tests/testing/checkpoint_files.h"
#include "tests/testing/child_process.h"
#include "tests/testing/small_checkpoint.h"

namespace holdfast::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr AttemptId kAttempt = {.high = 1, .low = 2};

struct Pipe {
  Pipe() {
    if (pipe2(fds, O_CLOEXEC) != 0) abort();
  }
  ~Pipe() {
    close(fds[0]);
    close(fds[1]);
  }
  void Tell(int value) const {
    if (write(fds[1], &value, sizeof(value)) != sizeof(value)) _exit(3);
  }
  int Hear() const {
    int value = -1;
    if (read(fds[0], &value, sizeof(value)) != sizeof(value)) value = -2;
    return value;
  }
  int fds[2];
};

class OrphanWorker : public ::testing::Test {
 protected:
  /// Starts a trainer with a worker, kills the trainer, and returns with the worker waiting for
  /// `go_`. The worker then writes the manifests, commits, and reports the errno of its rename.
  void MakeOrphan() {
    const pid_t trainer = fork();
    if (trainer == 0) Trainer();
    worker_ = ready_.Hear();
    ASSERT_GT(worker_, 0);
    SendSignal(trainer, SIGKILL);
    waitpid(trainer, nullptr, 0);
  }

  [[noreturn]] void Trainer() {
    auto parent = directory::OpenDirectory(AT_FDCWD, directory_.path());
    auto save = directory::MakePartialDirectory(parent->get(), partial_);
    if (!save.ok()) _exit(1);
    base::ForkScope own;
    const pid_t worker = fork();
    if (worker == 0) {
      close(save->trainer.get());
      ready_.Tell(getpid());
      go_.Hear();
      // By fd, as in a worker: the directory's name may have changed.
      const std::string inside = "/proc/self/fd/" + std::to_string(save->in_use.get());
      WriteSmallCheckpoint(inside, rank_);
      const int failed =
          renameat2(parent->get(), partial_.c_str(), parent->get(), "step-7", RENAME_NOREPLACE) == 0
              ? 0
              : errno;
      result_.Tell(failed);
      _exit(0);
    }
    while (true) pause();
  }

  TemporaryDirectory directory_;
  const SmallRank rank_ = {.checkpoint = "step-7", .attempt = kAttempt, .world_size = 2, .step = 7};
  const std::string partial_ = format::PartialName("step-7", kAttempt);
  Pipe ready_;
  Pipe go_;
  Pipe result_;
  pid_t worker_ = 0;
};

const Pipe* g_go = nullptr;

TEST_F(OrphanWorker, IsWaitedForAndItsCheckpointIsTaken) {
  MakeOrphan();
  // The worker continues only after the recovery sleeps, so the recovery has found the worker
  // running.
  g_go = &go_;
  sys::g_system.nanosleep = [](const struct timespec* request, struct timespec* rest) {
    if (g_go != nullptr) g_go->Tell(1);
    g_go = nullptr;
    return sys::kKernel.nanosleep(request, rest);
  };
  const auto report = Recover(directory_.path(), {.wait_for_orphans = absl::Minutes(4)});
  sys::g_system = sys::kKernel;
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(result_.Hear(), 0);
  EXPECT_THAT(report->fenced, IsEmpty());
  EXPECT_THAT(report->removed, IsEmpty());
  ASSERT_THAT(report->complete, SizeIs(1));
  EXPECT_TRUE(HasBytesOf(directory_ / "step-7", rank_));
}

TEST_F(OrphanWorker, IsFencedWhenItDoesNotEndAndCannotCommitAnyMore) {
  MakeOrphan();
  auto report = Recover(directory_.path(), {.wait_for_orphans = absl::ZeroDuration()});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_THAT(report->fenced, SizeIs(1));
  EXPECT_THAT(report->complete, IsEmpty());
  go_.Tell(1);
  EXPECT_EQ(result_.Hear(), ENOENT);
  EXPECT_FALSE(std::filesystem::exists(directory_ / "step-7"));
  // The worker ends by now; the next recovery removes its directory.
  auto fenced = directory::OpenDirectory(AT_FDCWD, directory_ / report->fenced[0]);
  ASSERT_TRUE(fenced.ok());
  ASSERT_EQ(flock(fenced->get(), LOCK_EX), 0);
  *fenced = base::UniqueFd();
  const std::string name = report->fenced[0];
  report = Recover(directory_.path(), {.wait_for_orphans = absl::ZeroDuration()});
  ASSERT_TRUE(report.ok());
  EXPECT_THAT(report->removed, ElementsAre(name));
  EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
}

/// A clock that only sleeps advance, with a call of `at_sleep` at each.
class SleepingClock {
 public:
  explicit SleepingClock(std::function<void(int)> at_sleep) {
    now_ = sys::NowNs();
    sleeps_ = 0;
    at_sleep_ = std::move(at_sleep);
    sys::g_system.clock_gettime = [](clockid_t clock, struct timespec* out) {
      if (clock == CLOCK_REALTIME) return sys::kKernel.clock_gettime(clock, out);
      *out = absl::ToTimespec(absl::Nanoseconds(now_));
      return 0;
    };
    sys::g_system.nanosleep = [](const struct timespec*, struct timespec*) {
      now_ += absl::ToInt64Nanoseconds(absl::Seconds(10));
      at_sleep_(++sleeps_);
      return 0;
    };
  }
  ~SleepingClock() {
    sys::g_system = sys::kKernel;
    at_sleep_ = nullptr;
  }

 private:
  static inline uint64_t now_ = 0;
  static inline int sleeps_ = 0;
  static inline std::function<void(int)> at_sleep_;
};

/// With the sign of the time from one change of a file to the next.
class OrphanAtWork : public OrphanWorker, public ::testing::WithParamInterface<int> {};

TEST_P(OrphanAtWork, HasMoreTimeWhileItMakesProgress) {
  MakeOrphan();
  WriteFileBytes(directory_ / (partial_ + "/data"), "");
  absl::StatusOr<RecoveryReport> report;
  {
    const auto began = std::filesystem::last_write_time(directory_ / (partial_ + "/data"));
    const SleepingClock clock([&](int sleeps) {
      if (sleeps < 20) {
        std::filesystem::last_write_time(directory_ / (partial_ + "/data"),
                                         began + GetParam() * std::chrono::seconds(sleeps));
      } else if (sleeps == 20) {
        go_.Tell(1);
        EXPECT_EQ(result_.Hear(), 0);
      }
    });
    report = Recover(directory_.path(), {.wait_for_orphans = absl::Seconds(30)});
  }
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_THAT(report->fenced, IsEmpty());
  ASSERT_THAT(report->complete, SizeIs(1));
}

INSTANTIATE_TEST_SUITE_P(Clock, OrphanAtWork, ::testing::Values(1, -1),
                         [](const auto& test) { return test.param > 0 ? "Forward" : "Back"; });

TEST_F(OrphanWorker, IsFencedInTheEndThoughItMakesProgress) {
  MakeOrphan();
  WriteFileBytes(directory_ / (partial_ + "/data"), "");
  const auto began = std::filesystem::last_write_time(directory_ / (partial_ + "/data"));
  int slept = 0;
  absl::StatusOr<RecoveryReport> report;
  {
    const SleepingClock clock([&](int sleeps) {
      slept = sleeps;
      std::filesystem::last_write_time(directory_ / (partial_ + "/data"),
                                       began + std::chrono::seconds(sleeps));
    });
    report = Recover(directory_.path(), {.wait_for_orphans = absl::Seconds(30)});
  }
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_THAT(report->fenced, SizeIs(1));
  EXPECT_EQ(slept, 30);
  go_.Tell(1);
  EXPECT_EQ(result_.Hear(), ENOENT);
}

TEST_F(OrphanWorker, KilledTooLeavesNothingToWaitFor) {
  MakeOrphan();
  SendSignal(worker_, SIGKILL);
  const auto report = Recover(directory_.path(), {.wait_for_orphans = absl::Minutes(4)});
  ASSERT_TRUE(report.ok());
  EXPECT_THAT(report->fenced, IsEmpty());
  EXPECT_THAT(report->removed, SizeIs(1));
}

}  // namespace
}  // namespace holdfast::testing
