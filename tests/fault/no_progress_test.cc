// Missing progress: copies that never end, saves behind a slow save, threads that cannot start, a
// broken ring. No wait is unbounded, no healthy save is stopped, and the next save works.
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <string>
#include <system_error>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "holdfast/recovery.h"
#include "runtime/layout/board.h"
#include "runtime/sys/system.h"
#include "tests/testing/child_process.h"
#include "tests/testing/path_of.h"
#include "tests/testing/save_test.h"
#include "tests/testing/slow_device.h"

namespace holdfast::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Returns a stall deadline of at least `least` that a sound save meets on this machine under its
/// present load.
class SoundSave {
 public:
  absl::Duration StallDeadline(absl::Duration least) const {
    constexpr int kManyTimes = 8;
    constexpr absl::Duration kMost = absl::Seconds(15);
    return std::clamp(kManyTimes * (absl::Now() - began_), least, kMost);
  }

 private:
  absl::Time began_ = absl::Now();
};

/// A GPU with a hanging stream, as behind a collective that other ranks never enter.
class HungDevice : public LauncherTest {
 protected:
  absl::StatusOr<SaveHandle> BeginOn(SlowDevice* device, Checkpointer* checkpointer,
                                     const std::string& name, const AttemptId& attempt = {}) {
    const TrainingState state = TrainingState::Uniform(2, 3'000'000, 1);
    std::vector<TensorSource> sources = state.Sources();
    for (TensorSource& source : sources) {
      char* const memory = device->Allocate(source.bytes);
      std::memcpy(memory, source.data, source.bytes);
      source.data = memory;
      source.device = device;
    }
    return checkpointer->SaveAsync(
        {.name = name, .step = 1, .tensors = sources, .attempt = attempt});
  }
  /// Saves "previous" and measures the time of a sound save.
  CheckpointerOptions Impatient() {
    CheckpointerOptions options = Options();
    const SoundSave sound;
    SavePrevious(directory());
    options.time_stalled_max = sound.StallDeadline(absl::Milliseconds(1500));
    return options;
  }
};
INSTANTIATE_TEST_SUITE_P(All, HungDevice, kEveryLauncher, LauncherName);

TEST_P(HungDevice, EndsTheSaveKeepsTheMemoryAndDelaysNoOtherSave) {
  SlowDevice hung("hung:0");
  SlowDevice sound("sound:0");
  sound.CompleteAtOnce(true);
  const auto checkpointer = Make(Impatient());
  ASSERT_NE(checkpointer, nullptr);
  const auto handle = BeginOn(&hung, checkpointer.get(), "hung");
  ASSERT_TRUE(handle.ok()) << handle.status();
  const auto report = handle->WaitDurable(kLong);
  EXPECT_TRUE(absl::IsDeadlineExceeded(report.status())) << report.status();
  EXPECT_TRUE(handle->IsDone());
  EXPECT_THAT(Text(report.status()), AllOf(HasSubstr("hung"), HasSubstr("quarantined")));
  EXPECT_GT(checkpointer->staging().bytes_quarantined, 0u);
  EXPECT_TRUE(checkpointer->Flush(kLong).ok()) << "its error was returned already";
  // The device thread serves other saves meanwhile.
  const auto other = BeginOn(&sound, checkpointer.get(), "other");
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_TRUE(other->WaitDurable(kLong).ok());
  ExpectSound(absl::StrCat(directory(), "/other"));
  std::filesystem::remove_all(absl::StrCat(directory(), "/other"));

  hung.CompleteAll();
  ASSERT_TRUE(WaitFor([&] { return checkpointer->staging().bytes_held == 0; }));
  EXPECT_EQ(checkpointer->staging().bytes_quarantined, 0u);
  ExpectRecovered(checkpointer.get());
}

class HungDeviceAtTheEnd : public HungDevice {};
INSTANTIATE_TEST_SUITE_P(All, HungDeviceAtTheEnd,
                         ::testing::Values(Launcher::kSpawn, Launcher::kThread), LauncherName);

TEST_P(HungDeviceAtTheEnd, ALaterSaveMayWaitForMemoryAndHasAnotherParent) {
  SlowDevice hung("hung:0");
  SlowDevice sound("sound:0");
  sound.CompleteAtOnce(true);
  CheckpointerOptions options = Impatient();
  options.staging.arena_bytes = 16u << 20;
  options.time_memory_max = options.time_stalled_max;
  const auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  const auto handle = BeginOn(&hung, checkpointer.get(), "hung");
  ASSERT_TRUE(handle.ok()) << handle.status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(handle->WaitDurable(kLong).status()));
  // Hung copy and slow save leave too little memory for the next save.
  CheckpointerOptions slow = options;
  slow.qos.bytes_per_second_max = 8u << 20;
  const auto beside = checkpointer->CreateBeside(slow);
  ASSERT_TRUE(beside.ok()) << beside.status();
  const auto first = Begin(beside->get(), "first", TrainingState::Uniform(2, 3'900'000, 2));
  ASSERT_TRUE(first.ok()) << first.status();
  const auto other = BeginOn(&sound, checkpointer.get(), "other");
  ASSERT_TRUE(other.ok()) << other.status();
  const auto report = other->WaitDurable(kLong);
  EXPECT_TRUE(report.ok()) << report.status();
  EXPECT_GT(checkpointer->staging().waits, 0u);
  EXPECT_TRUE(first->WaitDurable(kLong).ok());
  const auto listed = ListCheckpoints(directory());
  ASSERT_TRUE(listed.ok()) << listed.status();
  for (const CheckpointInfo& info : *listed) {
    const bool is_known =
        std::any_of(listed->begin(), listed->end(),
                    [&info](const CheckpointInfo& each) { return each.attempt == info.parent; });
    EXPECT_TRUE(info.parent == AttemptId{} || is_known) << info.name << " has a failed parent";
  }
  hung.CompleteAll();
  ASSERT_TRUE(WaitFor([&] { return checkpointer->staging().bytes_held == 0; }));
  for (const char* name : {"first", "other"})
    std::filesystem::remove_all(absl::StrCat(directory(), "/", name));
}

/// A shared file system that hangs: the rank board takes no writes.
std::atomic<bool> g_board_hangs{false};
ssize_t HangingBoard(int fd, const void* bytes, size_t count, off_t offset) {
  while (g_board_hangs && absl::EndsWith(PathOf(fd), layout::kBoardName))
    absl::SleepFor(absl::Milliseconds(5));
  return sys::kKernel.pwrite(fd, bytes, count, offset);
}

TEST_P(HungDeviceAtTheEnd, ARankWhoseBoardHangsAlsoEndsItsSave) {
  sys::g_system.pwrite = HangingBoard;
  const absl::Cleanup restore = [] {
    g_board_hangs = false;
    sys::g_system = sys::kKernel;
  };
  SlowDevice hung("hung:0");
  CheckpointerOptions options = Impatient();
  options.world_size = 2;
  options.time_liveness_max = absl::Seconds(1);
  const auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  const auto handle = BeginOn(&hung, checkpointer.get(), "hung", NewAttemptId());
  ASSERT_TRUE(handle.ok()) << handle.status();
  ASSERT_TRUE(hung.WaitForPending(1, kLong));
  g_board_hangs = true;
  const absl::Status ended = handle->WaitDurable(kLong).status();
  EXPECT_THAT(Text(ended), HasSubstr("quarantined"));
  g_board_hangs = false;
  hung.CompleteAll();
  EXPECT_TRUE(WaitFor([&] { return checkpointer->staging().bytes_held == 0; }));
  for (const std::string& name : Names(directory()))
    if (name != "previous") std::filesystem::remove_all(directory() + "/" + name);
}

TEST_P(HungDeviceAtTheEnd, FlushReturnsTheUnreadError) {
  SlowDevice hung("hung:0");
  const auto checkpointer = Make(Impatient());
  ASSERT_NE(checkpointer, nullptr);
  ASSERT_TRUE(BeginOn(&hung, checkpointer.get(), "hung").ok());
  const absl::Status told = checkpointer->Flush(kLong);
  EXPECT_TRUE(absl::IsDeadlineExceeded(told)) << told;
  EXPECT_THAT(Text(told), HasSubstr("quarantined"));
  hung.CompleteAll();
  ASSERT_TRUE(WaitFor([&] { return checkpointer->staging().bytes_held == 0; }));
}

TEST_P(HungDeviceAtTheEnd, TheDestructorDoesNotWaitForItAndItsMemoryStays) {
  const ChildResult result = RunInChild([this] {
    SlowDevice hung("hung:0");
    auto checkpointer = Make(Impatient());
    if (checkpointer == nullptr) return std::string();
    const auto handle = BeginOn(&hung, checkpointer.get(), "hung");
    EXPECT_TRUE(handle.ok()) << handle.status();
    EXPECT_TRUE(hung.WaitForPending(2, absl::Seconds(60)));
    checkpointer.reset();
    EXPECT_TRUE(absl::IsDeadlineExceeded(handle->WaitDurable(absl::Seconds(1)).status()));
    hung.CompleteAll();  // The memory is still mapped.
    return std::string();
  });
  EXPECT_EQ(result.status, 0);
  std::filesystem::remove_all(directory() + "/" + "hung");
}

/// Kept workers run jobs one after the other.
class Queued : public LauncherTest {};
INSTANTIATE_TEST_SUITE_P(All, Queued, ::testing::Values(Launcher::kPersistent, Launcher::kThread),
                         LauncherName);

TEST_P(Queued, BehindASlowSaveIsNoStall) {
  CheckpointerOptions options = Options();
  const SoundSave sound;
  SavePrevious(directory());
  options.time_stalled_max = sound.StallDeadline(absl::Seconds(1));
  constexpr uint64_t kChunksPerSecond = 2;
  options.qos.bytes_per_second_max = kChunksPerSecond * kChunkBytes;
  // A waiting save at the head of the queue is stopped after 1.5 deadlines and the second that its
  // rate allows; this save waits for another second.
  const auto stopped =
      static_cast<uint64_t>(absl::ToInt64Milliseconds(options.time_stalled_max) * 3 / 2 + 1000);
  const auto chunks = static_cast<uint32_t>((stopped + 1000) * kChunksPerSecond / 1000);
  options.staging.arena_bytes = (chunks + 2) * kChunkBytes;
  const auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  const TrainingState slow = TrainingState::Uniform(chunks, kChunkBytes, 1);
  const auto first = Begin(checkpointer.get(), "slow", slow);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = Begin(checkpointer.get(), "queued", TrainingState::Uniform(1, 1000, 2), 2);
  ASSERT_TRUE(second.ok()) << second.status();
  const auto report = first->WaitDurable(kLong);
  EXPECT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(second->WaitDurable(kLong).ok());
  EXPECT_TRUE(slow.CompareWith(absl::StrCat(directory(), "/slow")).ok());
  ExpectSound(absl::StrCat(directory(), "/queued"));
}

TEST(KeptWorker, ThatDiedAfterATrimIsReplaced) {
  const ScratchDirectory scratch;
  CheckpointerOptions options = SmallOptions(scratch.path());
  options.launcher = Launcher::kPersistent;
  auto checkpointer = Checkpointer::Create(options);
  ASSERT_TRUE(checkpointer.ok()) << checkpointer.status();
  const TrainingState state = TrainingState::Uniform(2, 100'000, 1);
  const auto save = [&](const std::string& name) {
    const std::vector<TensorSource> sources = state.Sources();
    const auto handle = (*checkpointer)->SaveAsync({.name = name, .step = 1, .tensors = sources});
    return handle.ok() ? handle->WaitDurable(kLong).status() : handle.status();
  };
  ASSERT_TRUE(save("step-1").ok());
  ASSERT_TRUE((*checkpointer)->Trim().ok());
  const std::vector<pid_t> children = Holdings::OfSelf().children;
  ASSERT_EQ(children.size(), 1u);
  SendSignal(children[0], SIGKILL);
  ASSERT_TRUE(WaitFor([&] { return !IsAlive(children[0]); }));
  EXPECT_TRUE(save("step-2").ok());
  // And before a job: a trim has no worker to ask.
  SendSignal(Holdings::OfSelf().children.at(0), SIGKILL);
  EXPECT_TRUE(WaitFor([&] { return (*checkpointer)->Trim().ok(); }));
  EXPECT_TRUE(save("step-3").ok());
}

/// A removal on a dead file system: unlink(2) of data does not return.
std::atomic<bool> g_removal_hangs{false};
int HangingUnlink(int directory, const char* path, int flags) {
  while (g_removal_hangs && absl::EndsWith(path, ".safetensors"))
    absl::SleepFor(absl::Milliseconds(5));
  return sys::kKernel.unlinkat(directory, path, flags);
}

TEST(HungRemoval, ByAThreadDelaysNoSave) {
  const ScratchDirectory scratch;
  const ChildResult result = RunInChild([&] {
    CheckpointerOptions options = SmallOptions(scratch.path());
    options.launcher = Launcher::kThread;
    options.time_stalled_max = absl::Seconds(2);
    auto checkpointer = *Checkpointer::Create(options);
    const TrainingState state = TrainingState::Uniform(2, 100'000, 1);
    const std::vector<TensorSource> sources = state.Sources();
    g_removal_hangs = true;
    sys::g_system.unlinkat = HangingUnlink;
    for (uint64_t step = 1; step <= 2; ++step) {
      const auto handle = checkpointer->SaveAsync(
          {.name = "latest", .step = step, .tensors = sources, .replace = true});
      EXPECT_TRUE(handle.ok() && handle->WaitDurable(kLong).ok());
    }
    const absl::Status told = checkpointer->Flush(kLong);
    EXPECT_TRUE(absl::IsDeadlineExceeded(told)) << told;
    EXPECT_THAT(Text(told), HasSubstr("no progress"));
    checkpointer.reset();  // does not wait for the thread
    EXPECT_TRUE(g_removal_hangs);
    g_removal_hangs = false;  // let the removal go on
    EXPECT_TRUE(WaitFor([&] {
      std::error_code error;
      const auto begin = std::filesystem::directory_iterator(scratch.path(), error);
      return std::distance(begin, std::filesystem::directory_iterator()) == 1;
    }));
    return std::string();
  });
  EXPECT_EQ(result.status, 0);
}

std::atomic<int> g_threads_left{0};
int LimitedThreadCreate(pthread_t* out, const pthread_attr_t* attributes, void* (*body)(void*),
                        void* argument) {
  if (g_threads_left.fetch_sub(1) <= 0) return EAGAIN;
  return sys::kKernel.thread_create(out, attributes, body, argument);
}

class ThreadLimit : public LauncherTest {
 protected:
  void TearDown() override {
    sys::g_system = sys::kKernel;
    LauncherTest::TearDown();
  }
};
INSTANTIATE_TEST_SUITE_P(All, ThreadLimit, kEveryLauncher, LauncherName);

TEST_P(ThreadLimit, IsAnErrorAndNoDeath) {
  int refused = 0;
  bool worked = false;
  for (int allowed = 0; !worked && allowed < 20; ++allowed) {
    SCOPED_TRACE(allowed);
    g_threads_left = allowed;
    sys::g_system.thread_create = LimitedThreadCreate;
    auto made = Checkpointer::Create(Options());
    absl::Status status = made.status();
    if (made.ok())
      status = Save(made->get(), "step-1", TrainingState::Uniform(2, 100'000, 1)).status();
    sys::g_system = sys::kKernel;
    worked = status.ok();
    if (worked) continue;
    ++refused;
    EXPECT_TRUE(absl::IsResourceExhausted(status) || absl::IsUnavailable(status)) << status;
    if (made.ok()) ExpectMemoryBack(made->get());
    EXPECT_THAT(Names(directory()), ::testing::IsEmpty());
  }
  EXPECT_TRUE(worked);
  EXPECT_GE(refused, 3);  // a sealer, the supervisor, the device's
}

TEST_P(ThreadLimit, ThatStopsARemovalIsTheErrorOfAFlush) {
  CheckpointerOptions options = Options();
  options.retention.keep_last = 1;
  const TrainingState state = TrainingState::Uniform(2, 100'000, 1);
  absl::Status flushed = absl::OkStatus();
  uint64_t step = 0;
  // The thread of removals is the last that a first save starts.
  for (int allowed = 0; flushed.ok() && allowed < 20; ++allowed) {
    const auto checkpointer = Make(options);
    ASSERT_NE(checkpointer, nullptr);
    g_threads_left = allowed;
    sys::g_system.thread_create = LimitedThreadCreate;
    ++step;
    const auto saved = Save(checkpointer.get(), absl::StrCat("step-", step), state, step);
    if (saved.ok()) flushed = checkpointer->Flush(kLong);
    sys::g_system = sys::kKernel;
    if (flushed.ok()) continue;
    EXPECT_TRUE(absl::IsResourceExhausted(flushed) || absl::IsUnavailable(flushed)) << flushed;
    ASSERT_TRUE(Save(checkpointer.get(), "step-100", state, 100).ok());
    EXPECT_TRUE(checkpointer->Flush(kLong).ok());
    EXPECT_THAT(Names(directory()), ::testing::ElementsAre("step-100"));
  }
  EXPECT_FALSE(flushed.ok());
}

std::atomic<int> g_waits_to_fail{0};
int BreakingWait(struct io_uring* ring, struct io_uring_cqe** out, int64_t timeout_ns) {
  if (g_waits_to_fail.load() > 0 && g_waits_to_fail.fetch_sub(1) > 0) return -EBADR;
  return sys::kKernel.uring_wait(ring, out, timeout_ns);
}

class BrokenRing : public SaveTest {
 protected:
  void TearDown() override {
    sys::g_system = sys::kKernel;
    SaveTest::TearDown();
  }
};

TEST_F(BrokenRing, FailsOneSaveOfAKeptWorkerAndNotTheNext) {
  SavePrevious(directory());
  CheckpointerOptions options = SmallOptions(directory());
  options.launcher = Launcher::kThread;
  options.engine = EngineRung::kUring;
  const auto made = Checkpointer::Create(options);
  if (!made.ok()) GTEST_SKIP() << made.status();
  const TrainingState state = TrainingState::Uniform(3, 1u << 20, 1);
  const auto first = Save(made->get(), "first", state);
  if (!first.ok()) GTEST_SKIP() << first.status();
  std::filesystem::remove_all(absl::StrCat(directory(), "/first"));
  g_waits_to_fail = 1;
  sys::g_system.uring_wait = BreakingWait;
  const auto broken = Save(made->get(), "broken", state);
  EXPECT_FALSE(broken.ok());
  ExpectRecovered(made->get());
}

TEST_F(BrokenRing, FlushReturnsTheUnreadErrorAmongManyReadOnes) {
  CheckpointerOptions options = SmallOptions(directory());
  options.launcher = Launcher::kThread;
  // The second chunk may start a minute after the first: no save ends before its Cancel.
  options.qos.bytes_per_second_max = 64u << 10;
  const auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  const TrainingState state = TrainingState::Uniform(2, kChunkBytes, 1);
  for (int i = 0; i < 20; ++i) {
    const auto seen = Begin(checkpointer.get(), "seen", state);
    ASSERT_TRUE(seen.ok()) << seen.status();
    ASSERT_TRUE(seen->Cancel().ok());
    EXPECT_FALSE(seen->WaitDurable(kLong).ok());
  }
  const auto unseen = Begin(checkpointer.get(), "unseen", state);
  ASSERT_TRUE(unseen.ok()) << unseen.status();
  ASSERT_TRUE(unseen->Cancel().ok());
  const absl::Status told = checkpointer->Flush(kLong);
  EXPECT_TRUE(absl::IsCancelled(told)) << told;
  EXPECT_THAT(Text(told), HasSubstr("unseen"));
}

}  // namespace
}  // namespace holdfast::testing
