// Where a tensor's bytes live, and the few things that are asked of that place.
#ifndef HOLDFAST_DEVICE_H_
#define HOLDFAST_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace holdfast {

/// A stream of the device that a caller's work is queued on; for CUDA a cudaStream_t. Null is the
/// default stream.
using StreamHandle = void*;

/// A copy that may still be under way. Plain value; 0 is "already done".
using CopyTicket = uint64_t;

/// A place that tensors live in: host memory, a CUDA device, or a test's stand-in for one.
///
/// A device copies into and out of the staging arena, tells when a copy has ended, and lets a
/// stream of the caller wait for copies without blocking the CPU. It must outlive every
/// Checkpointer and load that uses it.
///
/// \threadsafety All methods may be called from any thread.
class Device {
 public:
  virtual ~Device() = default;

  /// "host", "cuda:0", ...
  virtual std::string name() const = 0;

  /// True where a pointer can be read by the CPU, so that copies are plain memory copies, done when
  /// the call returns.
  virtual bool is_host() const = 0;

  /// Makes `bytes` at `base` (the arena) fast and safe as a target of copies: cudaHostRegister.
  /// Registering what is registered already is no error.
  virtual absl::Status RegisterMemory(void* base, size_t bytes) = 0;

  /// Takes the registration back. On failure the memory must be neither unmapped nor reused: the
  /// arena quarantines it.
  /// \error kFailedPrecondition while a copy into or out of this range is under way.
  virtual absl::Status UnregisterMemory(void* base, size_t bytes) = 0;

  /// From now on copies are ordered after what the caller has queued on `stream` so far. Never
  /// blocks the CPU.
  virtual absl::Status OrderAfter(StreamHandle stream) = 0;

  /// Starts a copy of `bytes` from device memory to the arena.
  /// \error kInvalidArgument when `source` is not memory of this device.
  virtual absl::StatusOr<CopyTicket> CopyToHost(void* destination, const void* source,
                                                size_t bytes) = 0;

  /// Starts a copy from host memory to device memory (loading).
  virtual absl::StatusOr<CopyTicket> CopyFromHost(void* destination, const void* source,
                                                  size_t bytes) = 0;

  /// Whether the copy has ended; an error of the copy itself is reported here, once.
  /// \error kAborted when the device's context is lost: no copy of it is under way any more. Any
  /// other error says nothing about the end; the copy's memory stays in use until a later call
  /// says more.
  virtual absl::StatusOr<bool> IsDone(CopyTicket ticket) = 0;

  /// Blocks until the copy has ended.
  /// \error kDeadlineExceeded when `timeout` passes first; the copy goes on.
  virtual absl::Status Wait(CopyTicket ticket, absl::Duration timeout) = 0;

  /// Makes `stream` (not the CPU) wait until all copies started so far have ended: to be put in
  /// front of the optimizer step that changes the parameters.
  virtual absl::Status MakeStreamWait(StreamHandle stream) = 0;
};

/// The host's own memory.
Device* HostDevice();

/// CUDA device `ordinal`, created at its first use and kept for the life of the process.
/// \error kUnimplemented when this build has no CUDA, kNotFound when the machine has no such
/// device.
absl::StatusOr<Device*> CudaDevice(int ordinal);

}  // namespace holdfast

#endif  // HOLDFAST_DEVICE_H_
