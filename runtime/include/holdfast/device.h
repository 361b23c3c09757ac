// Memory of tensors (host or GPU), with its operations.
#ifndef HOLDFAST_DEVICE_H_
#define HOLDFAST_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace holdfast {

/// A device stream with queued work of the caller: a CUstream (which is a cudaStream_t) or a
/// hipStream_t. Null is the default stream.
using StreamHandle = void*;

/// Names a copy that may still be under way. Plain value; 0 names a finished copy.
using CopyTicket = uint64_t;

/// Memory that holds tensors: the host's, a GPU's, or a test double's.
///
/// A device copies into and out of the staging arena and reports the end of each copy. A stream of
/// the caller can wait for copies without blocking the CPU. The device must outlive every
/// Checkpointer and load that uses it.
///
/// \threadsafety All methods may be called from any thread.
class Device {
 public:
  virtual ~Device() = default;

  /// "host", "cuda:0", ...
  virtual std::string name() const = 0;

  /// True where the CPU can read the memory: copies are then plain memory copies, done on return.
  virtual bool is_host() const = 0;

  /// Prepares `bytes` at `base` (the arena) for fast and safe copies: cuMemHostRegister.
  /// Repeated registration is no error.
  virtual absl::Status RegisterMemory(void* base, size_t bytes) = 0;

  /// Removes the registration. On failure the memory must be neither unmapped nor reused: the arena
  /// quarantines it.
  /// \error kFailedPrecondition while a copy into or out of this range is under way.
  virtual absl::Status UnregisterMemory(void* base, size_t bytes) = 0;

  /// Orders later copies after the work queued on `stream` so far. Never blocks the CPU.
  virtual absl::Status OrderAfter(StreamHandle stream) = 0;

  /// Starts a copy of `bytes` from device memory to the arena.
  /// \error kInvalidArgument when `source` is not memory of this device.
  virtual absl::StatusOr<CopyTicket> CopyToHost(void* destination, const void* source,
                                                size_t bytes) = 0;

  /// Starts a copy from host memory to device memory (loading).
  virtual absl::StatusOr<CopyTicket> CopyFromHost(void* destination, const void* source,
                                                  size_t bytes) = 0;

  /// Returns true when the copy has ended. An error of the copy itself is reported here, once.
  /// \error kAborted when the device's context is lost: all its copies have ended. Any other error
  /// leaves the end unknown; the copy's memory stays in use until a later call reports the end.
  virtual absl::StatusOr<bool> IsDone(CopyTicket ticket) = 0;

  /// Blocks until the copy has ended.
  /// \error kDeadlineExceeded when `timeout` passes first; the copy goes on.
  virtual absl::Status Wait(CopyTicket ticket, absl::Duration timeout) = 0;

  /// Makes `stream` (not the CPU) wait until all copies started so far have ended. Call it before
  /// the optimizer step that changes the parameters.
  virtual absl::Status MakeStreamWait(StreamHandle stream) = 0;
};

/// The host's own memory.
Device* HostDevice();

/// CUDA device `ordinal`, created at its first use and kept for the life of the process. The driver
/// (libcuda.so.1, of CUDA 11.4 or newer) is found at that moment; the device's primary context is
/// used, as by PyTorch.
/// \error kNotFound when there is no driver or no such device, kUnimplemented when the driver lacks
/// a call.
/// \threadsafety May be called from any thread; the calling thread's current context stays.
/// \forksafety A forked child gets kFailedPrecondition, here and from every method of the device.
absl::StatusOr<Device*> CudaDevice(int ordinal);

/// HIP device `ordinal`, as CudaDevice, by the driver of ROCm 6 or newer. Tested with a fake driver
/// alone, never on hardware.
absl::StatusOr<Device*> HipDevice(int ordinal);

}  // namespace holdfast

#endif  // HOLDFAST_DEVICE_H_
