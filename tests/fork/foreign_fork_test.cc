// Children that the host forks during saves (a DataLoader, system()) hold no resource of Holdfast
// and can do no harm with inherited memory.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "holdfast/recovery.h"
#include "tests/testing/child_process.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/save_test.h"
#include "tests/testing/slow_device.h"

namespace holdfast::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class ForeignFork : public LauncherTest {
 protected:
  CheckpointerOptions Slow() {
    CheckpointerOptions options = Options();
    options.qos.bytes_per_second_max = 12u << 20;
    return options;
  }
  const TrainingState state_ = TrainingState::Uniform(4, 4u << 20, 1);
};
INSTANTIATE_TEST_SUITE_P(All, ForeignFork, kEveryLauncher, LauncherName);

void ExpectRefuses(const absl::Status& status) {
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
}

TEST_P(ForeignFork, ChildHoldsNothingAndIsRefused) {
  const Holdings before = Holdings::OfSelf();
  SlowDevice device;
  auto checkpointer = Make(Slow());
  ASSERT_NE(checkpointer, nullptr);
  auto begun = Begin(checkpointer.get(), "step-1", state_);
  ASSERT_TRUE(begun.ok()) << begun.status();
  SaveHandle handle = *std::move(begun);
  begun = absl::UnknownError("moved from");
  // A second save, whose memory is still being filled.
  char* const memory = device.Allocate(1 << 20);
  const std::vector<TensorSource> on_device = {{.name = "device",
                                                .dtype = "U8",
                                                .shape = {1 << 20},
                                                .data = memory,
                                                .bytes = 1 << 20,
                                                .device = &device}};
  auto pending = checkpointer->SaveAsync({.name = "step-2", .step = 2, .tensors = on_device});
  ASSERT_TRUE(pending.ok()) << pending.status();
  ASSERT_TRUE(WaitFor([&] { return handle.progress().bytes_written > 0; }));

  ChildProcess child([&] {
    const Holdings here = Holdings::OfSelf();
    EXPECT_THAT(here.Beyond(before), IsEmpty());
    ExpectRefuses(checkpointer->SaveAsync({.name = "child", .tensors = on_device}).status());
    ExpectRefuses(checkpointer->Flush(absl::Seconds(1)));
    ExpectRefuses(checkpointer->Trim());
    ExpectRefuses(checkpointer->RegisterDevice(&device));
    EXPECT_EQ(checkpointer->staging().arena_bytes, 0u);
    ExpectRefuses(handle.WaitStaged(absl::Seconds(1)));
    ExpectRefuses(handle.WaitStagedOn(&device, nullptr));
    ExpectRefuses(handle.WaitDurable(absl::Seconds(1)).status());
    ExpectRefuses(handle.Cancel());
    EXPECT_FALSE(handle.IsDone());
    EXPECT_EQ(handle.worker_pid(), 0);
    EXPECT_EQ(handle.progress().bytes_total, 0u);
    // The child's own mappings may lie at the parent's arena addresses: destructors must not unmap
    // them.
    std::vector<char*> own;
    for (int i = 0; i < 64; ++i) {
      void* const mapped =
          mmap(nullptr, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      own.push_back(static_cast<char*>(mapped));
      *own.back() = 'x';
    }
    checkpointer.reset();
    handle = SaveHandle();
    pending = absl::UnknownError("gone");
    for (const char* const mapped : own) EXPECT_EQ(*mapped, 'x');
    EXPECT_THAT(Holdings::OfSelf().children, IsEmpty());
  });
  EXPECT_EQ(child.Wait(kLong), 0);

  device.CompleteAtOnce(true);
  device.CompleteAll();
  const auto report = handle.WaitDurable(kLong);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(state_.CompareWith(report->path).ok());
  const auto second = pending->WaitDurable(kLong);
  EXPECT_TRUE(second.ok()) << second.status();
  EXPECT_THAT(Names(directory()), ElementsAre("step-1", "step-2"));
  ExpectMemoryBack(checkpointer.get());
}

TEST_P(ForeignFork, ChildHoldsNothingOfAnArenaThatWasRegistered) {
  const Holdings before = Holdings::OfSelf();
  CheckpointerOptions options = Slow();
  options.engine = EngineRung::kUringFixed;
  // a worker thread maps the arena again for its registration
  options.staging.pages = PageRung::kSmall;
  const auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  const auto begun = Begin(checkpointer.get(), "step-1", state_);
  ASSERT_TRUE(begun.ok()) << begun.status();
  WaitFor([&] { return begun->IsDone() || begun->progress().bytes_written > 0; });
  ChildProcess child([&] { EXPECT_THAT(Holdings::OfSelf().Beyond(before), IsEmpty()); });
  EXPECT_EQ(child.Wait(kLong), 0);
  const auto report = begun->WaitDurable(kLong);
  if (!report.ok()) GTEST_SKIP() << report.status();
  EXPECT_TRUE(state_.CompareWith(report->path).ok());
}

TEST_P(ForeignFork, ChildHoldsNothingThoughTheTrainerHasManyFilesOpen) {
  constexpr rlim_t kMany = 5000;
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  if (limit.rlim_max < kMany + 100) GTEST_SKIP() << "the limit on fds is too low";
  rlimit raised = limit;
  raised.rlim_cur = limit.rlim_max;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &raised), 0);
  std::vector<int> files;
  while (files.size() < kMany) files.push_back(open("/dev/null", O_RDONLY | O_CLOEXEC));
  const Holdings before = Holdings::OfSelf();
  {
    const auto checkpointer = Make(Slow());
    ASSERT_NE(checkpointer, nullptr);
    const auto begun = Begin(checkpointer.get(), "step-1", state_);
    ASSERT_TRUE(begun.ok()) << begun.status();
    ChildProcess child([&] { EXPECT_THAT(Holdings::OfSelf().Beyond(before), IsEmpty()); });
    EXPECT_EQ(child.Wait(kLong), 0);
    EXPECT_TRUE(begun->WaitDurable(kLong).ok());
  }
  for (const int file : files) close(file);
  setrlimit(RLIMIT_NOFILE, &limit);
}

TEST_P(ForeignFork, ChildMayHaveACheckpointerOfItsOwn) {
  if (kThreadSanitizer) GTEST_SKIP() << "it stops children that start threads";
  const auto checkpointer = Make(Slow());
  ASSERT_NE(checkpointer, nullptr);
  const auto begun = Begin(checkpointer.get(), "step-1", state_);
  ASSERT_TRUE(begun.ok()) << begun.status();
  const ChildResult result = RunInChild([this] {
    const auto own = Make(Options());
    if (own == nullptr) return std::string();
    const auto report = Save(own.get(), "child", TrainingState::Uniform(2, 100'000, 3));
    EXPECT_TRUE(report.ok()) << report.status();
    return std::string();
  });
  EXPECT_EQ(result.status, 0);
  EXPECT_TRUE(begun->WaitDurable(kLong).ok());
  EXPECT_THAT(Names(directory()), ElementsAre("child", "step-1"));
}

TEST_P(ForeignFork, ChildThatOutlivesTheCheckpointerKeepsNothing) {
  Mailbox mailbox;
  const Holdings before = Holdings::OfSelf();
  auto checkpointer = Make(Slow());
  ASSERT_NE(checkpointer, nullptr);
  const auto begun = Begin(checkpointer.get(), "step-1", state_);
  ASSERT_TRUE(begun.ok()) << begun.status();
  ASSERT_TRUE(WaitFor([&] { return begun->progress().bytes_written > 0; }));
  // Like a DataLoader's worker: waits for work and ends on request.
  ChildProcess child([&] {
    mailbox.ToParent("ready");
    (void)mailbox.FromParent(absl::Minutes(2));
  });
  EXPECT_TRUE(mailbox.FromChild(kLong).has_value());
  EXPECT_TRUE(begun->WaitDurable(kLong).ok());
  checkpointer.reset();
  const Holdings held = Holdings::Of(child.pid());
  EXPECT_EQ(held.resident_shared_bytes, before.resident_shared_bytes);
  EXPECT_THAT(held.Beyond(before), IsEmpty());
  mailbox.ToChild("end");
  EXPECT_EQ(child.Wait(kLong), 0);
}

// A fork of another thread must not fall between the call that makes a descriptor and the table of
// owned fds, nor between the table and close(2).
TEST_P(ForeignFork, ChildHoldsNothingWhenASaveBeginsOrEnds) {
  const Holdings before = Holdings::OfSelf();
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  std::atomic<bool> stop{false};
  std::thread saver([&] {
    const TrainingState small = TrainingState::Uniform(2, 10'000, 1);
    for (uint64_t step = 1; !stop; ++step) {
      const auto report = Save(checkpointer.get(), absl::StrCat("step-", step), small, step);
      EXPECT_TRUE(report.ok()) << report.status();
    }
  });
  constexpr int kForks = 400;
  int holding = 0;
  for (int i = 0; i < kForks; ++i) {
    ChildProcess child([&] {
      Holdings here = Holdings::OfSelf();
      here.shared_mappings.clear();
      EXPECT_THAT(here.Beyond(before), IsEmpty());
    });
    if (child.Wait(kLong) != 0) ++holding;
  }
  stop = true;
  saver.join();
  EXPECT_EQ(holding, 0) << "of " << kForks << " children";
}

// The lock of a partial directory shows recovery a running save.
TEST_P(ForeignFork, ChildOfADeadTrainerKeepsNoLock) {
  SavePrevious(directory());
  const Subreaper subreaper;
  Mailbox mailbox;
  ChildProcess trainer([&] {
    auto checkpointer = Make(Slow());
    if (checkpointer == nullptr) return;
    const auto begun = Begin(checkpointer.get(), "step-1", state_);
    EXPECT_TRUE(begun.ok()) << begun.status();
    if (!begun.ok()) return;
    WaitFor([&] { return begun->progress().bytes_written > 0; });
    const pid_t loader = fork();
    if (loader == 0) {
      mailbox.ToParent(absl::StrCat(getpid()));  // after fork's work in the child
      while (true) pause();
    }
    EXPECT_TRUE(mailbox.FromParent(kLong).has_value());
    mailbox.ToParent(absl::StrCat(begun->worker_pid()));
    (void)begun->WaitDurable(kLong);
  });
  const pid_t loader = std::atoi(mailbox.FromChild(kLong).value_or("0").c_str());
  ASSERT_GT(loader, 0);
  mailbox.ToChild("go on");
  const pid_t worker = std::atoi(mailbox.FromChild(kLong).value_or("0").c_str());
  ASSERT_GT(worker, 0);
  trainer.Signal(SIGSTOP);
  // All threads must have stopped, or a thread may reap the worker's exit status.
  siginfo_t stopped{};
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(trainer.pid()), &stopped, WSTOPPED), 0);
  if (!IsThread()) SendSignal(worker, SIGKILL);
  trainer.Signal(SIGKILL);
  EXPECT_EQ(trainer.Wait(kLong), ChildProcess::kSignalBase + SIGKILL);
  if (!IsThread()) {
    EXPECT_EQ(subreaper.Reap(worker, kLong), ChildProcess::kSignalBase + SIGKILL);
  }
  ASSERT_TRUE(IsAlive(loader));
  RecoveryOptions options;
  options.wait_for_orphans = kLong;  // the killed worker's last writes hold the lock, too
  const auto recovered = Recover(directory(), options);
  ASSERT_TRUE(recovered.ok()) << recovered.status();
  EXPECT_THAT(recovered->kept_incomplete, IsEmpty());
  ExpectPreviousAnd(directory(), {});
  SendSignal(loader, SIGKILL);
  EXPECT_EQ(subreaper.Reap(loader, kLong), ChildProcess::kSignalBase + SIGKILL);
}

TEST_P(ForeignFork, ProgramsThatTheHostStartsInheritNothing) {
  const auto checkpointer = Make(Slow());
  ASSERT_NE(checkpointer, nullptr);
  const auto begun = Begin(checkpointer.get(), "step-1", state_);
  ASSERT_TRUE(begun.ok()) << begun.status();
  ASSERT_TRUE(WaitFor([&] { return begun->progress().bytes_written > 0; }));
  std::string listed;
  FILE* const pipe = popen("ls -l /proc/self/fd", "r");
  ASSERT_NE(pipe, nullptr);
  char buffer[4096];
  for (size_t got = 0; (got = fread(buffer, 1, sizeof(buffer), pipe)) > 0;)
    listed.append(buffer, got);
  pclose(pipe);
  EXPECT_THAT(listed, ::testing::Not(::testing::AnyOf(::testing::HasSubstr("memfd"),
                                                      ::testing::HasSubstr("anon_inode"),
                                                      ::testing::HasSubstr(directory()))));
  EXPECT_EQ(system("true"), 0);
  EXPECT_TRUE(begun->WaitDurable(kLong).ok());
  ExpectSound(absl::StrCat(directory(), "/step-1"));
}

}  // namespace
}  // namespace holdfast::testing
