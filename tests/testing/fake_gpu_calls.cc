// The calls of the fake driver, in CUDA's and HIP's names.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <utility>

#include "tests/testing/fake_gpu.h"

namespace holdfast::testing {

using device::GpuAddress;
using device::GpuApi;
using device::GpuCode;
using device::GpuContext;
using device::GpuEvent;
using device::GpuStream;

namespace {

const pid_t g_owner = getpid();

// A real driver's state of each thread.
thread_local std::vector<int> t_contexts;  // CUDA's stack, as devices
thread_local int t_device = 0;             // HIP's current device
thread_local int t_capture_mode = 0;
thread_local GpuCode t_latched = GpuCode::kSuccess;

}  // namespace

GpuCode FakeGpu::latched() { return t_latched; }
int FakeGpu::current_device(GpuApi api) {
  if (api == GpuApi::kHip) return t_device;
  return t_contexts.empty() ? -1 : t_contexts.back();
}
void FakeGpu::SetCurrentDevice(GpuApi api, int device) {
  if (api == GpuApi::kHip) {
    t_device = device;
  } else {
    t_contexts.clear();
    if (device >= 0) t_contexts.push_back(device);
  }
}

/// One call of the driver: counted, failed on demand, and made under the lock.
struct FakeCalls {
  enum Where { kAnywhere, kInContext, kInRelaxedContext };

  template <typename Do>
  static GpuCode Make(GpuApi api, const char* call, Where where, Do make) {
    if (getpid() != g_owner) {
      std::fprintf(stderr, "%s: the driver was called in a forked child\n", call);
      std::abort();
    }
    FakeGpu& fake = FakeGpu::Get();
    std::unique_lock<std::mutex> lock(fake.mutex_);
    ++fake.counts_[call];
    GpuCode code = Planned(&fake, call);
    const int device = api == GpuApi::kHip ? t_device : t_contexts.empty() ? -1 : t_contexts.back();
    if (code == GpuCode::kSuccess && where != kAnywhere) {
      if (device < 0) {
        ++fake.calls_outside_context_;
        code = GpuCode::kInvalidContext;
      } else {
        code = fake.contexts_[device].fault;
      }
      if (where == kInRelaxedContext && t_capture_mode != device::kCaptureModeRelaxed)
        ++fake.calls_not_relaxed_;
    }
    if (code == GpuCode::kSuccess) code = make(fake, device, lock);
    if (api == GpuApi::kHip && code != GpuCode::kSuccess) t_latched = code;
    return code;
  }

  static GpuCode Planned(FakeGpu* fake, const char* call) {
    const auto found = fake->failures_.find(call);
    if (found == fake->failures_.end() || found->second.times == 0) return GpuCode::kSuccess;
    if (found->second.skip-- > 0) return GpuCode::kSuccess;
    found->second.skip = 0;
    --found->second.times;
    return found->second.code;
  }

  using Operation = FakeGpu::Operation;
  using Lock = std::unique_lock<std::mutex>;

  static int Devices(const FakeGpu& fake) { return static_cast<int>(fake.contexts_.size()); }
  static GpuCode Queue(FakeGpu& fake, GpuStream handle, int device, const Operation& operation) {
    FakeGpu::Stream* const stream = fake.Find(handle, device);
    if (stream == nullptr) return GpuCode::kInvalidHandle;
    fake.Queue(stream, operation);
    return GpuCode::kSuccess;
  }
  static FakeGpu::Event* EventOf(GpuEvent event) {
    return reinterpret_cast<FakeGpu::Event*>(event);
  }
  static GpuCode Record(FakeGpu& fake, int device, GpuEvent event, GpuStream stream) {
    return Queue(fake, stream, device,
                 {.kind = Operation::kRecord,
                  .event = EventOf(event),
                  .generation = ++EventOf(event)->recorded});
  }
  static GpuCode AddEvent(FakeGpu& fake, GpuEvent* event) {
    fake.events_.push_back(std::make_unique<FakeGpu::Event>());
    *event = reinterpret_cast<GpuEvent>(fake.events_.back().get());
    return GpuCode::kSuccess;
  }
  static GpuCode Attributes(FakeGpu& fake, unsigned count, const int* attributes, void** values,
                            GpuAddress address) {
    const void* const pointer = reinterpret_cast<const void*>(address);
    const FakeGpu::Block* const block = fake.BlockOf(pointer);
    for (unsigned i = 0; i < count; ++i) {
      if (attributes[i] == device::kAttributeMemoryType) {
        *static_cast<unsigned*>(values[i]) = block == nullptr ? 0 : device::kMemoryTypeDevice;
      } else if (attributes[i] == device::kAttributeIsManaged) {
        *static_cast<char*>(values[i]) = block != nullptr && block->managed;
      } else if (attributes[i] == device::kAttributeDeviceOrdinal) {
        *static_cast<int*>(values[i]) = block == nullptr ? -2 : block->device;
      } else {
        return GpuCode::kInvalidValue;
      }
    }
    return GpuCode::kSuccess;
  }
  static GpuCode Register(FakeGpu& fake, void* base, size_t bytes) {
    const char* const begin = static_cast<const char*>(base);
    const auto next = fake.registered_.lower_bound(begin + bytes);
    if (next != fake.registered_.begin()) {
      const auto& [other, size] = *std::prev(next);
      if (other + size > begin) return GpuCode::kHostMemoryAlreadyRegistered;
    }
    fake.registered_[begin] = bytes;
    return GpuCode::kSuccess;
  }
  static GpuCode Unregister(FakeGpu& fake, void* base) {
    return fake.registered_.erase(static_cast<const char*>(base)) == 1
               ? GpuCode::kSuccess
               : GpuCode::kHostMemoryNotRegistered;
  }
  static GpuCode Select(FakeGpu& fake, int ordinal) {
    if (ordinal < 0 || ordinal >= static_cast<int>(fake.contexts_.size()))
      return GpuCode::kInvalidDevice;
    t_device = ordinal;
    return GpuCode::kSuccess;
  }
  static GpuCode Push(FakeGpu& fake, GpuContext context) {
    t_contexts.push_back(DeviceOf(context));
    ++fake.contexts_pushed_;
    return GpuCode::kSuccess;
  }
  static GpuCode Pop(FakeGpu& fake, GpuContext* context) {
    if (t_contexts.empty()) return GpuCode::kInvalidContext;
    *context = ContextOf(t_contexts.back());
    t_contexts.pop_back();
    --fake.contexts_pushed_;
    return GpuCode::kSuccess;
  }
  static int DeviceOf(GpuContext context) {
    return static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
  }
  static GpuContext ContextOf(int device) {
    return reinterpret_cast<GpuContext>(static_cast<intptr_t>(device) + 1);
  }
  static GpuCode SetCurrent(GpuContext context) {
    if (!t_contexts.empty()) t_contexts.pop_back();
    if (context != nullptr) t_contexts.push_back(DeviceOf(context));
    return GpuCode::kSuccess;
  }
  static GpuCode Allocate(FakeGpu& fake, int device, GpuAddress* address, size_t bytes,
                          bool managed) {
    FakeGpu::Block block{std::make_unique<char[]>(bytes), bytes, device, managed};
    char* const begin = block.bytes.get();
    *address = reinterpret_cast<GpuAddress>(begin);
    fake.memory_[begin] = std::move(block);
    return GpuCode::kSuccess;
  }
  static GpuCode Free(FakeGpu& fake, GpuAddress address) {
    return fake.memory_.erase(reinterpret_cast<const char*>(address)) == 1 ? GpuCode::kSuccess
                                                                           : GpuCode::kInvalidValue;
  }
  static GpuCode Synchronize(FakeGpu& fake, int device, GpuStream handle, Lock& lock) {
    FakeGpu::Stream* const stream = fake.Find(handle, device);
    if (stream == nullptr) return GpuCode::kInvalidHandle;
    fake.changed_.wait(lock, [&] { return stream->operations.empty() && !stream->executing; });
    return fake.contexts_[device].fault;
  }
  static GpuCode CopyNow(FakeGpu& fake, int device, void* destination, const void* source,
                         size_t bytes, Lock& lock) {
    const GpuCode code = Synchronize(fake, device, nullptr, lock);
    if (code == GpuCode::kSuccess) std::memcpy(destination, source, bytes);
    return code;
  }
  static GpuCode Capture(FakeGpu& fake, int device, GpuStream handle, bool on) {
    FakeGpu::Stream* const stream = fake.Find(handle, device);
    if (stream == nullptr) return GpuCode::kInvalidHandle;
    stream->capturing = on;
    return GpuCode::kSuccess;
  }
  static GpuCode DestroyStream(FakeGpu& fake, int device, GpuStream handle, Lock& lock) {
    FakeGpu::Stream* const stream = fake.Find(handle, device);
    if (stream == nullptr || handle == nullptr) return GpuCode::kInvalidHandle;
    const GpuCode code = Synchronize(fake, device, handle, lock);  // Queued work is done first.
    fake.EndStream(stream, &lock);
    return code;
  }
  static GpuCode AddStream(FakeGpu& fake, int device, GpuStream* stream) {
    *stream = reinterpret_cast<GpuStream>(fake.AddStream(device));
    return GpuCode::kSuccess;
  }
  static GpuCode IsCapturing(FakeGpu& fake, int device, GpuStream handle, int* status) {
    const FakeGpu::Stream* const stream = fake.Find(handle, device);
    if (stream == nullptr) return GpuCode::kInvalidHandle;
    *status = stream->capturing ? 1 : device::kNotCapturing;
    return GpuCode::kSuccess;
  }
  static bool IsDone(GpuEvent event) { return EventOf(event)->done >= EventOf(event)->recorded; }
  static GpuCode QueueCopy(FakeGpu& fake, int device, GpuStream stream, void* destination,
                           const void* source, size_t bytes, GpuAddress on_device) {
    if (fake.BlockOf(reinterpret_cast<const void*>(on_device)) == nullptr)
      return GpuCode::kInvalidValue;
    return Queue(fake, stream, device,
                 {.kind = Operation::kCopy,
                  .destination = static_cast<char*>(destination),
                  .source = static_cast<const char*>(source),
                  .bytes = bytes});
  }
  static GpuCode Name(GpuCode code, const char* text, const char** out) {
    *out = code == GpuCode{12345} ? nullptr : text;  // A driver leaves null for a strange code.
    return *out == nullptr ? GpuCode::kInvalidValue : GpuCode::kSuccess;
  }
};

namespace {

std::map<std::string, std::string> g_symbols[2];

struct Symbol {
  Symbol(GpuApi api, const char* call, const char* symbol) {
    if (std::strcmp(call, "of_caller") != 0) g_symbols[static_cast<int>(api)][call] = symbol;
  }
};

}  // namespace

const std::map<std::string, std::string>& FakeGpu::Symbols(GpuApi api) {
  return g_symbols[static_cast<int>(api)];
}

}  // namespace holdfast::testing

using holdfast::device::GpuAddress;
using holdfast::device::GpuApi;
using holdfast::device::GpuCode;
using holdfast::device::GpuContext;
using holdfast::device::GpuEvent;
using holdfast::device::GpuStream;
using holdfast::testing::FakeCalls;
using holdfast::testing::FakeGpu;
using holdfast::testing::t_capture_mode;
using holdfast::testing::t_contexts;
using holdfast::testing::t_device;
using holdfast::testing::t_latched;
using Operation = FakeCalls::Operation;

namespace {
constexpr GpuCode kDone = GpuCode::kSuccess;
void* Pointer(GpuAddress address) { return reinterpret_cast<void*>(address); }
}  // namespace

// clang-format off
// An exported function. The expression sees `fake`, `current` (the thread's device) and `lock`.
#define ONE(api, call, symbol, where, parameters, ...)                                          \
  extern "C" __attribute__((visibility("default"))) GpuCode symbol parameters {                 \
    return FakeCalls::Make(GpuApi::api, #call, FakeCalls::where,                                \
        [&]([[maybe_unused]] FakeGpu& fake, [[maybe_unused]] int current,                       \
            [[maybe_unused]] FakeCalls::Lock& lock) -> GpuCode { return __VA_ARGS__; });        \
  }                                                                                             \
  static const holdfast::testing::Symbol symbol_of_##symbol(GpuApi::api, #call, #symbol);
#define BOTH(call, cuda, hip, where, parameters, ...)   \
  ONE(kCuda, call, cuda, where, parameters, __VA_ARGS__) \
  ONE(kHip, call, hip, where, parameters, __VA_ARGS__)

// Calls of a device.
BOTH(init, cuInit, hipInit, kAnywhere, (unsigned), kDone)
BOTH(device_count, cuDeviceGetCount, hipGetDeviceCount, kAnywhere, (int* count),
     (*count = FakeCalls::Devices(fake), kDone))
ONE(kCuda, device_get, cuDeviceGet, kAnywhere, (int* device, int ordinal),
    (*device = ordinal, kDone))
BOTH(error_name, cuGetErrorName, hipDrvGetErrorName, kAnywhere, (GpuCode code, const char** name),
     FakeCalls::Name(code, "ERROR_OF_FAKE", name))
BOTH(error_text, cuGetErrorString, hipDrvGetErrorString, kAnywhere,
     (GpuCode code, const char** text), FakeCalls::Name(code, "an error of the fake", text))
ONE(kCuda, context_retain, cuDevicePrimaryCtxRetain, kAnywhere, (GpuContext* context, int device),
    (*context = FakeCalls::ContextOf(device), kDone))
ONE(kCuda, context_push, cuCtxPushCurrent_v2, kAnywhere, (GpuContext context),
    FakeCalls::Push(fake, context))
ONE(kCuda, context_pop, cuCtxPopCurrent_v2, kAnywhere, (GpuContext* context),
    FakeCalls::Pop(fake, context))
ONE(kHip, current_device, hipGetDevice, kAnywhere, (int* ordinal), (*ordinal = t_device, kDone))
ONE(kHip, set_device, hipSetDevice, kAnywhere, (int ordinal), FakeCalls::Select(fake, ordinal))
BOTH(exchange_capture_mode, cuThreadExchangeStreamCaptureMode, hipThreadExchangeStreamCaptureMode,
     kAnywhere, (int* mode), (std::swap(*mode, t_capture_mode), kDone))
BOTH(stream_create, cuStreamCreate, hipStreamCreateWithFlags, kInRelaxedContext,
     (GpuStream* stream, unsigned), FakeCalls::AddStream(fake, current, stream))
BOTH(stream_is_capturing, cuStreamIsCapturing, hipStreamIsCapturing, kInRelaxedContext,
     (GpuStream stream, int* status), FakeCalls::IsCapturing(fake, current, stream, status))
BOTH(stream_wait_event, cuStreamWaitEvent, hipStreamWaitEvent, kInRelaxedContext,
     (GpuStream stream, GpuEvent event, unsigned),
     FakeCalls::Queue(fake, stream, current,
                      {.kind = Operation::kWait, .event = FakeCalls::EventOf(event),
                       .generation = FakeCalls::EventOf(event)->recorded}))
BOTH(event_create, cuEventCreate, hipEventCreateWithFlags, kInRelaxedContext,
     (GpuEvent* event, unsigned), FakeCalls::AddEvent(fake, event))
BOTH(event_record, cuEventRecord, hipEventRecord, kInRelaxedContext,
     (GpuEvent event, GpuStream stream), FakeCalls::Record(fake, current, event, stream))
BOTH(event_query, cuEventQuery, hipEventQuery, kInRelaxedContext, (GpuEvent event),
     FakeCalls::IsDone(event) ? kDone : GpuCode::kNotReady)
BOTH(copy_to_host, cuMemcpyDtoHAsync_v2, hipMemcpyDtoHAsync, kInRelaxedContext,
     (void* destination, GpuAddress source, size_t bytes, GpuStream stream),
     FakeCalls::QueueCopy(fake, current, stream, destination, Pointer(source), bytes, source))
BOTH(copy_from_host, cuMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync, kInRelaxedContext,
     (GpuAddress destination, const void* source, size_t bytes, GpuStream stream),
     FakeCalls::QueueCopy(fake, current, stream, Pointer(destination), source, bytes, destination))
BOTH(pointer_attributes, cuPointerGetAttributes, hipDrvPointerGetAttributes, kInRelaxedContext,
     (unsigned count, int* attributes, void** values, GpuAddress address),
     FakeCalls::Attributes(fake, count, attributes, values, address))
BOTH(host_register, cuMemHostRegister_v2, hipHostRegister, kInRelaxedContext,
     (void* base, size_t bytes, unsigned), FakeCalls::Register(fake, base, bytes))
BOTH(host_unregister, cuMemHostUnregister, hipHostUnregister, kInRelaxedContext, (void* base),
     FakeCalls::Unregister(fake, base))
extern "C" __attribute__((visibility("default"))) GpuCode hipGetLastError() {
  return std::exchange(t_latched, kDone);
}
static const holdfast::testing::Symbol symbol_of_hipGetLastError(GpuApi::kHip, "last_error",
                                                                "hipGetLastError");

// Further calls of a framework.
#define CALLER(cuda, hip, parameters, ...)                                        \
  BOTH(of_caller, cuda, hip, kInContext, parameters, __VA_ARGS__)
CALLER(cuDriverGetVersion, hipDriverGetVersion, (int* version), (*version = 0, kDone))
CALLER(cuDeviceGetName, hipDeviceGetName, (char* name, int bytes, int),
       (std::snprintf(name, static_cast<size_t>(bytes), "a fake"), kDone))
CALLER(cuMemAlloc_v2, hipMalloc, (GpuAddress* address, size_t bytes),
       FakeCalls::Allocate(fake, current, address, bytes, false))
CALLER(cuMemAllocManaged, hipMallocManaged, (GpuAddress* address, size_t bytes, unsigned),
       FakeCalls::Allocate(fake, current, address, bytes, true))
CALLER(cuMemFree_v2, hipFree, (GpuAddress address), FakeCalls::Free(fake, address))
CALLER(cuMemsetD8Async, hipMemsetD8Async,
       (GpuAddress address, unsigned char byte, size_t bytes, GpuStream stream),
       FakeCalls::Queue(fake, stream, current,
                        {.kind = Operation::kFill,
                         .destination = static_cast<char*>(Pointer(address)),
                         .bytes = bytes, .byte = static_cast<char>(byte)}))
CALLER(cuMemcpyDtoH_v2, hipMemcpyDtoH, (void* destination, GpuAddress source, size_t bytes),
       FakeCalls::CopyNow(fake, current, destination, Pointer(source), bytes, lock))
CALLER(cuStreamSynchronize, hipStreamSynchronize, (GpuStream stream),
       FakeCalls::Synchronize(fake, current, stream, lock))
CALLER(cuStreamDestroy_v2, hipStreamDestroy, (GpuStream stream),
       FakeCalls::DestroyStream(fake, current, stream, lock))
CALLER(cuStreamBeginCapture_v2, hipStreamBeginCapture, (GpuStream stream, int),
       FakeCalls::Capture(fake, current, stream, true))
CALLER(cuStreamEndCapture, hipStreamEndCapture, (GpuStream stream, void** graph),
       (*graph = nullptr, FakeCalls::Capture(fake, current, stream, false)))
ONE(kCuda, of_caller, cuCtxGetCurrent, kAnywhere, (GpuContext* context),
    (*context = FakeCalls::ContextOf(current), kDone))
ONE(kCuda, of_caller, cuCtxSetCurrent, kAnywhere, (GpuContext context),
    FakeCalls::SetCurrent(context))
// clang-format on
