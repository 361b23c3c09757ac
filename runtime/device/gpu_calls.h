// Holdfast's calls of a GPU driver, found at run time: CUDA's driver API
// (libcuda.so.1) or HIP (libamdhip64.so). Building needs no header or library of either.
//
// Types, numbers and signatures are the documented binary interface: CUDA Driver API Reference, HIP
// Runtime API Reference. HIP has the shape and the numbers of CUDA's driver API, so a single table
// serves two drivers. Drivers from CUDA 11.4 and ROCm 6 on have every call.
#ifndef HOLDFAST_RUNTIME_DEVICE_GPU_CALLS_H_
#define HOLDFAST_RUNTIME_DEVICE_GPU_CALLS_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace holdfast::device {

enum class GpuApi { kCuda, kHip };

/// "cuda" or "hip": the first part of a device's name.
const char* NameOf(GpuApi api);

/// CUresult and hipError_t, as far as a number has a meaning here.
enum class GpuCode : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kDeinitialized = 4,
  kStubLibrary = 34,
  kInsufficientDriver = 35,  // HIP's alone
  kDeviceUnavailable = 46,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kEccUncorrectable = 214,
  kNvlinkUncorrectable = 220,
  kContained = 226,
  kInvalidHandle = 400,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchTimeout = 702,
  kContextIsDestroyed = 709,
  kAssert = 710,
  kHostMemoryAlreadyRegistered = 712,
  kHostMemoryNotRegistered = 713,
  kHardwareStackError = 714,
  kIllegalInstruction = 715,
  kMisalignedAddress = 716,
  kInvalidAddressSpace = 717,
  kInvalidPc = 718,
  kLaunchFailed = 719,
  kTensorMemoryLeak = 721,
  kNotPermitted = 800,
  kNotSupported = 801,
  kSystemNotReady = 802,
  kSystemDriverMismatch = 803,
  kCompatNotSupportedOnDevice = 804,
  kMpsClientTerminated = 810,
  kStreamCaptureImplicit = 906,
  kUnknown = 999,
};

/// True for a fault that ends the context and the copies, in an unknown state, for good.
bool IsFatal(GpuCode code);

using GpuContext = struct GpuContextHandle*;  ///< CUcontext
using GpuStream = struct GpuStreamHandle*;    ///< CUstream, cudaStream_t, hipStream_t
using GpuEvent = struct GpuEventHandle*;      ///< CUevent, hipEvent_t
using GpuAddress = unsigned long long;        ///< CUdeviceptr; hipDeviceptr_t is a pointer.
static_assert(sizeof(GpuAddress) == sizeof(void*));

inline constexpr unsigned kStreamNonBlocking = 1;   ///< CU_STREAM_NON_BLOCKING
inline constexpr unsigned kEventDisableTiming = 2;  ///< CU_EVENT_DISABLE_TIMING
/// CU_MEMHOSTREGISTER_PORTABLE: pinned for every device's context.
inline constexpr unsigned kHostRegisterPortable = 1;
/// CU_MEMHOSTREGISTER_DEVICEMAP: kernels may read the memory by its address.
inline constexpr unsigned kHostRegisterMapped = 2;
inline constexpr int kCaptureModeRelaxed = 2;      ///< CU_STREAM_CAPTURE_MODE_RELAXED
inline constexpr int kNotCapturing = 0;            ///< CU_STREAM_CAPTURE_STATUS_NONE
inline constexpr unsigned kMemoryTypeDevice = 2;   ///< CU_MEMORYTYPE_DEVICE
inline constexpr int kAttributeMemoryType = 2;     ///< CU_POINTER_ATTRIBUTE_MEMORY_TYPE
inline constexpr int kAttributeIsManaged = 8;      ///< CU_POINTER_ATTRIBUTE_IS_MANAGED
inline constexpr int kAttributeDeviceOrdinal = 9;  ///< CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL

struct GpuCalls {
  GpuApi api = GpuApi::kCuda;

  GpuCode (*init)(unsigned flags) = nullptr;
  GpuCode (*device_count)(int* count) = nullptr;
  GpuCode (*device_get)(int* device, int ordinal) = nullptr;
  GpuCode (*error_name)(GpuCode code, const char** name) = nullptr;
  GpuCode (*error_text)(GpuCode code, const char** text) = nullptr;

  // How a thread gets into the device's context, and back. CUDA: the primary context, as
  // PyTorch, on the thread's stack of contexts.
  GpuCode (*context_retain)(GpuContext* context, int device) = nullptr;
  GpuCode (*context_push)(GpuContext context) = nullptr;
  GpuCode (*context_pop)(GpuContext* context) = nullptr;
  // HIP: the thread's current device. hipCtxPopCurrent does not bring the former device back.
  GpuCode (*current_device)(int* ordinal) = nullptr;
  GpuCode (*set_device)(int ordinal) = nullptr;
  // HIP latches an error for the thread's next caller; the call clears the error.
  GpuCode (*last_error)() = nullptr;

  GpuCode (*exchange_capture_mode)(int* mode) = nullptr;
  GpuCode (*stream_create)(GpuStream* stream, unsigned flags) = nullptr;
  GpuCode (*stream_is_capturing)(GpuStream stream, int* status) = nullptr;
  GpuCode (*stream_wait_event)(GpuStream stream, GpuEvent event, unsigned flags) = nullptr;
  GpuCode (*event_create)(GpuEvent* event, unsigned flags) = nullptr;
  GpuCode (*event_record)(GpuEvent event, GpuStream stream) = nullptr;
  GpuCode (*event_query)(GpuEvent event) = nullptr;
  GpuCode (*copy_to_host)(void* destination, GpuAddress source, size_t bytes,
                          GpuStream stream) = nullptr;
  GpuCode (*copy_from_host)(GpuAddress destination, const void* source, size_t bytes,
                            GpuStream stream) = nullptr;
  GpuCode (*pointer_attributes)(unsigned count, int* attributes, void** values,
                                GpuAddress address) = nullptr;
  GpuCode (*host_register)(void* base, size_t bytes, unsigned flags) = nullptr;
  GpuCode (*host_unregister)(void* base) = nullptr;
};

/// Loads the driver and finds every call. An empty `library` is the machine's driver; a test names
/// the path of a fake driver. The library is never unloaded.
/// \error kNotFound when the library cannot be loaded, kUnimplemented when the library lacks a
/// call.
absl::StatusOr<GpuCalls> FindGpuCalls(GpuApi api, const std::string& library);

/// "OPERATION OBJECT: text (NAME)" of the driver; OK for kSuccess. Clears the error latched by
/// HIP: the framework would find the error after the next kernel.
absl::Status ToStatus(const GpuCalls& calls, const char* operation, const std::string& object,
                      GpuCode code);

}  // namespace holdfast::device

#endif  // HOLDFAST_RUNTIME_DEVICE_GPU_CALLS_H_
