// The GPU device over a fake driver of either API: order, bookkeeping, and every error path.
#include "runtime/device/gpu_device.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/device.h"
#include "runtime/device/gpu_calls.h"
#include "tests/testing/fake_gpu.h"
#include "tests/testing/small_checkpoint.h"

namespace holdfast::device {
namespace {

using testing::FakeGpu;
using ::testing::HasSubstr;

FakeGpu& Fake() { return FakeGpu::Get(); }
std::string Text(const absl::Status& status) { return std::string(status.message()); }

// Kept, because a device lives as long as the process.
GpuDevices* NewDevices(GpuApi api, const std::string& library) {
  static std::vector<GpuDevices*>* const all = new std::vector<GpuDevices*>;
  return all->emplace_back(new GpuDevices(api, library));
}

class GpuDeviceTest : public ::testing::TestWithParam<GpuApi> {
 protected:
  static constexpr size_t kTensorBytes = 16;

  void SetUp() override {
    Fake().Reset();
    Fake().Hold();
    devices_ = NewDevices(GetParam(), FakeGpu::Path());
    tensor_ = Fake().Allocate(kTensorBytes, 0);
    std::memcpy(tensor_, "abcdefghijklmno", kTensorBytes);
  }
  void TearDown() override {
    // The error that the framework's next call would find.
    EXPECT_EQ(FakeGpu::Get().latched(), GpuCode::kSuccess) << "an error was left latched";
    EXPECT_EQ(Fake().contexts_pushed(), 0u) << "a context was left pushed";
    EXPECT_EQ(Fake().calls_outside_context(), 0u);
    EXPECT_EQ(Fake().calls_not_relaxed(), 0u);
    Fake().Reset();
  }

  absl::StatusOr<Device*> Find(int ordinal = 0) { return devices_->Find(ordinal); }
  Device* Open(int ordinal = 0) {
    absl::StatusOr<Device*> device = Find(ordinal);
    EXPECT_TRUE(device.ok()) << device.status();
    return device.value_or(nullptr);
  }
  std::string Name(int ordinal) const { return absl::StrCat(NameOf(GetParam()), ":", ordinal); }
  absl::StatusCode CopyCode(Device* device) {
    return device->CopyToHost(arena_, tensor_, 4).status().code();
  }
  /// The call that enters the device's context.
  const char* enter() const { return IsCuda() ? "context_push" : "set_device"; }
  bool IsCuda() const { return GetParam() == GpuApi::kCuda; }

  GpuDevices* devices_ = nullptr;
  char* tensor_ = nullptr;  ///< Memory of the first device.
  char arena_[4096] = {};
};
INSTANTIATE_TEST_SUITE_P(All, GpuDeviceTest, ::testing::Values(GpuApi::kCuda, GpuApi::kHip),
                         [](const ::testing::TestParamInfo<GpuApi>& api) -> std::string {
                           return api.param == GpuApi::kCuda ? "Cuda" : "Hip";
                         });

TEST_P(GpuDeviceTest, IsMadeOnceAndNamedByItsOrdinal) {
  Device* const device = Open();
  EXPECT_EQ(device->name(), Name(0));
  EXPECT_FALSE(device->is_host());
  EXPECT_EQ(*Find(), device);
}

TEST_P(GpuDeviceTest, ADeviceThatIsNotThereIsNotFound) {
  EXPECT_EQ(Find(-1).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Find(2).status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Text(Find(2).status()), HasSubstr("2 device(s)"));
  Fake().Fail("device_count", GpuCode::kNoDevice);
  EXPECT_EQ(Find().status().code(), absl::StatusCode::kNotFound);
}

TEST_P(GpuDeviceTest, AMachineWithoutADriverSaysWhatToInstall) {
  const absl::Status status = NewDevices(GetParam(), "/nowhere/libdriver.so")->Find(0).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Text(status), HasSubstr("/nowhere/libdriver.so"));
  EXPECT_THAT(Text(status), HasSubstr("install"));
}

// A copy of the driver without `symbol`: its hash stays, its name is another.
std::string WithoutSymbol(const std::string& directory, const std::string& symbol) {
  std::ifstream in(FakeGpu::Path(), std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const std::string name = std::string(1, '\0') + symbol + std::string(1, '\0');
  size_t count = 0;
  for (size_t at = bytes.find(name); at != std::string::npos; at = bytes.find(name, at + 1)) {
    bytes[at + 1] = 'x';
    ++count;
  }
  EXPECT_GE(count, 1u) << symbol;
  const std::string path = absl::StrCat(directory, "/without_", symbol, ".so");
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

TEST_P(GpuDeviceTest, ADriverThatLacksACallIsRefusedWithTheNameOfTheCall) {
  const testing::TemporaryDirectory scratch;
  for (const auto& [call, symbol] : FakeGpu::Symbols(GetParam())) {
    SCOPED_TRACE(call);
    const std::string library = WithoutSymbol(scratch.path(), symbol);
    const absl::Status status = NewDevices(GetParam(), library)->Find(0).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
    EXPECT_THAT(Text(status), HasSubstr(absl::StrCat("lacks ", symbol, ";")));
  }
}

TEST_P(GpuDeviceTest, AFailedSetUpIsReportedAndCanBeTriedAgain) {
  Fake().Fail("init", GpuCode::kSystemDriverMismatch);
  EXPECT_EQ(Find().status().code(), absl::StatusCode::kFailedPrecondition);
  Fake().Fail(enter(), GpuCode::kInvalidContext);
  EXPECT_EQ(Find().status().code(), absl::StatusCode::kInternal);
  Fake().Fail("exchange_capture_mode", GpuCode::kNotInitialized);
  EXPECT_EQ(Find().status().code(), absl::StatusCode::kInternal);
  if (IsCuda()) {
    Fake().Fail("context_retain", GpuCode::kOutOfMemory);
    EXPECT_EQ(Find().status().code(), absl::StatusCode::kResourceExhausted);
    Fake().Fail("device_get", GpuCode::kInvalidDevice);
    EXPECT_EQ(Find().status().code(), absl::StatusCode::kNotFound);
  }
  Fake().Fail("stream_create", GpuCode::kOutOfMemory);
  EXPECT_EQ(Find().status().code(), absl::StatusCode::kResourceExhausted);
  Fake().Fail("event_create", GpuCode::kOutOfMemory, /*skip=*/100);
  EXPECT_EQ(Find().status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(Open(), nullptr);
}

TEST_P(GpuDeviceTest, AThreadWithItsOwnContextGetsItBack) {
  Device* const second = Open(1);
  char* const tensor = Fake().Allocate(4, 1);
  ASSERT_TRUE(second->CopyToHost(arena_, tensor, 4).ok());
  EXPECT_EQ(Fake().contexts_pushed(), 0u);
  EXPECT_EQ(Fake().current_device(GetParam()), IsCuda() ? -1 : 0);
  Fake().SetCurrentDevice(GetParam(), 0);
  ASSERT_TRUE(second->CopyToHost(arena_, tensor, 4).ok());
  EXPECT_EQ(Fake().current_device(GetParam()), 0);
  Fake().SetCurrentDevice(GetParam(), IsCuda() ? -1 : 0);
}

TEST_P(GpuDeviceTest, ACopyIsDoneOnlyOnceItsStreamHasRun) {
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

TEST_P(GpuDeviceTest, CopiesComeAfterTheCallersQueuedWork) {
  Device* const device = Open();
  GpuStream caller = Fake().MakeStream();
  Fake().QueueWrite(caller, tensor_, 'X');
  ASSERT_TRUE(device->OrderAfter(caller).ok());
  const CopyTicket ticket = *device->CopyToHost(arena_, tensor_, 4);
  Fake().RunAllBut(caller);
  EXPECT_FALSE(*device->IsDone(ticket));
  Fake().RunAll();
  EXPECT_TRUE(*device->IsDone(ticket));
  EXPECT_EQ(std::string(arena_, 4), "Xbcd");
}

TEST_P(GpuDeviceTest, TheCallersStreamWaitsForTheCopiesAndTheCpuDoesNot) {
  Device* const device = Open();
  GpuStream caller = Fake().MakeStream();
  ASSERT_TRUE(device->CopyToHost(arena_, tensor_, 4).ok());
  ASSERT_TRUE(device->MakeStreamWait(caller).ok());
  Fake().QueueWrite(caller, tensor_, 'X');
  Fake().Run(caller);
  EXPECT_EQ(tensor_[0], 'a') << "the parameters changed before they were copied";
  Fake().RunAll();
  EXPECT_EQ(tensor_[0], 'X');
  EXPECT_EQ(arena_[0], 'a');
}

TEST_P(GpuDeviceTest, AStreamThatCapturesAGraphIsRefused) {
  Device* const device = Open();
  GpuStream caller = Fake().MakeStream();
  Fake().SetCapturing(caller, true);
  EXPECT_EQ(device->OrderAfter(caller).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(device->MakeStreamWait(caller).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Fake().queued(caller), 0u);
  // The default stream, while a stream that it waits for is capturing.
  Fake().Fail("stream_is_capturing", GpuCode::kStreamCaptureImplicit);
  EXPECT_EQ(device->OrderAfter(nullptr).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_P(GpuDeviceTest, MoreCopiesThanEventsAreStillTracked) {
  Device* const device = Open();
  std::vector<CopyTicket> tickets;
  for (int i = 0; i < 1000; ++i) tickets.push_back(*device->CopyToHost(arena_ + i, tensor_, 1));
  const uint64_t events = Fake().count("event_create");
  EXPECT_FALSE(*device->IsDone(tickets.front()));
  EXPECT_FALSE(*device->IsDone(tickets.back()));
  Fake().RunAll();
  EXPECT_TRUE(*device->IsDone(tickets.front()));
  // The newest copy started without a free event: marked now, and done after that.
  EXPECT_FALSE(*device->IsDone(tickets.back()));
  Fake().RunAll();
  for (const CopyTicket ticket : tickets) EXPECT_TRUE(*device->IsDone(ticket));
  EXPECT_EQ(Fake().count("event_create"), events) << "the pool of events grew";
}

TEST_P(GpuDeviceTest, RefusesMemoryOfTheHostOrOfAnotherDevice) {
  Device* const device = Open();
  char host[8] = {};
  EXPECT_EQ(device->CopyToHost(arena_, host, 8).status().code(),
            absl::StatusCode::kInvalidArgument);
  char* const other = Fake().Allocate(8, 1);
  const absl::Status status = device->CopyToHost(arena_, other, 8).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Text(status), HasSubstr(Name(1)));
  // A length that runs out of the allocation.
  EXPECT_EQ(device->CopyToHost(arena_, tensor_ + 8, 32).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(device->CopyFromHost(host, arena_, 8).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(device->IsDone(1).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_P(GpuDeviceTest, LoadsIntoDeviceMemory) {
  Device* const device = Open();
  std::memcpy(arena_, "1234", 4);
  const CopyTicket ticket = *device->CopyFromHost(tensor_, arena_, 4);
  Fake().RunAll();
  EXPECT_TRUE(*device->IsDone(ticket));
  EXPECT_EQ(std::string(tensor_, 4), "1234");
  EXPECT_EQ(*device->CopyFromHost(nullptr, nullptr, 0), 0u);
}

TEST_P(GpuDeviceTest, RegisteringTwiceIsNoErrorAndOverlapIs) {
  Device* const device = Open();
  ASSERT_TRUE(device->RegisterMemory(arena_, 2048).ok());
  EXPECT_TRUE(device->RegisterMemory(arena_, 2048).ok());
  EXPECT_EQ(Fake().count("host_register"), 1u);
  for (const auto& [begin, bytes] : {std::pair(0, 4096), {1024, 64}, {1024, 2048}}) {
    EXPECT_EQ(device->RegisterMemory(arena_ + begin, bytes).code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(device->RegisterMemory(arena_ + 2048, 1024).ok());
  EXPECT_EQ(device->RegisterMemory(nullptr, 1).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(device->UnregisterMemory(arena_, 2048).ok());
  EXPECT_TRUE(device->UnregisterMemory(arena_ + 2048, 1024).ok());
  EXPECT_EQ(Fake().registered(), 0u);
  EXPECT_EQ(device->UnregisterMemory(arena_, 2048).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_P(GpuDeviceTest, TheLastDeviceThatRegisteredARangeTakesItBack) {
  Device* const first = Open();
  Device* const second = Open(1);
  ASSERT_TRUE(first->RegisterMemory(arena_, 4096).ok());
  ASSERT_TRUE(second->RegisterMemory(arena_, 4096).ok());
  EXPECT_EQ(Fake().count("host_register"), 1u);
  EXPECT_TRUE(first->UnregisterMemory(arena_, 4096).ok());
  EXPECT_EQ(Fake().registered(), 1u);
  EXPECT_FALSE(first->UnregisterMemory(arena_, 4096).ok());
  EXPECT_TRUE(second->UnregisterMemory(arena_, 4096).ok());
  EXPECT_EQ(Fake().registered(), 0u);
}

TEST_P(GpuDeviceTest, AForeignRegistrationIsUsedAndNeverTakenBack) {
  Device* const device = Open();
  Fake().Fail("host_register", GpuCode::kHostMemoryAlreadyRegistered);
  ASSERT_TRUE(device->RegisterMemory(arena_, 4096).ok());
  const absl::Status status = device->UnregisterMemory(arena_, 4096);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Fake().count("host_unregister"), 0u);
}

TEST_P(GpuDeviceTest, FailedRegistrationsAreReportedAndNotBooked) {
  Device* const device = Open();
  Fake().Fail("host_register", GpuCode::kOutOfMemory);
  EXPECT_EQ(device->RegisterMemory(arena_, 64).code(), absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE(device->RegisterMemory(arena_, 64).ok());
  EXPECT_EQ(Fake().count("host_register"), 2u);
  Fake().Fail("host_unregister", GpuCode::kUnknown);
  EXPECT_EQ(device->UnregisterMemory(arena_, 64).code(), absl::StatusCode::kInternal);
}

TEST_P(GpuDeviceTest, MemoryThatCopiesUseIsNotUnregistered) {
  Device* const device = Open();
  ASSERT_TRUE(device->RegisterMemory(arena_, 4096).ok());
  ASSERT_TRUE(device->CopyToHost(arena_, tensor_, 4).ok());
  EXPECT_EQ(device->UnregisterMemory(arena_, 4096).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Fake().count("host_unregister"), 0u);
  Fake().RunAll();
  EXPECT_TRUE(device->UnregisterMemory(arena_, 4096).ok());
}

TEST_P(GpuDeviceTest, CopiesOfOtherMemoryHoldNoRegistration) {
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

TEST_P(GpuDeviceTest, ErrorsOfCallsAreReportedOnceAndTheDeviceGoesOn) {
  Device* const device = Open();
  GpuStream caller = Fake().MakeStream();
  Fake().Fail("pointer_attributes", GpuCode::kUnknown);
  EXPECT_EQ(CopyCode(device), absl::StatusCode::kInternal);
  Fake().Fail("copy_to_host", GpuCode::kInvalidValue);
  EXPECT_EQ(CopyCode(device), absl::StatusCode::kInvalidArgument);
  Fake().Fail("stream_is_capturing", GpuCode::kUnknown);
  EXPECT_EQ(device->OrderAfter(caller).code(), absl::StatusCode::kInternal);
  Fake().Fail("event_record", GpuCode::kInvalidHandle);
  EXPECT_EQ(device->OrderAfter(caller).code(), absl::StatusCode::kInvalidArgument);
  Fake().Fail("stream_wait_event", GpuCode::kUnknown);
  EXPECT_EQ(device->OrderAfter(caller).code(), absl::StatusCode::kInternal);
  Fake().Fail("event_record", GpuCode::kUnknown);
  EXPECT_EQ(device->MakeStreamWait(caller).code(), absl::StatusCode::kInternal);
  Fake().Fail("stream_wait_event", GpuCode::kUnknown);
  EXPECT_EQ(device->MakeStreamWait(caller).code(), absl::StatusCode::kInternal);
  Fake().Fail(enter(), GpuCode::kInvalidContext);
  EXPECT_EQ(CopyCode(device), absl::StatusCode::kInternal);
  EXPECT_EQ(CopyCode(device), absl::StatusCode::kOk);
}

TEST_P(GpuDeviceTest, ACopyThatCouldNotBeMarkedAtOnceIsMarkedLater) {
  Device* const device = Open();
  Fake().Fail("event_record", GpuCode::kUnknown);
  const absl::StatusOr<CopyTicket> ticket = device->CopyToHost(arena_, tensor_, 4);
  ASSERT_TRUE(ticket.ok()) << "the copy is under way, so its ticket must not be lost";
  EXPECT_FALSE(*device->IsDone(*ticket));
  Fake().RunAll();
  EXPECT_TRUE(*device->IsDone(*ticket));
}

TEST_P(GpuDeviceTest, AFaultOfTheDeviceIsReportedOnceAndNoCopyCountsAsDoneAfterIt) {
  Device* const device = Open();
  const CopyTicket before = *device->CopyToHost(arena_, tensor_, 4);
  Fake().RunAll();
  EXPECT_TRUE(*device->IsDone(before));
  const CopyTicket ticket = *device->CopyToHost(arena_, tensor_, 4);
  Fake().Fail("event_query", GpuCode::kIllegalAddress);
  EXPECT_EQ(device->IsDone(ticket).status().code(), absl::StatusCode::kInternal);
  const uint64_t queries = Fake().count("event_query");
  EXPECT_EQ(device->IsDone(ticket).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(device->Wait(ticket, absl::InfiniteDuration()).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(CopyCode(device), absl::StatusCode::kAborted);
  EXPECT_EQ(device->OrderAfter(nullptr).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(device->MakeStreamWait(nullptr).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(device->RegisterMemory(arena_, 64).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(device->UnregisterMemory(arena_, 64).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(Fake().count("event_query"), queries) << "the lost context was called again";
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

TEST_P(GpuDeviceTest, AForkedChildNeverCallsTheDriver) {
  Device* const device = Open();
  ASSERT_TRUE(device->RegisterMemory(arena_, 4096).ok());
  EXPECT_TRUE(HoldsInChild([&] {
    Fake().ClearCounts();
    const bool refused =
        CopyCode(device) == absl::StatusCode::kFailedPrecondition &&
        device->IsDone(1).status().code() == absl::StatusCode::kFailedPrecondition &&
        device->OrderAfter(nullptr).code() == absl::StatusCode::kFailedPrecondition &&
        device->MakeStreamWait(nullptr).code() == absl::StatusCode::kFailedPrecondition &&
        device->RegisterMemory(arena_, 64).code() == absl::StatusCode::kFailedPrecondition &&
        device->UnregisterMemory(arena_, 4096).code() == absl::StatusCode::kFailedPrecondition &&
        Find().status().code() == absl::StatusCode::kFailedPrecondition;
    return refused && Fake().counts().empty();
  }));
  EXPECT_TRUE(device->UnregisterMemory(arena_, 4096).ok());
}

Device* g_device_at_exit = nullptr;
char g_arena_at_exit[64];

TEST_P(GpuDeviceTest, NoCallIsMadeOnceTheProcessExits) {
  // In a process of its own, which makes the device for the first time.
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        // Registered before the device is made, so that the handler runs after the device's own
        // exit handler, like the destructor of a static Checkpointer.
        std::atexit([] {
          Fake().ClearCounts();
          const absl::Status status =
              g_device_at_exit->UnregisterMemory(g_arena_at_exit, sizeof(g_arena_at_exit));
          const bool refused = status.code() == absl::StatusCode::kFailedPrecondition;
          _exit(refused && Fake().counts().empty() ? 42 : 1);
        });
        g_device_at_exit = Open();
        (void)g_device_at_exit->RegisterMemory(g_arena_at_exit, sizeof(g_arena_at_exit));
        std::exit(0);
      },
      ::testing::ExitedWithCode(42), "");
}

}  // namespace
}  // namespace holdfast::device
