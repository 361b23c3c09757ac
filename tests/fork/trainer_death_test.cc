// A trainer that dies leaves no half-done save: sealed saves become durable (or, on request, are
// removed), unsealed saves leave no trace. Signals to its process group kill no save.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "runtime/sys/system.h"
#include "tests/testing/child_process.h"
#include "tests/testing/save_test.h"
#include "tests/testing/slow_device.h"

namespace holdfast::testing {
namespace {

class DyingTrainer : public LauncherTest {
 protected:
  CheckpointerOptions Slow(TrainerDeath policy) {
    CheckpointerOptions options = Options();
    options.trainer_death = policy;
    options.qos.bytes_per_second_max = 12u << 20;
    return options;
  }
  /// Waits for the worker, now this process's orphan. The worker has ended by itself.
  void ExpectWorkerEnds(const Subreaper& subreaper, pid_t worker) {
    EXPECT_EQ(subreaper.Reap(worker, kLong), 0);
  }
  const TrainingState state_ = TrainingState::Uniform(4, 4u << 20, 1);
};
using TrainerKilled = DyingTrainer;
INSTANTIATE_TEST_SUITE_P(All, TrainerKilled, kProcessLaunchers, LauncherName);

/// Runs a trainer that is killed after the last seal; `settle` is called first. Returns its
/// worker's pid.
pid_t KillWhenSealed(
    const CheckpointerOptions& options, const TrainingState& state, Mailbox* mailbox,
    const std::function<void()>& settle = [] {}) {
  ChildProcess trainer([&] {
    settle();
    const auto checkpointer = Checkpointer::Create(options);
    ASSERT_TRUE(checkpointer.ok()) << checkpointer.status();
    const std::vector<TensorSource> sources = state.Sources();
    const auto begun =
        (*checkpointer)->SaveAsync({.name = "orphan", .step = 1, .tensors = sources});
    ASSERT_TRUE(begun.ok()) << begun.status();
    WaitFor([&] {
      const SaveProgress progress = begun->progress();
      return progress.bytes_sealed == progress.bytes_total && progress.bytes_written > 0;
    });
    mailbox->ToParent(absl::StrCat(begun->worker_pid()));
    (void)begun->WaitDurable(kLong);
  });
  const pid_t worker = std::atoi(mailbox->FromChild(kLong).value_or("0").c_str());
  trainer.Signal(SIGKILL);
  EXPECT_EQ(trainer.Wait(kLong), ChildProcess::kSignalBase + SIGKILL);
  return worker;
}

TEST_P(TrainerKilled, SealedSaveBecomesDurable) {
  SavePrevious(directory());
  const Subreaper subreaper;
  Mailbox mailbox;
  const pid_t worker = KillWhenSealed(Slow(TrainerDeath::kFinish), state_, &mailbox);
  ASSERT_GT(worker, 0);
  ExpectWorkerEnds(subreaper, worker);
  ExpectPreviousAnd(directory(), {"orphan"});
  const std::string path = absl::StrCat(directory(), "/orphan");
  ExpectSound(path);
  EXPECT_TRUE(state_.CompareWith(path).ok()) << state_.CompareWith(path);
}

// gVisor, kernels before 5.3, strict seccomp filters.
int NoPidfdOfItself(pid_t pid, unsigned flags) {
  if (pid != getpid()) return sys::kKernel.pidfd_open(pid, flags);
  errno = EPERM;
  return -1;
}

TEST_P(TrainerKilled, IsSeenWithoutAPidfd) {
  SavePrevious(directory());
  const Subreaper subreaper;
  for (const TrainerDeath policy : {TrainerDeath::kStop, TrainerDeath::kFinish}) {
    Mailbox mailbox;
    const pid_t worker = KillWhenSealed(Slow(policy), state_, &mailbox,
                                        [] { sys::g_system.pidfd_open = NoPidfdOfItself; });
    ASSERT_GT(worker, 0);
    ExpectWorkerEnds(subreaper, worker);
    if (policy == TrainerDeath::kStop) ExpectPreviousAnd(directory(), {});
  }
  ExpectPreviousAnd(directory(), {"orphan"});
}

// A launcher, a CI job or a log collector reads the trainer's output to its end.
TEST_P(TrainerKilled, ItsStandardStreamsEndThoughTheWorkerWrites) {
  const Subreaper subreaper;
  Mailbox mailbox;
  int pipe_ends[2] = {-1, -1};
  ASSERT_EQ(pipe2(pipe_ends, O_CLOEXEC), 0);
  CheckpointerOptions options = Slow(TrainerDeath::kFinish);
  options.qos.bytes_per_second_max = 256u << 10;
  const pid_t worker = KillWhenSealed(options, state_, &mailbox, [&] {
    for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) dup2(pipe_ends[1], fd);
  });
  ASSERT_GT(worker, 0);
  close(pipe_ends[1]);
  pollfd end{.fd = pipe_ends[0], .events = 0, .revents = 0};
  EXPECT_EQ(poll(&end, 1, static_cast<int>(absl::ToInt64Milliseconds(kLong))), 1);
  EXPECT_NE(end.revents & POLLHUP, 0);
  EXPECT_TRUE(IsAlive(worker)) << "the end of file is the worker's";
  close(pipe_ends[0]);
  SendSignal(worker, SIGKILL);
  EXPECT_EQ(subreaper.Reap(worker, kLong), ChildProcess::kSignalBase + SIGKILL);
}

TEST_P(TrainerKilled, SealedSaveIsRemovedUnderStop) {
  SavePrevious(directory());
  const Subreaper subreaper;
  Mailbox mailbox;
  const pid_t worker = KillWhenSealed(Slow(TrainerDeath::kStop), state_, &mailbox);
  ASSERT_GT(worker, 0);
  ExpectWorkerEnds(subreaper, worker);
  ExpectPreviousAnd(directory(), {});
}

TEST_P(TrainerKilled, UnsealedSaveLeavesNoTrace) {
  SavePrevious(directory());
  const Subreaper subreaper;
  Mailbox mailbox;
  ChildProcess trainer([&] {
    const auto checkpointer = Make(Slow(TrainerDeath::kFinish));
    ASSERT_NE(checkpointer, nullptr);
    SlowDevice device;  // with a copy that never ends
    std::vector<TensorSource> sources = state_.Sources();
    sources.push_back({.name = "never",
                       .dtype = "F32",
                       .shape = {1000},
                       .data = device.Allocate(4000),
                       .bytes = 4000,
                       .device = &device});
    const auto begun = checkpointer->SaveAsync({.name = "orphan", .step = 1, .tensors = sources});
    ASSERT_TRUE(begun.ok()) << begun.status();
    WaitFor([&] { return begun->progress().bytes_written > 0; });
    mailbox.ToParent(absl::StrCat(begun->worker_pid()));
    (void)begun->WaitDurable(kLong);
  });
  const pid_t worker = std::atoi(mailbox.FromChild(kLong).value_or("0").c_str());
  trainer.Signal(SIGKILL);
  EXPECT_EQ(trainer.Wait(kLong), ChildProcess::kSignalBase + SIGKILL);
  ASSERT_GT(worker, 0);
  ExpectWorkerEnds(subreaper, worker);
  ExpectPreviousAnd(directory(), {});
}

TEST_P(TrainerKilled, AKeptOrWaitingWorkerEndsWithItsTrainer) {
  if (GetParam() != Launcher::kPersistent) GTEST_SKIP() << "it has no worker between saves";
  const Subreaper subreaper;
  Mailbox mailbox;
  ChildProcess trainer([&] {
    const auto checkpointer = Make(Options());
    ASSERT_NE(checkpointer, nullptr);
    EXPECT_TRUE(Save(checkpointer.get(), "step-1", state_).ok());
    mailbox.ToParent(absl::StrCat(Holdings::OfSelf().children.at(0)));
    (void)mailbox.FromParent(kLong);
  });
  const pid_t worker = std::atoi(mailbox.FromChild(kLong).value_or("0").c_str());
  trainer.Signal(SIGKILL);
  EXPECT_EQ(trainer.Wait(kLong), ChildProcess::kSignalBase + SIGKILL);
  ASSERT_GT(worker, 0);
  ExpectWorkerEnds(subreaper, worker);
  ExpectSound(absl::StrCat(directory(), "/step-1"));
}

TEST_P(TrainerKilled, AnOrphanThatWaitsForRanksHoldsNoStagingMemory) {
  const Subreaper subreaper;
  Mailbox mailbox;
  CheckpointerOptions options = Options();
  options.world_size = 2;  // rank 1 never comes
  options.time_liveness_max = absl::Minutes(10);
  ChildProcess trainer([&] {
    const auto checkpointer = Make(options);
    ASSERT_NE(checkpointer, nullptr);
    const std::vector<TensorSource> sources = state_.Sources();
    const auto begun = checkpointer->SaveAsync(
        {.name = "step-1", .step = 1, .tensors = sources, .attempt = NewAttemptId()});
    ASSERT_TRUE(begun.ok()) << begun.status();
    WaitFor([&] { return begun->progress().phase == "waiting for ranks"; });
    mailbox.ToParent(absl::StrCat(begun->worker_pid()));
    (void)begun->WaitDurable(kLong);
  });
  const pid_t worker = std::atoi(mailbox.FromChild(kLong).value_or("0").c_str());
  ASSERT_GT(worker, 0);
  const uint64_t bytes = uint64_t{4} * (4u << 20);  // of the state
  if (GetParam() == Launcher::kPersistent) {
    EXPECT_GE(Holdings::Of(worker).resident_shared_bytes, bytes) << "kept for the next save";
  }
  trainer.Signal(SIGKILL);
  EXPECT_EQ(trainer.Wait(kLong), ChildProcess::kSignalBase + SIGKILL);
  EXPECT_TRUE(WaitFor([&] { return Holdings::Of(worker).resident_shared_bytes < bytes / 4; }));
  EXPECT_TRUE(IsAlive(worker)) << "the memory went with the worker";
  SendSignal(worker, SIGKILL);
  EXPECT_EQ(subreaper.Reap(worker, kLong), ChildProcess::kSignalBase + SIGKILL);
}

/// Exit without destructors, like sys.exit in a thread or an abort.
TEST_P(TrainerKilled, AnExitInTheMiddleIsAsGoodAsAKill) {
  SavePrevious(directory());
  const Subreaper subreaper;
  Mailbox mailbox;
  ChildProcess trainer([&] {
    auto checkpointer = Make(Slow(TrainerDeath::kFinish));
    ASSERT_NE(checkpointer, nullptr);
    const auto begun = Begin(checkpointer.get(), "orphan", state_);
    ASSERT_TRUE(begun.ok()) << begun.status();
    WaitFor([&] {
      return begun->progress().bytes_sealed == begun->progress().bytes_total &&
             begun->worker_pid() != 0;
    });
    mailbox.ToParent(absl::StrCat(begun->worker_pid()));
    (void)checkpointer.release();
    _exit(0);
  });
  const pid_t worker = std::atoi(mailbox.FromChild(kLong).value_or("0").c_str());
  EXPECT_EQ(trainer.Wait(kLong), 0);
  ASSERT_GT(worker, 0);
  ExpectWorkerEnds(subreaper, worker);
  ExpectPreviousAnd(directory(), {"orphan"});
  EXPECT_TRUE(state_.CompareWith(absl::StrCat(directory(), "/orphan")).ok());
}

using GroupSignals = DyingTrainer;
INSTANTIATE_TEST_SUITE_P(All, GroupSignals, kEveryLauncher, LauncherName);

volatile sig_atomic_t g_signals = 0;

TEST_P(GroupSignals, KillNoSaveInFlight) {
  Mailbox mailbox;
  ChildProcess trainer([&] {
    setpgid(0, 0);
    // A trainer that ends its step first, then saves and leaves.
    struct sigaction action {};
    action.sa_handler = [](int) { g_signals = g_signals + 1; };
    sigaction(SIGINT, &action, nullptr);
    sigaction(SIGTERM, &action, nullptr);
    sigaction(SIGHUP, &action, nullptr);
    const auto checkpointer = Make(Slow(TrainerDeath::kFinish));
    ASSERT_NE(checkpointer, nullptr);
    const auto begun = Begin(checkpointer.get(), "step-1", state_);
    ASSERT_TRUE(begun.ok()) << begun.status();
    WaitFor([&] { return begun->progress().bytes_written > 0; });
    mailbox.ToParent("writing");
    EXPECT_TRUE(WaitFor([] { return g_signals >= 3; }));
    EXPECT_FALSE(begun->IsDone());
    const auto report = begun->WaitDurable(kLong);
    EXPECT_TRUE(report.ok()) << report.status();
    const auto next = Save(checkpointer.get(), "step-2", TrainingState::Uniform(2, 100'000, 2));
    EXPECT_TRUE(next.ok()) << next.status();
  });
  ASSERT_TRUE(mailbox.FromChild(kLong).has_value());
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) EXPECT_EQ(killpg(trainer.pid(), signal), 0);
  EXPECT_EQ(trainer.Wait(kLong), 0);
  ExpectSound(absl::StrCat(directory(), "/step-1"));
  ExpectSound(absl::StrCat(directory(), "/step-2"));
}

}  // namespace
}  // namespace holdfast::testing
