#include "runtime/device/gpu_calls.h"

#include <dlfcn.h>

#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace holdfast::device {
namespace {

// By the versioned name: a process must not get two copies, and PyTorch's wheels bring HIP along
// in a private folder. ROCm 5 numbers memory types differently.
std::vector<std::string> LibrariesOf(GpuApi api) {
  if (api == GpuApi::kCuda) return {"libcuda.so.1"};
  return {"libamdhip64.so.7", "libamdhip64.so.6"};
}

absl::StatusOr<void*> Load(GpuApi api, const std::string& library) {
  const std::vector<std::string> names =
      library.empty() ? LibrariesOf(api) : std::vector<std::string>{library};
  // A library that the process has already comes first.
  for (const int flags : {RTLD_NOLOAD, 0}) {
    for (const std::string& name : names) {
      void* const handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | flags);
      if (handle != nullptr) return handle;
    }
  }
  const char* const reason = dlerror();
  return absl::NotFoundError(absl::StrCat(
      "load the driver of ", NameOf(api), " devices: ", reason == nullptr ? "unknown" : reason,
      "; install the GPU's driver, or start the container with its GPUs"));
}

absl::StatusCode StatusCodeOf(GpuCode code) {
  switch (code) {
    case GpuCode::kInvalidValue:
    case GpuCode::kInvalidHandle:
      return absl::StatusCode::kInvalidArgument;
    case GpuCode::kOutOfMemory:
      return absl::StatusCode::kResourceExhausted;
    case GpuCode::kStubLibrary:
    case GpuCode::kInsufficientDriver:
    case GpuCode::kNoDevice:
    case GpuCode::kInvalidDevice:
      return absl::StatusCode::kNotFound;
    case GpuCode::kDeviceUnavailable:
    case GpuCode::kSystemNotReady:
      return absl::StatusCode::kUnavailable;
    case GpuCode::kSystemDriverMismatch:
    case GpuCode::kCompatNotSupportedOnDevice:
      return absl::StatusCode::kFailedPrecondition;
    default:
      return absl::StatusCode::kInternal;
  }
}

}  // namespace

const char* NameOf(GpuApi api) { return api == GpuApi::kCuda ? "cuda" : "hip"; }

bool IsFatal(GpuCode code) {
  switch (code) {
    case GpuCode::kDeinitialized:
    case GpuCode::kEccUncorrectable:
    case GpuCode::kNvlinkUncorrectable:
    case GpuCode::kContained:
    case GpuCode::kIllegalAddress:
    case GpuCode::kLaunchTimeout:
    case GpuCode::kContextIsDestroyed:
    case GpuCode::kAssert:
    case GpuCode::kHardwareStackError:
    case GpuCode::kIllegalInstruction:
    case GpuCode::kMisalignedAddress:
    case GpuCode::kInvalidAddressSpace:
    case GpuCode::kInvalidPc:
    case GpuCode::kLaunchFailed:
    case GpuCode::kTensorMemoryLeak:
    case GpuCode::kMpsClientTerminated:
      return true;
    default:
      return false;
  }
}

absl::StatusOr<GpuCalls> FindGpuCalls(GpuApi api, const std::string& library) {
  const absl::StatusOr<void*> handle = Load(api, library);
  if (!handle.ok()) return handle.status();
  GpuCalls calls;
  calls.api = api;
  std::vector<std::string> lacking;
  const auto find = [&](auto* call, const char* cuda, const char* hip) {
    const char* const name = api == GpuApi::kCuda ? cuda : hip;
    if (name == nullptr) return;
    void* const address = dlsym(*handle, name);
    if (address == nullptr) lacking.push_back(name);
    *call = reinterpret_cast<std::remove_pointer_t<decltype(call)>>(address);
  };
  // CUDA: the name of the oldest version with the table's signature.
  find(&calls.init, "cuInit", "hipInit");
  find(&calls.device_count, "cuDeviceGetCount", "hipGetDeviceCount");
  find(&calls.device_get, "cuDeviceGet", nullptr);
  find(&calls.error_name, "cuGetErrorName", "hipDrvGetErrorName");
  find(&calls.error_text, "cuGetErrorString", "hipDrvGetErrorString");
  find(&calls.context_retain, "cuDevicePrimaryCtxRetain", nullptr);
  find(&calls.context_push, "cuCtxPushCurrent_v2", nullptr);
  find(&calls.context_pop, "cuCtxPopCurrent_v2", nullptr);
  find(&calls.current_device, nullptr, "hipGetDevice");
  find(&calls.set_device, nullptr, "hipSetDevice");
  find(&calls.last_error, nullptr, "hipGetLastError");
  find(&calls.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode",
       "hipThreadExchangeStreamCaptureMode");
  find(&calls.stream_create, "cuStreamCreate", "hipStreamCreateWithFlags");
  find(&calls.stream_is_capturing, "cuStreamIsCapturing", "hipStreamIsCapturing");
  find(&calls.stream_wait_event, "cuStreamWaitEvent", "hipStreamWaitEvent");
  find(&calls.event_create, "cuEventCreate", "hipEventCreateWithFlags");
  find(&calls.event_record, "cuEventRecord", "hipEventRecord");
  find(&calls.event_query, "cuEventQuery", "hipEventQuery");
  find(&calls.copy_to_host, "cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync");
  find(&calls.copy_from_host, "cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync");
  find(&calls.pointer_attributes, "cuPointerGetAttributes", "hipDrvPointerGetAttributes");
  find(&calls.host_register, "cuMemHostRegister_v2", "hipHostRegister");
  find(&calls.host_unregister, "cuMemHostUnregister", "hipHostUnregister");
  if (!lacking.empty()) {
    return absl::UnimplementedError(absl::StrCat(
        "load the driver of ", NameOf(api), " devices: it lacks ", absl::StrJoin(lacking, ", "),
        "; install a driver of ", api == GpuApi::kCuda ? "CUDA 11.4" : "ROCm 6", " or newer"));
  }
  return calls;
}

absl::Status ToStatus(const GpuCalls& calls, const char* operation, const std::string& object,
                      GpuCode code) {
  if (code == GpuCode::kSuccess) return absl::OkStatus();
  if (calls.last_error != nullptr) (void)calls.last_error();
  // A driver leaves null for an unknown code.
  const char* name = nullptr;
  const char* text = nullptr;
  (void)calls.error_name(code, &name);
  (void)calls.error_text(code, &text);
  return absl::Status(
      StatusCodeOf(code),
      absl::StrCat(operation, " ", object, ": ", text == nullptr ? "error of the driver" : text,
                   " (", name == nullptr ? "unnamed" : name, ", ", static_cast<int>(code), ")"));
}

}  // namespace holdfast::device
