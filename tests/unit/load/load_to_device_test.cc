// Loading to a device whose copies end late, in any order, or not at all.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "holdfast/load.h"
#include "runtime/sys/system.h"
#include "tests/testing/checkpoint_files.h"
#include "tests/testing/slow_device.h"
#include "tests/testing/training_state.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;
using testing::ScratchDirectory;
using testing::SlowDevice;
using testing::TrainingState;

class LoadToDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    testing::WriteRank(scratch_.path(), {}, state_.Sources());
    auto reader = CheckpointReader::Open(scratch_.path());
    ASSERT_TRUE(reader.ok()) << reader.status();
    reader_ = *std::move(reader);
    for (const PlannedTensor& tensor : reader_->tensors()) {
      const uint64_t bytes = tensor.end - tensor.begin;
      targets_.push_back({.name = tensor.name,
                          .data = device_.Allocate(bytes),
                          .bytes = bytes,
                          .device = &device_});
    }
  }
  void TearDown() override { sys::g_system = sys::kKernel; }

  void ExpectLoaded() const {
    for (size_t i = 0; i < targets_.size(); ++i) {
      for (const TrainingState::Tensor& tensor : state_.tensors()) {
        if (tensor.name != targets_[i].name) continue;
        EXPECT_EQ(std::memcmp(targets_[i].data, tensor.bytes.data(), tensor.bytes.size()), 0)
            << tensor.name;
      }
    }
  }

  ScratchDirectory scratch_;
  const TrainingState state_ = TrainingState::Uniform(12, 3'000'000, 1);
  SlowDevice device_;
  std::unique_ptr<CheckpointReader> reader_;
  std::vector<TensorTarget> targets_;
  const LoadOptions options_ = {.buffer_bytes = 8u << 20};
};

TEST_F(LoadToDevice, ReusesABufferOnlyAfterTheCopiesOutOfItHaveEnded) {
  // Bytes arrive only at completion: a buffer reused too early arrives with other bytes.
  device_.StartCompleter(2);
  const auto report = reader_->Load(targets_, options_);
  ASSERT_TRUE(report.ok()) << report.status();
  ExpectLoaded();
  EXPECT_TRUE(report->verified);
  EXPECT_TRUE(device_.pending().empty());
  EXPECT_TRUE(device_.registered().empty()) << "a registration was left behind";
  EXPECT_EQ(device_.copies_unregistered(), 0u);
}

TEST_F(LoadToDevice, LoadsWithoutRegistrationWhereItFails) {
  device_.FailCall(SlowDevice::Call::kRegisterMemory, absl::ResourceExhaustedError("no"));
  device_.CompleteAtOnce(true);
  ASSERT_TRUE(reader_->Load(targets_, options_).ok());
  ExpectLoaded();
}

TEST_F(LoadToDevice, KeepsTheBufferMappedWhenItCannotBeUnregistered) {
  static std::atomic<void*> buffer{nullptr};
  static std::atomic<bool> unmapped{false};
  sys::g_system.mmap = [](void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    void* mapping = sys::kKernel.mmap(at, bytes, protection, flags, fd, offset);
    if (fd < 0 && bytes >= kChunkBytes) buffer = mapping;
    return mapping;
  };
  sys::g_system.munmap = [](void* at, size_t bytes) {
    if (at == buffer.load()) unmapped = true;
    return sys::kKernel.munmap(at, bytes);
  };
  device_.FailCall(SlowDevice::Call::kUnregisterMemory, absl::InternalError("sticky"));
  device_.CompleteAtOnce(true);
  ASSERT_TRUE(reader_->Load(targets_, options_).ok());
  ExpectLoaded();
  EXPECT_NE(buffer.load(), nullptr);
  EXPECT_FALSE(unmapped.load());
}

TEST_F(LoadToDevice, ReportsACopyThatCannotBeStarted) {
  device_.FailCall(SlowDevice::Call::kCopyFromHost, absl::InvalidArgumentError("not mine"), 2);
  device_.CompleteAtOnce(true);
  const auto report = reader_->Load(targets_, options_);
  EXPECT_EQ(report.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(report.status().message()),
              ::testing::AllOf(HasSubstr("slow:0"), HasSubstr("not mine")));
  EXPECT_TRUE(device_.pending().empty());
  EXPECT_TRUE(device_.registered().empty());
}

TEST_F(LoadToDevice, ReportsACopyThatFails) {
  std::thread failing([this] {
    ASSERT_TRUE(device_.WaitForPending(1, absl::Minutes(1)));
    device_.Fail(device_.pending().front().ticket, absl::InternalError("bus error"));
    device_.StartCompleter(3);
  });
  const auto report = reader_->Load(targets_, options_);
  failing.join();
  EXPECT_EQ(report.status().code(), absl::StatusCode::kInternal) << report.status();
  EXPECT_THAT(std::string(report.status().message()), HasSubstr("bus error"));
  EXPECT_TRUE(device_.pending().empty());
  // The copy's end is unknown: the device may still read the buffer.
  EXPECT_FALSE(device_.registered().empty());
}

}  // namespace
}  // namespace holdfast
