// The CUDA device over a fake CUDA runtime: order, bookkeeping, and every error path.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "holdfast/cuda.h"
#include "holdfast/device.h"
#include "tests/unit/device/fake_cuda.h"

namespace holdfast {
namespace {

using testing::Fake;
using testing::FakeCuda;

// Every test has its own devices, because a device lives as long as the process.
class CudaDeviceTest : public ::testing::Test {
 protected:
  CudaDeviceTest() : ordinal_(next_ordinal_++) {
    EnableCuda();
    Fake().failures.clear();
    Fake().counts.clear();
    Fake().registered.clear();
  }
  ~CudaDeviceTest() override {
    // The error that the framework's next call would find.
    EXPECT_EQ(Fake().latched, cudaSuccess) << "an error was left latched";
    EXPECT_EQ(Fake().contexts_pushed, 0u) << "a context was left pushed";
    EXPECT_EQ(Fake().calls_outside_context, 0u);
    EXPECT_EQ(Fake().calls_not_relaxed, 0u);
    Fake().device_memory.clear();
    Fake().RunAll();
  }

  Device* Open() {
    absl::StatusOr<Device*> device = CudaDevice(ordinal_);
    EXPECT_TRUE(device.ok()) << device.status();
    Fake().device_memory[tensor_] = {sizeof(tensor_), ordinal_};
    return device.value_or(nullptr);
  }
  cudaStream_t CallerStream() {
    cudaStream_t stream = reinterpret_cast<cudaStream_t>(this);
    Fake().streams[stream] = {};
    return stream;
  }
  absl::StatusCode CopyCode(Device* device) {
    return device->CopyToHost(arena_, tensor_, 4).status().code();
  }

  static int next_ordinal_;
  const int ordinal_;
  char tensor_[16] = "abcdefghijklmno";  ///< Stands for device memory.
  char arena_[4096] = {};
};
int CudaDeviceTest::next_ordinal_ = 0;

TEST_F(CudaDeviceTest, IsMadeOnceAndNamedByItsOrdinal) {
  Device* const device = Open();
  EXPECT_EQ(device->name(), "cuda:" + std::to_string(ordinal_));
  EXPECT_FALSE(device->is_host());
  EXPECT_EQ(*CudaDevice(ordinal_), device);
}

TEST_F(CudaDeviceTest, ADeviceThatIsNotThereIsNotFound) {
  EXPECT_EQ(CudaDevice(-1).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(CudaDevice(FakeCuda::kDevices).status().code(), absl::StatusCode::kNotFound);
  for (const cudaError_t error : {cudaErrorNoDevice, cudaErrorInsufficientDriver}) {
    Fake().Fail("cudaGetDeviceCount", error);
    EXPECT_EQ(CudaDevice(ordinal_).status().code(), absl::StatusCode::kNotFound);
  }
}

TEST_F(CudaDeviceTest, AFailedSetUpIsReportedAndCanBeTriedAgain) {
  Fake().failures["cuDevicePrimaryCtxRetain"].times = 1;
  EXPECT_EQ(CudaDevice(ordinal_).status().code(), absl::StatusCode::kResourceExhausted);
  Fake().failures.clear();
  Fake().failures["cuCtxPushCurrent"].times = 1;
  EXPECT_EQ(CudaDevice(ordinal_).status().code(), absl::StatusCode::kInternal);
  Fake().failures.clear();
  Fake().Fail("cudaStreamCreateWithFlags", cudaErrorMemoryAllocation);
  EXPECT_EQ(CudaDevice(ordinal_).status().code(), absl::StatusCode::kResourceExhausted);
  Fake().Fail("cudaEventCreateWithFlags", cudaErrorMemoryAllocation, /*skip=*/100);
  EXPECT_EQ(CudaDevice(ordinal_).status().code(), absl::StatusCode::kResourceExhausted);
  Fake().Fail("FindDriverCall", cudaErrorNotSupported);
  EXPECT_FALSE(CudaDevice(ordinal_).ok());
  EXPECT_NE(Open(), nullptr);
}

TEST_F(CudaDeviceTest, ACopyIsDoneOnlyOnceItsStreamHasRun) {
  Device* const device = Open();
  const absl::StatusOr<CopyTicket> ticket = device->CopyToHost(arena_, tensor_, 4);
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  EXPECT_FALSE(*device->IsDone(*ticket));
  EXPECT_EQ(device->Wait(*ticket, absl::ZeroDuration()).code(),
            absl::StatusCode::kDeadlineExceeded);
  Fake().RunAll();
  EXPECT_TRUE(*device->IsDone(*ticket));
  EXPECT_TRUE(device->Wait(*ticket, absl::ZeroDuration()).ok());
  EXPECT_EQ(std::string(arena_, 4), "abcd");
  EXPECT_TRUE(*device->IsDone(0));
}

TEST_F(CudaDeviceTest, CopiesComeAfterTheCallersQueuedWork) {
  Device* const device = Open();
  cudaStream_t caller = CallerStream();
  char updated = 'X';
  FakeCuda::Operation update;
  update.destination = tensor_;
  update.source = &updated;
  update.bytes = 1;
  Fake().streams[caller].operations.push_back(update);
  ASSERT_TRUE(device->OrderAfter(caller).ok());
  const CopyTicket ticket = *device->CopyToHost(arena_, tensor_, 4);
  for (auto& [handle, stream] : Fake().streams) {
    if (handle != caller) Fake().Run(handle);
  }
  EXPECT_FALSE(*device->IsDone(ticket));
  Fake().RunAll();
  EXPECT_TRUE(*device->IsDone(ticket));
  EXPECT_EQ(std::string(arena_, 4), "Xbcd");
}

TEST_F(CudaDeviceTest, TheCallersStreamWaitsForTheCopiesAndTheCpuDoesNot) {
  Device* const device = Open();
  cudaStream_t caller = CallerStream();
  ASSERT_TRUE(device->CopyToHost(arena_, tensor_, 4).ok());
  ASSERT_TRUE(device->MakeStreamWait(caller).ok());
  char updated = 'X';
  FakeCuda::Operation update;
  update.destination = tensor_;
  update.source = &updated;
  update.bytes = 1;
  Fake().streams[caller].operations.push_back(update);
  Fake().Run(caller);
  EXPECT_EQ(tensor_[0], 'a') << "the parameters changed before they were copied";
  Fake().RunAll();
  EXPECT_EQ(tensor_[0], 'X');
  EXPECT_EQ(arena_[0], 'a');
}

TEST_F(CudaDeviceTest, AStreamThatCapturesAGraphIsRefused) {
  Device* const device = Open();
  cudaStream_t caller = CallerStream();
  Fake().streams[caller].capturing = true;
  EXPECT_EQ(device->OrderAfter(caller).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(device->MakeStreamWait(caller).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Fake().streams[caller].operations.empty());
}

TEST_F(CudaDeviceTest, MoreCopiesThanEventsAreStillTracked) {
  Device* const device = Open();
  std::vector<CopyTicket> tickets;
  for (int i = 0; i < 1000; ++i) tickets.push_back(*device->CopyToHost(arena_ + i, tensor_, 1));
  const uint64_t events = Fake().count("cudaEventCreateWithFlags");
  EXPECT_FALSE(*device->IsDone(tickets.front()));
  EXPECT_FALSE(*device->IsDone(tickets.back()));
  Fake().RunAll();
  EXPECT_TRUE(*device->IsDone(tickets.front()));
  // The newest copy started without a free event: marked now, and done after that.
  EXPECT_FALSE(*device->IsDone(tickets.back()));
  Fake().RunAll();
  for (const CopyTicket ticket : tickets) EXPECT_TRUE(*device->IsDone(ticket));
  EXPECT_EQ(Fake().count("cudaEventCreateWithFlags"), events) << "the pool of events grew";
}

TEST_F(CudaDeviceTest, RefusesMemoryOfTheHostOrOfAnotherDevice) {
  Device* const device = Open();
  char host[8] = {};
  EXPECT_EQ(device->CopyToHost(arena_, host, 8).status().code(),
            absl::StatusCode::kInvalidArgument);
  char other[8] = {};
  Fake().device_memory[other] = {sizeof(other), ordinal_ + 1};
  const absl::Status status = device->CopyToHost(arena_, other, 8).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(status.message()).find("cuda:" + std::to_string(ordinal_ + 1)),
            std::string::npos);
  // A length that runs out of the allocation.
  EXPECT_EQ(device->CopyToHost(arena_, tensor_ + 8, 32).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(device->CopyFromHost(host, arena_, 8).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(device->IsDone(1).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(CudaDeviceTest, LoadsIntoDeviceMemory) {
  Device* const device = Open();
  std::memcpy(arena_, "1234", 4);
  const CopyTicket ticket = *device->CopyFromHost(tensor_, arena_, 4);
  Fake().RunAll();
  EXPECT_TRUE(*device->IsDone(ticket));
  EXPECT_EQ(std::string(tensor_, 4), "1234");
  EXPECT_EQ(*device->CopyFromHost(nullptr, nullptr, 0), 0u);
}

TEST_F(CudaDeviceTest, RegisteringTwiceIsNoErrorAndOverlapIs) {
  Device* const device = Open();
  ASSERT_TRUE(device->RegisterMemory(arena_, 2048).ok());
  EXPECT_TRUE(device->RegisterMemory(arena_, 2048).ok());
  EXPECT_EQ(Fake().count("cudaHostRegister"), 1u);
  for (const auto& [begin, bytes] : {std::pair(0, 4096), {1024, 64}, {1024, 2048}}) {
    EXPECT_EQ(device->RegisterMemory(arena_ + begin, bytes).code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(device->RegisterMemory(arena_ + 2048, 1024).ok());
  EXPECT_EQ(device->RegisterMemory(nullptr, 1).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(device->UnregisterMemory(arena_, 2048).ok());
  EXPECT_TRUE(device->UnregisterMemory(arena_ + 2048, 1024).ok());
  EXPECT_TRUE(Fake().registered.empty());
  EXPECT_EQ(device->UnregisterMemory(arena_, 2048).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(CudaDeviceTest, TheLastDeviceThatRegisteredARangeTakesItBack) {
  Device* const first = Open();
  Device* const second = *CudaDevice(next_ordinal_++);
  ASSERT_TRUE(first->RegisterMemory(arena_, 4096).ok());
  ASSERT_TRUE(second->RegisterMemory(arena_, 4096).ok());
  EXPECT_EQ(Fake().count("cudaHostRegister"), 1u);
  EXPECT_TRUE(first->UnregisterMemory(arena_, 4096).ok());
  EXPECT_EQ(Fake().registered.size(), 1u);
  EXPECT_FALSE(first->UnregisterMemory(arena_, 4096).ok());
  EXPECT_TRUE(second->UnregisterMemory(arena_, 4096).ok());
  EXPECT_TRUE(Fake().registered.empty());
}

TEST_F(CudaDeviceTest, AForeignRegistrationIsUsedAndNeverTakenBack) {
  Device* const device = Open();
  Fake().Fail("cudaHostRegister", cudaErrorHostMemoryAlreadyRegistered);
  ASSERT_TRUE(device->RegisterMemory(arena_, 4096).ok());
  const absl::Status status = device->UnregisterMemory(arena_, 4096);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Fake().count("cudaHostUnregister"), 0u);
}

TEST_F(CudaDeviceTest, FailedRegistrationsAreReportedAndNotBooked) {
  Device* const device = Open();
  Fake().Fail("cudaHostRegister", cudaErrorMemoryAllocation);
  EXPECT_EQ(device->RegisterMemory(arena_, 64).code(), absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE(device->RegisterMemory(arena_, 64).ok());
  EXPECT_EQ(Fake().count("cudaHostRegister"), 2u);
  Fake().Fail("cudaHostUnregister", cudaErrorUnknown);
  EXPECT_EQ(device->UnregisterMemory(arena_, 64).code(), absl::StatusCode::kInternal);
}

TEST_F(CudaDeviceTest, MemoryThatCopiesUseIsNotUnregistered) {
  Device* const device = Open();
  ASSERT_TRUE(device->RegisterMemory(arena_, 4096).ok());
  ASSERT_TRUE(device->CopyToHost(arena_, tensor_, 4).ok());
  EXPECT_EQ(device->UnregisterMemory(arena_, 4096).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Fake().count("cudaHostUnregister"), 0u);
  Fake().RunAll();
  EXPECT_TRUE(device->UnregisterMemory(arena_, 4096).ok());
}

TEST_F(CudaDeviceTest, CopiesOfOtherMemoryHoldNoRegistration) {
  Device* const device = Open();
  ASSERT_TRUE(device->RegisterMemory(arena_, 2048).ok());
  ASSERT_TRUE(device->RegisterMemory(arena_ + 2048, 2048).ok());
  ASSERT_TRUE(device->CopyToHost(arena_, tensor_, 4).ok());
  Fake().RunAll();
  ASSERT_TRUE(device->CopyFromHost(tensor_, arena_ + 2048, 4).ok());
  EXPECT_TRUE(device->UnregisterMemory(arena_, 2048).ok());
  EXPECT_EQ(device->UnregisterMemory(arena_ + 2048, 2048).code(),
            absl::StatusCode::kFailedPrecondition);
  Fake().RunAll();
  EXPECT_TRUE(device->UnregisterMemory(arena_ + 2048, 2048).ok());
}

TEST_F(CudaDeviceTest, ErrorsOfCallsAreReportedOnceAndTheDeviceGoesOn) {
  Device* const device = Open();
  cudaStream_t caller = CallerStream();
  Fake().Fail("cudaPointerGetAttributes", cudaErrorUnknown);
  EXPECT_EQ(CopyCode(device), absl::StatusCode::kInternal);
  Fake().Fail("cudaMemcpyAsync", cudaErrorInvalidValue);
  EXPECT_EQ(CopyCode(device), absl::StatusCode::kInvalidArgument);
  Fake().Fail("cudaStreamIsCapturing", cudaErrorUnknown);
  EXPECT_EQ(device->OrderAfter(caller).code(), absl::StatusCode::kInternal);
  Fake().Fail("cudaEventRecord", cudaErrorInvalidResourceHandle);
  EXPECT_EQ(device->OrderAfter(caller).code(), absl::StatusCode::kInvalidArgument);
  Fake().Fail("cudaStreamWaitEvent", cudaErrorUnknown);
  EXPECT_EQ(device->OrderAfter(caller).code(), absl::StatusCode::kInternal);
  Fake().Fail("cudaEventRecord", cudaErrorUnknown);
  EXPECT_EQ(device->MakeStreamWait(caller).code(), absl::StatusCode::kInternal);
  Fake().Fail("cudaStreamWaitEvent", cudaErrorUnknown);
  EXPECT_EQ(device->MakeStreamWait(caller).code(), absl::StatusCode::kInternal);
  Fake().failures["cuCtxPushCurrent"].times = 1;
  EXPECT_EQ(CopyCode(device), absl::StatusCode::kInternal);
  Fake().failures.clear();
  EXPECT_EQ(CopyCode(device), absl::StatusCode::kOk);
}

TEST_F(CudaDeviceTest, ACopyThatCouldNotBeMarkedAtOnceIsMarkedLater) {
  Device* const device = Open();
  Fake().Fail("cudaEventRecord", cudaErrorUnknown);
  const absl::StatusOr<CopyTicket> ticket = device->CopyToHost(arena_, tensor_, 4);
  ASSERT_TRUE(ticket.ok()) << "the copy is under way, so its ticket must not be lost";
  EXPECT_FALSE(*device->IsDone(*ticket));
  Fake().RunAll();
  EXPECT_TRUE(*device->IsDone(*ticket));
}

TEST_F(CudaDeviceTest, AFaultOfTheDeviceIsReportedOnceAndNoCopyCountsAsDoneAfterIt) {
  Device* const device = Open();
  const CopyTicket before = *device->CopyToHost(arena_, tensor_, 4);
  Fake().RunAll();
  EXPECT_TRUE(*device->IsDone(before));
  const CopyTicket ticket = *device->CopyToHost(arena_, tensor_, 4);
  Fake().Fail("cudaEventQuery", cudaErrorIllegalAddress);
  EXPECT_EQ(device->IsDone(ticket).status().code(), absl::StatusCode::kInternal);
  const uint64_t queries = Fake().count("cudaEventQuery");
  EXPECT_EQ(device->IsDone(ticket).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(device->Wait(ticket, absl::InfiniteDuration()).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(CopyCode(device), absl::StatusCode::kAborted);
  EXPECT_EQ(device->OrderAfter(nullptr).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(device->MakeStreamWait(nullptr).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(device->RegisterMemory(arena_, 64).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(device->UnregisterMemory(arena_, 64).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(Fake().count("cudaEventQuery"), queries) << "the lost context was called again";
  EXPECT_TRUE(*device->IsDone(before));
}

// Runs `body` in a forked child and returns its result.
template <typename Body>
bool HoldsInChild(Body body) {
  const pid_t child = fork();
  if (child == 0) _exit(body() ? 0 : 1);
  int status = -1;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST_F(CudaDeviceTest, AForkedChildNeverCallsCuda) {
  Device* const device = Open();
  ASSERT_TRUE(device->RegisterMemory(arena_, 4096).ok());
  EXPECT_TRUE(HoldsInChild([&] {
    Fake().counts.clear();
    const bool refused =
        CopyCode(device) == absl::StatusCode::kFailedPrecondition &&
        device->IsDone(1).status().code() == absl::StatusCode::kFailedPrecondition &&
        device->OrderAfter(nullptr).code() == absl::StatusCode::kFailedPrecondition &&
        device->MakeStreamWait(nullptr).code() == absl::StatusCode::kFailedPrecondition &&
        device->RegisterMemory(arena_, 64).code() == absl::StatusCode::kFailedPrecondition &&
        device->UnregisterMemory(arena_, 4096).code() == absl::StatusCode::kFailedPrecondition &&
        CudaDevice(ordinal_).status().code() == absl::StatusCode::kFailedPrecondition;
    return refused && Fake().counts.empty();
  }));
  EXPECT_TRUE(device->UnregisterMemory(arena_, 4096).ok());
}

Device* g_device_at_exit = nullptr;
char g_arena_at_exit[64];

TEST_F(CudaDeviceTest, NoCallIsMadeOnceTheProcessExits) {
  EXPECT_EXIT(
      {
        // Registered before the device is made, so that the handler runs after the device's own
        // exit handler, like the destructor of a static Checkpointer.
        std::atexit([] {
          Fake().counts.clear();
          const absl::Status status =
              g_device_at_exit->UnregisterMemory(g_arena_at_exit, sizeof(g_arena_at_exit));
          const bool refused = status.code() == absl::StatusCode::kFailedPrecondition;
          _exit(refused && Fake().counts.empty() ? 42 : 1);
        });
        // Made here for the first time: `threadsafe` death tests run in a process of their own.
        g_device_at_exit = Open();
        (void)g_device_at_exit->RegisterMemory(g_arena_at_exit, sizeof(g_arena_at_exit));
        std::exit(0);
      },
      ::testing::ExitedWithCode(42), "");
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  return RUN_ALL_TESTS();
}
