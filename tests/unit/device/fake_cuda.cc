// See fake_cuda.h. The definitions below replace libcudart's.
#include "tests/unit/device/fake_cuda.h"

#include <cuda.h>

#include <cstdint>
#include <cstring>
#include <iterator>
#include <utility>

namespace holdfast::testing {
namespace {

cudaStreamCaptureMode g_mode = cudaStreamCaptureModeGlobal;

// A handle is a number, cast to a pointer.
template <typename Handle>
Handle NewHandle() {
  static uintptr_t next = 0x1000;
  next += 16;
  return reinterpret_cast<Handle>(next);
}

// The start of every call; latches an error like the runtime.
cudaError_t Enter(const char* function, bool in_context = true) {
  FakeCuda& fake = Fake();
  ++fake.counts[function];
  if (in_context && fake.contexts_pushed == 0) ++fake.calls_outside_context;
  const bool sets_mode = std::strcmp(function, "cudaThreadExchangeStreamCaptureMode") == 0;
  if (in_context && !sets_mode && g_mode != cudaStreamCaptureModeRelaxed) ++fake.calls_not_relaxed;
  const auto found = fake.failures.find(function);
  if (found == fake.failures.end() || found->second.times == 0) return cudaSuccess;
  if (found->second.skip > 0) {
    --found->second.skip;
    return cudaSuccess;
  }
  --found->second.times;
  if (found->second.error != cudaSuccess) fake.latched = found->second.error;
  return found->second.error;
}

CUresult FakeDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return Fake().failures["cuDeviceGet"].times > 0 ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}
CUresult FakeRetain(CUcontext* context, CUdevice device) {
  *context = reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device) + 1);
  return Fake().failures["cuDevicePrimaryCtxRetain"].times > 0 ? CUDA_ERROR_OUT_OF_MEMORY
                                                               : CUDA_SUCCESS;
}
CUresult FakePush(CUcontext) {
  if (Fake().failures["cuCtxPushCurrent"].times > 0) return CUDA_ERROR_INVALID_CONTEXT;
  ++Fake().contexts_pushed;
  return CUDA_SUCCESS;
}
CUresult FakePop(CUcontext*) {
  --Fake().contexts_pushed;
  return CUDA_SUCCESS;
}

}  // namespace

FakeCuda& Fake() {
  static FakeCuda* const fake = new FakeCuda;
  return *fake;
}

void FakeCuda::Run(cudaStream_t handle) {
  Stream& stream = streams[handle];
  while (stream.done < stream.operations.size()) {
    const Operation& next = stream.operations[stream.done];
    switch (next.kind) {
      case Operation::kCopy:
        std::memcpy(next.destination, next.source, next.bytes);
        break;
      case Operation::kRecord:
        events[next.event].done = next.generation;
        break;
      case Operation::kWait:
        if (events[next.event].done < next.generation) return;
        break;
    }
    ++stream.done;
  }
}

void FakeCuda::RunAll() {
  for (;;) {
    size_t before = 0;
    size_t after = 0;
    for (const auto& [handle, stream] : streams) before += stream.done;
    for (const auto& [handle, stream] : streams) Run(handle);
    for (const auto& [handle, stream] : streams) after += stream.done;
    if (before == after) return;
  }
}

void FakeCuda::Fail(const std::string& function, cudaError_t error, int skip, int times) {
  failures[function] = {error, skip, times};
}

uint64_t FakeCuda::count(const std::string& function) const {
  const auto found = counts.find(function);
  return found == counts.end() ? 0 : found->second;
}

}  // namespace holdfast::testing

using holdfast::testing::Enter;
using holdfast::testing::Fake;
using holdfast::testing::FakeCuda;
using holdfast::testing::NewHandle;

#define HOLDFAST_ENTER(...)                                                                       \
  if (const cudaError_t error = Enter(__func__ __VA_OPT__(, ) __VA_ARGS__); error != cudaSuccess) \
  return error

extern "C" {

cudaError_t cudaGetLastError() { return std::exchange(Fake().latched, cudaSuccess); }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorFake"; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the stand-in"; }

cudaError_t cudaGetDeviceCount(int* count) {
  HOLDFAST_ENTER(false);
  *count = Fake().device_count;
  return cudaSuccess;
}

static cudaError_t FindDriverCall(const char* symbol, void** out,
                                  cudaDriverEntryPointQueryResult* result) {
  HOLDFAST_ENTER(false);
  *result = cudaDriverEntryPointSuccess;
  const std::string name = symbol;
  if (name == "cuDeviceGet") {
    *out = reinterpret_cast<void*>(&holdfast::testing::FakeDeviceGet);
  } else if (name == "cuDevicePrimaryCtxRetain") {
    *out = reinterpret_cast<void*>(&holdfast::testing::FakeRetain);
  } else if (name == "cuCtxPushCurrent") {
    *out = reinterpret_cast<void*>(&holdfast::testing::FakePush);
  } else if (name == "cuCtxPopCurrent") {
    *out = reinterpret_cast<void*>(&holdfast::testing::FakePop);
  } else {
    *result = cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}
#if CUDART_VERSION >= 12050
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** out, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  return FindDriverCall(symbol, out, result);
}
#else
cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** out, unsigned long long,
                                    cudaDriverEntryPointQueryResult* result) {
  return FindDriverCall(symbol, out, result);
}
#endif

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  HOLDFAST_ENTER();
  std::swap(*mode, holdfast::testing::g_mode);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  HOLDFAST_ENTER();
  *status = Fake().streams[stream].capturing ? cudaStreamCaptureStatusActive
                                             : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  HOLDFAST_ENTER();
  *stream = NewHandle<cudaStream_t>();
  Fake().streams[*stream];
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  HOLDFAST_ENTER();
  *event = NewHandle<cudaEvent_t>();
  Fake().events[*event];
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  HOLDFAST_ENTER();
  FakeCuda::Operation operation;
  operation.kind = FakeCuda::Operation::kRecord;
  operation.event = event;
  operation.generation = ++Fake().events[event].recorded;
  Fake().streams[stream].operations.push_back(operation);
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  HOLDFAST_ENTER();
  FakeCuda::Operation operation;
  operation.kind = FakeCuda::Operation::kWait;
  operation.event = event;
  operation.generation = Fake().events[event].recorded;
  Fake().streams[stream].operations.push_back(operation);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  HOLDFAST_ENTER();
  const FakeCuda::Event& state = Fake().events[event];
  if (state.done >= state.recorded) return cudaSuccess;
  Fake().latched = cudaErrorNotReady;
  return cudaErrorNotReady;
}

cudaError_t cudaMemcpyAsync(void* destination, const void* source, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  HOLDFAST_ENTER();
  FakeCuda::Operation operation;
  operation.destination = static_cast<char*>(destination);
  operation.source = static_cast<const char*>(source);
  operation.bytes = bytes;
  Fake().streams[stream].operations.push_back(operation);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  HOLDFAST_ENTER();
  *attributes = {};
  attributes->type = cudaMemoryTypeUnregistered;
  const char* const address = static_cast<const char*>(pointer);
  auto after = Fake().device_memory.upper_bound(address);
  if (after == Fake().device_memory.begin()) return cudaSuccess;
  const auto& [begin, block] = *std::prev(after);
  if (address < begin + block.first) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = block.second;
  }
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* base, size_t bytes, unsigned) {
  HOLDFAST_ENTER();
  Fake().registered[base] = bytes;
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* base) {
  HOLDFAST_ENTER();
  Fake().registered.erase(base);
  return cudaSuccess;
}

}  // extern "C"
