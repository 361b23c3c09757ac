// Several directories behind one staging arena: they share memory, workers and threads, and nothing
// else.

#include <atomic>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "runtime/sys/system.h"
#include "tests/testing/child_process.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/save_test.h"
#include "tests/testing/slow_device.h"

namespace holdfast::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class Beside : public LauncherTest {
 protected:
  void SetUp() override {
    LauncherTest::SetUp();
    std::filesystem::create_directory(first_directory());
    std::filesystem::create_directory(second_directory());
  }
  std::string first_directory() const { return directory() + "/first"; }
  std::string second_directory() const { return directory() + "/second"; }

  void MakeBoth() {
    first_ = Make(Options(first_directory()));
    ASSERT_NE(first_, nullptr);
    second_ = MakeBeside(Options(second_directory()));
    ASSERT_NE(second_, nullptr);
  }
  std::unique_ptr<Checkpointer> MakeBeside(const CheckpointerOptions& options) const {
    auto beside = first_->CreateBeside(options);
    EXPECT_TRUE(beside.ok()) << beside.status();
    return beside.ok() ? *std::move(beside) : nullptr;
  }
  /// A save whose device copies wait for the test.
  absl::StatusOr<SaveHandle> BeginPending(Checkpointer* checkpointer, const std::string& name) {
    const TrainingState state = TrainingState::Uniform(1, 100'000, 1);
    std::vector<TensorSource> sources = state.Sources();
    char* memory = device_.Allocate(sources[0].bytes);
    std::memcpy(memory, sources[0].data, sources[0].bytes);
    sources[0].data = memory;
    sources[0].device = &device_;
    auto handle = checkpointer->SaveAsync({.name = name, .step = 1, .tensors = sources});
    EXPECT_TRUE(device_.WaitForPending(1, kLong));
    return handle;
  }
  static void ExpectSavesTo(Checkpointer* checkpointer, const std::string& name) {
    const TrainingState state = TrainingState::Uniform(3, 700'000, 2);
    const auto report = Save(checkpointer, name, state);
    ASSERT_TRUE(report.ok()) << report.status();
    const std::string path = absl::StrCat(checkpointer->options().directory, "/", name);
    EXPECT_EQ(report->path, path);
    ExpectSound(path);
    EXPECT_TRUE(state.CompareWith(path).ok()) << state.CompareWith(path);
  }

  SlowDevice device_;
  std::unique_ptr<Checkpointer> first_;
  std::unique_ptr<Checkpointer> second_;

  void TearDown() override {
    first_.reset();
    second_.reset();
    LauncherTest::TearDown();
  }
};

INSTANTIATE_TEST_SUITE_P(Launchers, Beside, kEveryLauncher, LauncherName);

TEST_P(Beside, HasNoThreadBeforeItRemovesSomething) {
  MakeBoth();
  const size_t threads = Names("/proc/self/task").size();
  CheckpointerOptions options = Options(directory());
  options.retention.keep_last = 1;
  const auto third = MakeBeside(options);
  ASSERT_NE(third, nullptr);
  EXPECT_EQ(Names("/proc/self/task").size(), threads);
  ASSERT_TRUE(Save(third.get(), "step-1", TrainingState::Uniform(1, 1000, 1), 1).ok());
  ASSERT_TRUE(Save(third.get(), "step-2", TrainingState::Uniform(1, 1000, 2), 2).ok());
  ASSERT_TRUE(third->Flush(kLong).ok());
  EXPECT_FALSE(std::filesystem::exists(directory() + "/step-1"));
}

TEST_P(Beside, TwoDirectoriesShareOneArenaAndItsCap) {
  MakeBoth();
  // Three arenas' worth, from two threads.
  const TrainingState state = TrainingState::Uniform(12, 4'000'000, 3);
  const auto save = [&](Checkpointer* checkpointer, absl::Status* status) {
    *status = Save(checkpointer, "big", state).status();
  };
  absl::Status first_status;
  absl::Status second_status;
  std::thread other(save, second_.get(), &second_status);
  save(first_.get(), &first_status);
  other.join();
  EXPECT_TRUE(first_status.ok()) << first_status;
  EXPECT_TRUE(second_status.ok()) << second_status;
  for (const std::string& where : {first_directory(), second_directory()}) {
    EXPECT_TRUE(state.CompareWith(where + "/big").ok()) << state.CompareWith(where + "/big");
    EXPECT_THAT(Names(where), ElementsAre("big"));
  }
  const StagingStats stats = first_->staging();
  EXPECT_LE(stats.bytes_held_peak, stats.arena_bytes);
  EXPECT_EQ(stats.leases, second_->staging().leases) << "one arena";
  ExpectMemoryBack(first_.get());
  ExpectMemoryBack(second_.get());
}

// A kept worker takes jobs in the order in which they come, memory goes to the older save first:
// two callers at once must not cross.
TEST_P(Beside, CallersAtTheSameTimeWithSavesLargerThanTheArenaAllEnd) {
  MakeBoth();
  const TrainingState state = TrainingState::Uniform(9, 4'000'000, 6);
  for (int round = 0; round < 8; ++round) {
    std::vector<std::thread> callers;
    for (Checkpointer* checkpointer : {first_.get(), second_.get(), first_.get()}) {
      callers.emplace_back([&, checkpointer, i = callers.size()] {
        const absl::Status saved =
            Save(checkpointer, absl::StrCat("round-", round, "-", i), state).status();
        EXPECT_TRUE(saved.ok()) << saved;
      });
    }
    for (std::thread& caller : callers) caller.join();
    if (HasFailure()) return;
  }
}

TEST_P(Beside, ItsWorkersAndMemoryAreThoseOfTheFirst) {
  first_ = Make(Options(first_directory()));
  ASSERT_NE(first_, nullptr);
  CheckpointerOptions options = Options(second_directory());
  options.launcher = Launcher::kSpawn;
  options.worker_program = "/nowhere";
  options.staging.arena_bytes = 1;
  options.read_back = true;
  options.retention.keep_last = 1;
  second_ = MakeBeside(options);
  ASSERT_NE(second_, nullptr);
  EXPECT_EQ(second_->options().launcher, GetParam());
  EXPECT_EQ(second_->options().staging.arena_bytes, first_->options().staging.arena_bytes);
  EXPECT_TRUE(second_->options().read_back);
  for (const char* name : {"step-1", "step-2"}) {
    ExpectSavesTo(first_.get(), name);
    ExpectSavesTo(second_.get(), name);
  }
  EXPECT_TRUE(first_->Flush(kLong).ok());
  EXPECT_TRUE(second_->Flush(kLong).ok());
  EXPECT_THAT(Names(first_directory()), ElementsAre("step-1", "step-2"));
  EXPECT_THAT(Names(second_directory()), ElementsAre("step-2")) << "retention is its own";
}

TEST_P(Beside, TheFirstMayGoFirst) {
  MakeBoth();
  ExpectSavesTo(first_.get(), "before");
  const TrainingState state = TrainingState::Uniform(2, 1'000'000, 4);
  const auto in_flight = Begin(second_.get(), "in-flight", state);
  ASSERT_TRUE(in_flight.ok()) << in_flight.status();
  first_.reset();
  EXPECT_TRUE(in_flight->WaitDurable(kLong).ok());
  ExpectSavesTo(second_.get(), "after");
  ExpectMemoryBack(second_.get());
  // And a save beside the remaining save.
  first_ = std::move(second_);
  std::filesystem::create_directory(directory() + "/third");
  second_ = MakeBeside(Options(directory() + "/third"));
  ASSERT_NE(second_, nullptr);
  ExpectSavesTo(second_.get(), "third");
}

TEST_P(Beside, TheSecondMayGoFirst) {
  MakeBoth();
  const TrainingState state = TrainingState::Uniform(2, 1'000'000, 5);
  const auto in_flight = Begin(second_.get(), "in-flight", state);
  ASSERT_TRUE(in_flight.ok()) << in_flight.status();
  second_.reset();
  const auto report = in_flight->WaitDurable(absl::ZeroDuration());
  EXPECT_TRUE(report.ok()) << "its destructor waits for its saves: " << report.status();
  ExpectSavesTo(first_.get(), "after");
  ExpectMemoryBack(first_.get());
}

TEST_P(Beside, FlushAndDestructorDoNotWaitForTheOthersSaves) {
  MakeBoth();
  const auto pending = BeginPending(first_.get(), "pending");
  ASSERT_TRUE(pending.ok()) << pending.status();
  EXPECT_TRUE(second_->Flush(absl::ZeroDuration()).ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(first_->Flush(absl::ZeroDuration())));
  second_.reset();
  EXPECT_FALSE(pending->IsDone());
  device_.CompleteAll();
  EXPECT_TRUE(pending->WaitDurable(kLong).ok());
  EXPECT_TRUE(first_->Flush(kLong).ok());
}

TEST_P(Beside, AFailedSaveIsReportedByItsOwnDoor) {
  MakeBoth();
  const auto failing = BeginPending(first_.get(), "failing");
  ASSERT_TRUE(failing.ok()) << failing.status();
  device_.Fail(device_.pending().front().ticket, absl::InternalError("planned"));
  EXPECT_TRUE(WaitFor([&] { return failing->IsDone(); }));
  EXPECT_TRUE(second_->Flush(kLong).ok());
  const absl::Status told = first_->Flush(kLong);
  EXPECT_THAT(std::string(told.message()), HasSubstr("planned"));
  EXPECT_TRUE(first_->Flush(kLong).ok()) << "once";
  EXPECT_THAT(Names(first_directory()), IsEmpty());
  ExpectSavesTo(second_.get(), "works");
}

TEST_P(Beside, MemoryAloneSavesForOthers) {
  CheckpointerOptions options = Options("");
  auto memory = Checkpointer::CreateMemory(options);
  ASSERT_TRUE(memory.ok()) << memory.status();
  const TrainingState state = TrainingState::Uniform(1, 1000, 1);
  const auto refused = (*memory)->SaveAsync({.name = "s", .step = 1, .tensors = state.Sources()});
  EXPECT_TRUE(absl::IsFailedPrecondition(refused.status())) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), ::testing::HasSubstr("CreateBeside"));
  first_ = *std::move(memory);
  const auto beside = MakeBeside(Options(first_directory()));
  first_ = nullptr;
  ExpectSavesTo(beside.get(), "step-1");

  EXPECT_TRUE(absl::IsInvalidArgument(Checkpointer::Create(options).status()));
  options.rank = 1;
  EXPECT_TRUE(absl::IsInvalidArgument(Checkpointer::CreateMemory(options).status()));
}

TEST_P(Beside, AForeignChildMakesNone) {
  if (kAnySanitizer) GTEST_SKIP() << "the heap may be locked in a child of a process with threads";
  first_ = Make(Options(first_directory()));
  ASSERT_NE(first_, nullptr);
  ChildProcess child([this] {
    const auto beside = first_->CreateBeside(Options(second_directory()));
    EXPECT_TRUE(absl::IsFailedPrecondition(beside.status())) << beside.status();
  });
  EXPECT_EQ(child.Wait(kLong), 0);
}

// ---- A worker that cannot be stopped.

std::atomic<bool> g_stuck{false};
std::atomic<int> g_stuck_calls{0};

/// The first call does not end while `g_stuck`; as on a disk that does not answer.
int StuckFsync(int) {
  if (g_stuck && g_stuck_calls.fetch_add(1) == 0) {
    while (g_stuck) absl::SleepFor(absl::Milliseconds(5));
  }
  return 0;
}

TEST(QuarantinedSave, KeepsItsMemoryAndHangsNeitherFlushNorDestructor) {
  if (kAnySanitizer)
    GTEST_SKIP() << "a stuck thread keeps what it has for good, and races with the end";
  const ScratchDirectory scratch;
  const std::string stuck_directory = scratch.path() + "/stuck";
  const std::string other_directory = scratch.path() + "/other";
  std::filesystem::create_directory(stuck_directory);
  std::filesystem::create_directory(other_directory);
  CheckpointerOptions options = SmallOptions(stuck_directory);
  options.launcher = Launcher::kThread;
  options.time_stalled_max = absl::Milliseconds(200);
  auto first = Checkpointer::Create(options);
  ASSERT_TRUE(first.ok()) << first.status();
  options.directory = other_directory;
  auto second = (*first)->CreateBeside(options);
  ASSERT_TRUE(second.ok()) << second.status();

  const sys::SystemCalls before = sys::g_system;
  const absl::Cleanup restore = [&before] { sys::g_system = before; };
  sys::g_system.fsync = StuckFsync;
  g_stuck_calls = 0;
  g_stuck = true;
  const TrainingState state = TrainingState::Uniform(2, 500'000, 1);
  const std::vector<TensorSource> sources = state.Sources();
  const auto handle = (*first)->SaveAsync({.name = "stuck", .step = 1, .tensors = sources});
  ASSERT_TRUE(handle.ok()) << handle.status();
  const auto report = handle->WaitDurable(kLong);
  EXPECT_TRUE(absl::IsDeadlineExceeded(report.status())) << report.status();
  EXPECT_THAT(std::string(report.status().message()), HasSubstr("quarantined"));
  EXPECT_GT((*first)->staging().bytes_quarantined, 0u);
  EXPECT_TRUE((*first)->Flush(kLong).ok()) << "WaitDurable has told it";

  // The other door goes on, with another worker.
  const auto next = (*second)->SaveAsync({.name = "next", .step = 1, .tensors = sources});
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_TRUE(next->WaitDurable(kLong).ok()) << next->WaitDurable(kLong).status();
  EXPECT_TRUE(state.CompareWith(other_directory + "/next").ok());

  first->reset();
  second->reset();
  EXPECT_TRUE(g_stuck) << "both destructors have returned, the worker is where it was";
  // The worker goes on one day, in memory that still belongs to the worker.
  g_stuck = false;
  EXPECT_TRUE(WaitFor([&] { return std::filesystem::exists(stuck_directory + "/stuck"); }));
}

TEST_P(Beside, AKeptHandleHoldsNoDescriptor) {
  CheckpointerOptions options = Options();
  options.qos.bytes_per_second_max = 4u << 20;
  const auto first = Make(options);
  ASSERT_NE(first, nullptr);
  const TrainingState state = TrainingState::Uniform(2, 2u << 20, 1);
  std::vector<SaveHandle> kept;
  const auto count = [] {
    const auto descriptors = std::filesystem::directory_iterator("/proc/self/fd");
    return static_cast<size_t>(std::distance(descriptors, {}));
  };
  size_t after_two = 0;
  for (int i = 0; i < 8; ++i) {
    options.directory = absl::StrCat(directory(), "/", i);
    std::filesystem::create_directory(options.directory);
    auto door = first->CreateBeside(options);
    ASSERT_TRUE(door.ok()) << door.status();
    const auto handle = Begin(door->get(), "cancelled", state);
    ASSERT_TRUE(handle.ok()) << handle.status();
    EXPECT_TRUE(handle->Cancel().ok());
    // A save may commit before the cancellation reaches its worker.
    const absl::Status ended = handle->WaitDurable(kLong).status();
    EXPECT_TRUE(ended.ok() || absl::IsCancelled(ended)) << ended;
    kept.push_back(*handle);
    (void)(*door)->Flush(kLong);
    door->reset();
    if (i == 1) after_two = count();
  }
  // The thread of a worker closes its own a moment after the save has ended.
  EXPECT_TRUE(WaitFor([&] { return count() <= after_two; })) << count() << " after " << after_two;
}

}  // namespace
}  // namespace holdfast::testing
