// The GPU device on a real GPU, and on the fake one: the order of copies and streams, registration
// of shared memory, and the bytes themselves. Where there is no GPU its tests skip.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <iostream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "holdfast/device.h"
#include "runtime/device/gpu_device.h"
#include "tests/testing/gpu_driver.h"

namespace holdfast::testing {
namespace {

// A memfd mapping as in the arena, and a tensor on the GPU.
class CudaGpuTest : public ::testing::TestWithParam<GpuKind> {
 protected:
  // Long enough for a real GPU to be late.
  const size_t bytes_ = size_t{GetParam().fake ? 4u : 64u} << 20;

  void SetUp() override {
    auto gpu = GpuDriver::Open(GetParam());
    if (!gpu.ok()) GTEST_SKIP() << "no GPU: " << gpu.status();
    gpu_ = *std::move(gpu);
    // Said once, for the reader of the log.
    static std::set<std::string>* const said = new std::set<std::string>;
    if (said->insert(GetParam().name).second) std::cout << gpu_->Describe() << std::endl;
    device_ = Find(0);
    ASSERT_NE(device_, nullptr);
    const int fd = memfd_create("cuda_gpu_test", MFD_CLOEXEC);
    ASSERT_GE(fd, 0);
    ASSERT_EQ(ftruncate(fd, bytes_), 0);
    void* const map =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    ASSERT_NE(map, MAP_FAILED);
    close(fd);
    ASSERT_EQ(madvise(map, bytes_, MADV_DONTFORK), 0);
    arena_ = static_cast<char*>(map);
    tensor_ = gpu_->Allocate(bytes_);
    stream_ = gpu_->MakeStream();
  }
  void TearDown() override {
    if (arena_ == nullptr) return;
    EXPECT_TRUE(gpu_->IsCurrent()) << "the device has changed this thread's context";
    gpu_->EndStream(stream_);
    gpu_->Free(tensor_);
    EXPECT_EQ(munmap(arena_, bytes_), 0);
  }

  // Of all tests: a device lives as long as the process.
  static Device* Find(int ordinal) {
    static std::map<std::string, device::GpuDevices*>* const all =
        new std::map<std::string, device::GpuDevices*>;
    device::GpuDevices*& devices = (*all)[GetParam().name];
    if (devices == nullptr) {
      devices = new device::GpuDevices(GetParam().api, GetParam().library());
    }
    const absl::StatusOr<Device*> device = devices->Find(ordinal);
    EXPECT_TRUE(device.ok()) << device.status();
    return device.value_or(nullptr);
  }
  void WaitFor(const absl::StatusOr<CopyTicket>& ticket) {
    ASSERT_TRUE(ticket.ok()) << ticket.status();
    const absl::Status status = device_->Wait(*ticket, absl::Seconds(60));
    ASSERT_TRUE(status.ok()) << status;
  }
  void FillTensor(char byte) {
    gpu_->Fill(tensor_, byte, bytes_, stream_);
    gpu_->Synchronize(stream_);
  }

  std::unique_ptr<GpuDriver> gpu_;
  Device* device_ = nullptr;
  char* arena_ = nullptr;
  char* tensor_ = nullptr;
  device::GpuStream stream_ = nullptr;
};
INSTANTIATE_TEST_SUITE_P(All, CudaGpuTest, ::testing::ValuesIn(kEveryGpu),
                         [](const ::testing::TestParamInfo<GpuKind>& kind) -> std::string {
                           return kind.param.name;
                         });

TEST_P(CudaGpuTest, CopiesSeeWhatTheStreamWroteAndTheStreamWaitsForThem) {
  ASSERT_TRUE(device_->RegisterMemory(arena_, bytes_).ok());
  EXPECT_TRUE(device_->RegisterMemory(arena_, bytes_).ok());
  const int rounds = GetParam().fake ? 2 : 20;
  for (int round = 0; round < rounds; ++round) {
    // A long queue of writes: the copy must see the last, and the write after the wait must not
    // overtake the copy.
    for (int i = 0; i < 20; ++i) {
      gpu_->Fill(tensor_, static_cast<char>(i), bytes_, stream_);
    }
    gpu_->Fill(tensor_, static_cast<char>(100 + round), bytes_, stream_);
    ASSERT_TRUE(device_->OrderAfter(stream_).ok());
    std::vector<CopyTicket> tickets;
    for (size_t offset = 0; offset < bytes_; offset += bytes_ / 8) {
      const auto ticket = device_->CopyToHost(arena_ + offset, tensor_ + offset, bytes_ / 8);
      ASSERT_TRUE(ticket.ok()) << ticket.status();
      tickets.push_back(*ticket);
    }
    ASSERT_TRUE(device_->MakeStreamWait(stream_).ok());
    gpu_->Fill(tensor_, 0, bytes_, stream_);
    for (const CopyTicket ticket : tickets) {
      ASSERT_TRUE(device_->Wait(ticket, absl::Seconds(60)).ok());
    }
    const std::vector<char> expected(bytes_, static_cast<char>(100 + round));
    ASSERT_EQ(std::memcmp(arena_, expected.data(), bytes_), 0) << "round " << round;
  }
  gpu_->Synchronize(stream_);
  EXPECT_TRUE(device_->UnregisterMemory(arena_, bytes_).ok());
}

TEST_P(CudaGpuTest, CopiesComeAfterTheDefaultStreamToo) {
  gpu_->Fill(tensor_, 9, bytes_, nullptr);
  ASSERT_TRUE(device_->OrderAfter(nullptr).ok());
  WaitFor(device_->CopyToHost(arena_, tensor_, bytes_));
  EXPECT_EQ(arena_[0], 9);
  EXPECT_EQ(arena_[bytes_ - 1], 9);
  EXPECT_TRUE(device_->MakeStreamWait(nullptr).ok());
  gpu_->Synchronize(nullptr);
}

TEST_P(CudaGpuTest, WorksFromAThreadWithoutADeviceAndLeavesItAsItWas) {
  FillTensor(7);
  std::thread([this] {
    const bool before = gpu_->IsCurrent();
    WaitFor(device_->CopyToHost(arena_, tensor_, bytes_));
    EXPECT_EQ(gpu_->IsCurrent(), before);
  }).join();
  EXPECT_EQ(arena_[0], 7);
  EXPECT_EQ(arena_[bytes_ - 1], 7);
}

TEST_P(CudaGpuTest, FarMoreCopiesThanEventsAllEnd) {
  FillTensor(5);
  constexpr size_t kCopies = 20000;
  std::vector<CopyTicket> tickets;
  for (size_t i = 0; i < kCopies; ++i) {
    const auto ticket = device_->CopyToHost(arena_ + i, tensor_ + i, 1);
    ASSERT_TRUE(ticket.ok()) << ticket.status();
    tickets.push_back(*ticket);
  }
  WaitFor(tickets.back());
  for (const CopyTicket ticket : tickets) ASSERT_TRUE(*device_->IsDone(ticket));
  EXPECT_EQ(std::string(arena_, kCopies), std::string(kCopies, 5));
}

TEST_P(CudaGpuTest, LoadsIntoDeviceMemory) {
  for (size_t i = 0; i < bytes_; ++i) arena_[i] = static_cast<char>(i * 31 >> 8);
  WaitFor(device_->CopyFromHost(tensor_, arena_, bytes_));
  std::vector<char> back(bytes_);
  gpu_->CopyOut(back.data(), tensor_, bytes_);
  EXPECT_EQ(std::memcmp(back.data(), arena_, bytes_), 0);
}

TEST_P(CudaGpuTest, CopiesManagedMemory) {
  char* const managed = gpu_->AllocateManaged(4096);
  gpu_->Fill(managed, 3, 4096, stream_);
  ASSERT_TRUE(device_->OrderAfter(stream_).ok());
  WaitFor(device_->CopyToHost(arena_, managed, 4096));
  EXPECT_EQ(arena_[4095], 3);
  gpu_->Free(managed);
}

TEST_P(CudaGpuTest, RefusesHostMemoryAndLengthsBeyondTheAllocation) {
  std::vector<char> host(4096);
  EXPECT_EQ(device_->CopyToHost(arena_, host.data(), 4096).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(device_->CopyToHost(arena_, tensor_, size_t{1} << 46).status().code(),
            absl::StatusCode::kInvalidArgument);
  // Pinned memory of the host is not the device's either.
  ASSERT_TRUE(device_->RegisterMemory(arena_, bytes_).ok());
  EXPECT_EQ(device_->CopyToHost(arena_, arena_ + 4096, 4096).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(device_->UnregisterMemory(arena_, bytes_).ok());
}

TEST_P(CudaGpuTest, AForeignRegistrationIsUsedAndNotTakenBack) {
  gpu_->Register(arena_, bytes_);
  EXPECT_TRUE(device_->RegisterMemory(arena_, bytes_).ok());
  EXPECT_FALSE(device_->UnregisterMemory(arena_, bytes_).ok());
  gpu_->Unregister(arena_);
}

TEST_P(CudaGpuTest, MemoryIsRegisteredAnewAfterItsRegistrationHasGone) {
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(device_->RegisterMemory(arena_, bytes_).ok());
    FillTensor(static_cast<char>(round));
    WaitFor(device_->CopyToHost(arena_, tensor_, bytes_));
    EXPECT_EQ(arena_[bytes_ - 1], round);
    const absl::Status gone = device_->UnregisterMemory(arena_, bytes_);
    ASSERT_TRUE(gone.ok()) << gone;
  }
}

TEST_P(CudaGpuTest, AStreamThatCapturesAGraphIsRefusedAndItsCaptureLives) {
  gpu_->BeginCapture(stream_);
  EXPECT_EQ(device_->OrderAfter(stream_).code(), absl::StatusCode::kFailedPrecondition);
  // Copies of other tensors, and queries of copies, go on beside the capture.
  WaitFor(device_->CopyToHost(arena_, tensor_, 4096));
  EXPECT_TRUE(device_->RegisterMemory(arena_, bytes_).ok());
  EXPECT_TRUE(device_->UnregisterMemory(arena_, bytes_).ok());
  gpu_->EndCapture(stream_);
  EXPECT_TRUE(device_->OrderAfter(stream_).ok());
}

TEST_P(CudaGpuTest, TwoDevicesShareARegistrationAndRefuseEachOthersMemory) {
  if (gpu_->devices() < 2) GTEST_SKIP() << "one device alone";
  Device* const second = Find(1);
  ASSERT_NE(second, nullptr);
  EXPECT_TRUE(gpu_->IsCurrent()) << "the second device has become this thread's";
  EXPECT_EQ(second->CopyToHost(arena_, tensor_, 4096).status().code(),
            absl::StatusCode::kInvalidArgument);
  auto other = GpuDriver::Open(GetParam(), 1);
  ASSERT_TRUE(other.ok()) << other.status();
  char* const memory = (*other)->Allocate(4096);
  (*other)->Fill(memory, 6, 4096, nullptr);
  (*other)->Synchronize(nullptr);
  ASSERT_TRUE(device_->RegisterMemory(arena_, bytes_).ok());
  ASSERT_TRUE(second->RegisterMemory(arena_, bytes_).ok());
  EXPECT_TRUE(device_->UnregisterMemory(arena_, bytes_).ok());
  const auto ticket = second->CopyToHost(arena_, memory, 4096);
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  EXPECT_TRUE(second->Wait(*ticket, absl::Seconds(60)).ok());
  EXPECT_EQ(arena_[4095], 6);
  EXPECT_TRUE(second->UnregisterMemory(arena_, bytes_).ok());
  (*other)->Free(memory);
  ASSERT_TRUE(GpuDriver::Open(GetParam(), 0).ok());  // current again
}

TEST_P(CudaGpuTest, AForkedChildIsRefusedAndTheParentGoesOn) {
  FillTensor(8);
  const pid_t child = fork();
  if (child == 0) {
    _exit(device_->CopyToHost(arena_, tensor_, 1).status().code() ==
                  absl::StatusCode::kFailedPrecondition
              ? 0
              : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  WaitFor(device_->CopyToHost(arena_, tensor_, bytes_));
  EXPECT_EQ(arena_[bytes_ - 1], 8);
}

}  // namespace
}  // namespace holdfast::testing
