// Staging memory is held until no transfer can touch it, and no longer.
#include <signal.h>
#include <sys/vfs.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "runtime/sys/system.h"
#include "tests/testing/child_process.h"
#include "tests/testing/holdings.h"
#include "tests/testing/save_test.h"
#include "tests/testing/slow_device.h"

namespace holdfast::testing {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kArenaBytes = 32u << 20;

class DeviceMemory : public SaveTest {
 protected:
  void SetUp() override {
    SaveTest::SetUp();
    device_ = std::make_unique<SlowDevice>("slow:0");
    CheckpointerOptions options = SmallOptions(directory());
    options.staging.arena_bytes = kArenaBytes;
    options.time_stalled_max = absl::Milliseconds(500);
    options.when_full = WhenFull::kSkip;
    checkpointer_ = Make(options);
    ASSERT_NE(checkpointer_, nullptr);
  }
  void TearDown() override {
    checkpointer_.reset();
    device_.reset();
    SaveTest::TearDown();
  }
  /// A save of three quarters of the arena with copies in flight.
  SaveHandle BeginCopies() {
    const TrainingState state = TrainingState::Uniform(1, kArenaBytes / 4 * 3, 1);
    std::vector<TensorSource> sources = state.Sources();
    char* const memory = device_->Allocate(sources[0].bytes);
    std::memcpy(memory, sources[0].data, sources[0].bytes);
    sources[0].data = memory;
    sources[0].device = device_.get();
    auto handle = checkpointer_->SaveAsync({.name = "copied", .step = 1, .tensors = sources});
    EXPECT_TRUE(handle.ok()) << handle.status();
    EXPECT_TRUE(device_->WaitForPending(1, absl::Seconds(60)));
    return handle.ok() ? *std::move(handle) : SaveHandle();
  }

  std::unique_ptr<SlowDevice> device_;
  std::unique_ptr<Checkpointer> checkpointer_;
};

TEST_F(DeviceMemory, OfAFailingDeviceIsQuarantinedUntilTheCopiesEnd) {
  const SaveHandle handle = BeginCopies();
  device_->FailCall(SlowDevice::Call::kIsDone, absl::UnavailableError("no answer"), 0, 1u << 30);
  const auto report = handle.WaitDurable(kLong);
  EXPECT_FALSE(report.ok());
  ASSERT_TRUE(WaitFor([&] { return checkpointer_->staging().bytes_quarantined > 0; }));
  const StagingStats stats = checkpointer_->staging();
  EXPECT_GT(device_->pending().size(), 0u);
  ASSERT_EQ(stats.epochs.size(), 1u);
  EXPECT_THAT(stats.epochs[0].quarantined, HasSubstr("copies"));
  device_->FailCall(SlowDevice::Call::kIsDone, absl::OkStatus(), 0, 0);
  device_->CompleteAll();
  EXPECT_TRUE(WaitFor([&] { return checkpointer_->staging().bytes_held == 0; }));
}

TEST_F(DeviceMemory, OfALostContextComesBackAtOnce) {
  const SaveHandle handle = BeginCopies();
  device_->FailCall(SlowDevice::Call::kIsDone, absl::AbortedError("context lost"), 0, 1u << 30);
  EXPECT_FALSE(handle.WaitDurable(kLong).ok());
  EXPECT_TRUE(WaitFor([&] { return checkpointer_->staging().bytes_held == 0; }));
  device_->CompleteAll();  // so that the fake device releases the arena
}

TEST_F(DeviceMemory, InQuarantineIsNotHeldBySavesInFlight) {
  const SaveHandle handle = BeginCopies();
  EXPECT_FALSE(handle.WaitDurable(kLong).ok());  // the copies do not end
  ASSERT_TRUE(WaitFor([&] { return checkpointer_->staging().bytes_quarantined > 0; }));
  // A save above the free memory streams: no save is skipped.
  const TrainingState state = TrainingState::Uniform(2, kArenaBytes / 2, 2);
  const auto report = Save(checkpointer_.get(), "beside", state);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(report->streamed);
  EXPECT_TRUE(state.CompareWith(report->path).ok());
  device_->CompleteAll();
  EXPECT_TRUE(WaitFor([&] { return checkpointer_->staging().bytes_held == 0; }));
}

TEST_F(DeviceMemory, WithoutARegistrationIsCopiedAllTheSame) {
  device_->FailCall(SlowDevice::Call::kRegisterMemory, absl::ResourceExhaustedError("no pins"), 0,
                    1u << 30);
  device_->CompleteAtOnce(true);
  const TrainingState state = TrainingState::Uniform(1, 1u << 20, 1);
  std::vector<TensorSource> sources = state.Sources();
  char* const memory = device_->Allocate(sources[0].bytes);
  std::memcpy(memory, sources[0].data, sources[0].bytes);
  sources[0].data = memory;
  sources[0].device = device_.get();
  for (const bool registers : {false, false, true}) {
    if (registers) device_->FailCall(SlowDevice::Call::kRegisterMemory, absl::OkStatus(), 0, 0);
    const auto handle = checkpointer_->SaveAsync(
        {.name = registers ? "registered" : "copied", .tensors = sources, .replace = true});
    ASSERT_TRUE(handle.ok()) << handle.status();
    const auto report = handle->WaitDurable(kLong);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_TRUE(state.CompareWith(report->path).ok());
    if (registers) {
      EXPECT_EQ(report->unregistered, "");
    } else {
      EXPECT_EQ(report->unregistered, "register with slow:0: no pins");
      EXPECT_TRUE(absl::IsResourceExhausted(checkpointer_->RegisterDevice(device_.get())));
      EXPECT_TRUE(device_->registered().empty());
    }
    EXPECT_EQ(checkpointer_->Flush(kLong), absl::OkStatus());
    // The next save registers new pages.
    EXPECT_EQ(checkpointer_->Trim(), absl::OkStatus());
  }
}

int IsNfs(int fd, struct statfs* found) {
  const int result = sys::kKernel.fstatfs(fd, found);
  found->f_type = 0x6969;
  return result;
}

/// NFS goes on with the direct write of a killed process, and shows no end of the write.
class NetworkFileSystem : public SaveTest, public ::testing::WithParamInterface<EngineRung> {
 protected:
  void TearDown() override {
    sys::g_system = sys::kKernel;
    SaveTest::TearDown();
  }
};
INSTANTIATE_TEST_SUITE_P(All, NetworkFileSystem,
                         ::testing::Values(EngineRung::kUring, EngineRung::kPwrite), EngineName);

TEST_P(NetworkFileSystem, KeepsTheMemoryOfAKilledWorkerWithoutARing) {
  HOLDFAST_SKIP_WITHOUT_RING(GetParam());
  const ChildResult result = RunInChild([this] {
    sys::g_system.fstatfs = IsNfs;
    CheckpointerOptions options = SmallOptions(directory());
    options.engine = GetParam();
    options.staging.arena_bytes = kArenaBytes;
    options.qos.bytes_per_second_max = 64u << 10;  // a second chunk takes a minute
    const auto checkpointer = Make(options);
    if (checkpointer == nullptr) return std::string();
    const auto handle = Begin(checkpointer.get(), "step-1", TrainingState::Uniform(3, 4u << 20, 1));
    EXPECT_TRUE(handle.ok()) << handle.status();
    if (!handle.ok()) return std::string();
    EXPECT_TRUE(WaitFor([&] { return handle->progress().bytes_written > 0; }));
    SendSignal(handle->worker_pid(), SIGKILL);
    const absl::Status ended = handle->WaitDurable(kLong).status();
    EXPECT_TRUE(absl::IsAborted(ended)) << ended;
    if (GetParam() == EngineRung::kUring) {
      EXPECT_TRUE(WaitFor([&] { return checkpointer->staging().bytes_held == 0; }));
      return std::string();
    }
    EXPECT_THAT(Text(ended), HasSubstr("quarantined for good"));
    EXPECT_FALSE(
        WaitFor([&] { return checkpointer->staging().bytes_quarantined == 0; }, absl::Seconds(2)));
    return std::string();
  });
  EXPECT_EQ(result.status, 0);
  std::filesystem::remove_all(directory() + "/step-1");
}

/// Rank 0 of two; rank 1 never comes.
class LoneRank : public LauncherTest {
 protected:
  CheckpointerOptions Rank() const {
    CheckpointerOptions options = Options();
    options.world_size = 2;
    return options;
  }
  static absl::StatusOr<SaveHandle> BeginRank(Checkpointer* checkpointer, const std::string& name,
                                              const AttemptId& attempt) {
    const TrainingState state = TrainingState::Uniform(3, 8u << 20, 3);
    const std::vector<TensorSource> sources = state.Sources();
    return checkpointer->SaveAsync(
        {.name = name, .step = 1, .tensors = sources, .attempt = attempt});
  }
};
INSTANTIATE_TEST_SUITE_P(All, LoneRank, kEveryLauncher, LauncherName);

TEST_P(LoneRank, HoldsNoStagingMemoryWhileItWaitsForVotes) {
  const auto checkpointer = Make(Rank());
  ASSERT_NE(checkpointer, nullptr);
  const auto first = BeginRank(checkpointer.get(), "step-1", NewAttemptId());
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(WaitFor([&] { return checkpointer->staging().bytes_held == 0; }));
  EXPECT_FALSE(first->IsDone());
  EXPECT_TRUE(WaitFor([&] { return first->progress().phase == "waiting for ranks"; }));
  EXPECT_EQ(checkpointer->staging().saves_in_flight, 1u);
  EXPECT_TRUE(absl::IsFailedPrecondition(checkpointer->Trim())) << "its worker cannot answer now";
  EXPECT_FALSE(first->IsDone());
  const bool one_job = GetParam() == Launcher::kSpawn || GetParam() == Launcher::kFork;
  if (one_job) {
    // A page mapped only by the worker is missing to the next trainer.
    EXPECT_TRUE(WaitFor(
        [&] { return Holdings::Of(first->worker_pid()).resident_shared_bytes < kArenaBytes / 4; }));
    // Two such states do not fit: the next call would wait for the first save's end.
    const auto second = BeginRank(checkpointer.get(), "step-2", NewAttemptId());
    EXPECT_TRUE(second.ok()) << second.status();
    EXPECT_FALSE(first->IsDone());
    EXPECT_TRUE(second->Cancel().ok());
    EXPECT_FALSE(second->WaitDurable(kLong).ok());
  }
  EXPECT_TRUE(first->Cancel().ok());
  EXPECT_FALSE(first->WaitDurable(kLong).ok());
  (void)checkpointer->Flush(kLong);
}

}  // namespace
}  // namespace holdfast::testing
