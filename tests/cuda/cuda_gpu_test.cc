// The CUDA device on a real GPU: the order of copies and streams, registration of shared memory,
// and the bytes themselves. Where there is no GPU every test but the first skips.
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "holdfast/cuda.h"
#include "holdfast/device.h"

namespace holdfast {
namespace {

TEST(CudaWithoutGpu, IsNotFoundAndNeverACrash) {
  EnableCuda();
  EXPECT_EQ(CudaDevice(-1).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(CudaDevice(1 << 20).status().code(), absl::StatusCode::kNotFound);
}

// A memfd mapping as in the arena, and a tensor on the GPU.
class CudaGpuTest : public ::testing::Test {
 protected:
  static constexpr size_t kBytes = size_t{64} << 20;

  void SetUp() override {
    EnableCuda();
    absl::StatusOr<Device*> device = CudaDevice(0);
    if (!device.ok()) GTEST_SKIP() << "no GPU: " << device.status();
    device_ = *device;
    const int fd = memfd_create("cuda_gpu_test", MFD_CLOEXEC);
    ASSERT_GE(fd, 0);
    ASSERT_EQ(ftruncate(fd, kBytes), 0);
    void* const map =
        mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    ASSERT_NE(map, MAP_FAILED);
    close(fd);
    ASSERT_EQ(madvise(map, kBytes, MADV_DONTFORK), 0);
    arena_ = static_cast<char*>(map);
    ASSERT_EQ(cudaMalloc(&tensor_, kBytes), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  void TearDown() override {
    if (device_ == nullptr) return;
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    EXPECT_EQ(cudaFree(tensor_), cudaSuccess);
    EXPECT_EQ(munmap(arena_, kBytes), 0);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }

  Device* device_ = nullptr;
  char* arena_ = nullptr;
  void* tensor_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

TEST_F(CudaGpuTest, CopiesSeeWhatTheStreamWroteAndTheStreamWaitsForThem) {
  ASSERT_TRUE(device_->RegisterMemory(arena_, kBytes).ok());
  EXPECT_TRUE(device_->RegisterMemory(arena_, kBytes).ok());
  for (int round = 0; round < 20; ++round) {
    // A long queue of writes: the copy must see the last, and the write after the wait must not
    // overtake the copy.
    for (int i = 0; i < 20; ++i) {
      ASSERT_EQ(cudaMemsetAsync(tensor_, i, kBytes, stream_), cudaSuccess);
    }
    ASSERT_EQ(cudaMemsetAsync(tensor_, 100 + round, kBytes, stream_), cudaSuccess);
    ASSERT_TRUE(device_->OrderAfter(stream_).ok());
    std::vector<CopyTicket> tickets;
    for (size_t offset = 0; offset < kBytes; offset += kBytes / 8) {
      const auto ticket =
          device_->CopyToHost(arena_ + offset, static_cast<char*>(tensor_) + offset, kBytes / 8);
      ASSERT_TRUE(ticket.ok()) << ticket.status();
      tickets.push_back(*ticket);
    }
    ASSERT_TRUE(device_->MakeStreamWait(stream_).ok());
    ASSERT_EQ(cudaMemsetAsync(tensor_, 0, kBytes, stream_), cudaSuccess);
    for (const CopyTicket ticket : tickets) {
      ASSERT_TRUE(device_->Wait(ticket, absl::Seconds(60)).ok());
    }
    const std::vector<char> expected(kBytes, static_cast<char>(100 + round));
    ASSERT_EQ(std::memcmp(arena_, expected.data(), kBytes), 0) << "round " << round;
  }
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_TRUE(device_->UnregisterMemory(arena_, kBytes).ok());
}

TEST_F(CudaGpuTest, WorksFromAThreadWithoutADeviceAndLeavesItAsItWas) {
  ASSERT_EQ(cudaMemset(tensor_, 7, kBytes), cudaSuccess);
  std::thread([this] {
    const auto ticket = device_->CopyToHost(arena_, tensor_, kBytes);
    ASSERT_TRUE(ticket.ok()) << ticket.status();
    EXPECT_TRUE(device_->Wait(*ticket, absl::Seconds(60)).ok());
  }).join();
  EXPECT_EQ(arena_[0], 7);
  EXPECT_EQ(arena_[kBytes - 1], 7);
}

TEST_F(CudaGpuTest, LoadsIntoDeviceMemory) {
  for (size_t i = 0; i < kBytes; ++i) arena_[i] = static_cast<char>(i * 31 >> 8);
  const auto ticket = device_->CopyFromHost(tensor_, arena_, kBytes);
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  ASSERT_TRUE(device_->Wait(*ticket, absl::Seconds(60)).ok());
  std::vector<char> back(kBytes);
  ASSERT_EQ(cudaMemcpy(back.data(), tensor_, kBytes, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(std::memcmp(back.data(), arena_, kBytes), 0);
}

TEST_F(CudaGpuTest, RefusesHostMemoryAndLengthsBeyondTheAllocation) {
  std::vector<char> host(4096);
  EXPECT_EQ(device_->CopyToHost(arena_, host.data(), 4096).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(device_->CopyToHost(arena_, tensor_, size_t{1} << 50).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(CudaGpuTest, AForeignRegistrationIsUsedAndNotTakenBack) {
  ASSERT_EQ(cudaHostRegister(arena_, kBytes, cudaHostRegisterPortable), cudaSuccess);
  EXPECT_TRUE(device_->RegisterMemory(arena_, kBytes).ok());
  EXPECT_FALSE(device_->UnregisterMemory(arena_, kBytes).ok());
  EXPECT_EQ(cudaHostUnregister(arena_), cudaSuccess);
}

TEST_F(CudaGpuTest, AStreamThatCapturesAGraphIsRefusedAndItsCaptureLives) {
  ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_EQ(device_->OrderAfter(stream_).code(), absl::StatusCode::kFailedPrecondition);
  // Copies of other tensors, and queries of copies, go on beside the capture.
  const auto ticket = device_->CopyToHost(arena_, tensor_, 4096);
  EXPECT_TRUE(ticket.ok()) << ticket.status();
  EXPECT_TRUE(device_->Wait(*ticket, absl::Seconds(60)).ok());
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

}  // namespace
}  // namespace holdfast
