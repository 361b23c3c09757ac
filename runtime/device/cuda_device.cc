// A CUDA device: the only file with CUDA calls. Host code only, no kernels; any C++ compiler will
// do.
//
// - One non-blocking stream per device carries all copies, so that copies end in the order of their
//   start. A ticket is a copy's ordinal; a bounded ring of events shows the progress of the stream.
//   When the ring is full a copy gets no event and is covered by a later one.
// - Every call runs in the device's primary context, pushed and popped. cudaSetDevice and back
//   would set device 0 on a thread that had no device. Since CUDA 12 that call creates a context
//   there: half a gigabyte of GPU 0 for each rank of a node.
// - Every call runs in relaxed capture mode: a query or a registration must not break a graph that
//   another thread captures at that moment.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "holdfast/cuda.h"
#include "holdfast/device.h"
#include "runtime/base/clock.h"
#include "runtime/base/mutex.h"
#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"
#include "runtime/device/cuda_factory.h"

namespace holdfast::device {
namespace {

using base::Mutex;
using base::MutexLock;

constexpr size_t kEventsMax = 256;

// True once exit handlers run. An earlier handler or another copy of the CUDA runtime may have torn
// CUDA down, and a CUDA call then crashes. relaxed: the flag is set and read on its own.
std::atomic<bool> g_exiting{false};

absl::StatusCode CodeOf(cudaError_t error) {
  switch (error) {
    case cudaErrorInvalidValue:
    case cudaErrorInvalidResourceHandle:
      return absl::StatusCode::kInvalidArgument;
    case cudaErrorMemoryAllocation:
      return absl::StatusCode::kResourceExhausted;
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorInsufficientDriver:
      return absl::StatusCode::kNotFound;
    case cudaErrorDevicesUnavailable:
      return absl::StatusCode::kUnavailable;
    default:
      return absl::StatusCode::kInternal;
  }
}

// Turns a CUDA error into a Status and clears the runtime's per-thread error. An uncleared error
// would appear after the framework's next kernel.
absl::Status ToStatus(const std::string& device, const char* operation, cudaError_t error) {
  if (error == cudaSuccess) return absl::OkStatus();
  (void)cudaGetLastError();
  return absl::Status(CodeOf(error),
                      absl::StrCat(operation, " ", device, ": ", cudaGetErrorString(error), " (",
                                   cudaGetErrorName(error), ")"));
}

// After these errors the context is lost, and the state of its copies is unknown.
bool IsFatal(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContextIsDestroyed:
    case cudaErrorCudartUnloading:
      return true;
    default:
      return false;
  }
}

// The four driver calls, found at run time: a program linked to libcuda would not start on a
// machine without a driver.
struct Driver {
  CUresult (*device_get)(CUdevice*, int) = nullptr;
  CUresult (*retain)(CUcontext*, CUdevice) = nullptr;
  CUresult (*push)(CUcontext) = nullptr;
  CUresult (*pop)(CUcontext*) = nullptr;
};

template <typename Function>
absl::Status FindDriverCall(const char* symbol, Function* out) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  // 11030: the oldest version with the signatures used here.
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(symbol, &address, 11030, cudaEnableDefault, &result);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(symbol, &address, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess) return ToStatus(symbol, "find driver call", error);
  if (result != cudaDriverEntryPointSuccess || address == nullptr) {
    return absl::UnimplementedError(absl::StrCat("the CUDA driver lacks ", symbol));
  }
  *out = reinterpret_cast<Function>(address);
  return absl::OkStatus();
}

absl::StatusOr<Driver> FindDriver() {
  Driver driver;
  HOLDFAST_RETURN_IF_ERROR(FindDriverCall("cuDeviceGet", &driver.device_get));
  HOLDFAST_RETURN_IF_ERROR(FindDriverCall("cuDevicePrimaryCtxRetain", &driver.retain));
  HOLDFAST_RETURN_IF_ERROR(FindDriverCall("cuCtxPushCurrent", &driver.push));
  HOLDFAST_RETURN_IF_ERROR(FindDriverCall("cuCtxPopCurrent", &driver.pop));
  return driver;
}

// Puts this thread in `context` during its lifetime, without breaking captures of other threads.
class Scope {
 public:
  Scope(const Driver& driver, CUcontext context, const std::string& device) : driver_(driver) {
    const CUresult result = driver_.push(context);
    if (result != CUDA_SUCCESS) {
      status_ = absl::InternalError(absl::StrCat("enter ", device, ": driver error ", result));
      return;
    }
    status_ = ToStatus(device, "set capture mode on", cudaThreadExchangeStreamCaptureMode(&mode_));
    relaxed_ = status_.ok();
    pushed_ = true;
  }
  ~Scope() {
    if (relaxed_) (void)cudaThreadExchangeStreamCaptureMode(&mode_);
    CUcontext popped = nullptr;
    if (pushed_) (void)driver_.pop(&popped);
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  const absl::Status& status() const { return status_; }

 private:
  const Driver& driver_;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  bool pushed_ = false;
  bool relaxed_ = false;
  absl::Status status_;
};

// Registered host ranges, process-wide. A registration is portable, so a second device only adds a
// user. A range enters the book after its registration and leaves before its removal, so that the
// book lists no unregistered range.
struct Registration {
  size_t bytes = 0;
  bool foreign = false;  ///< Registered outside Holdfast; never unregistered here.
  /// Devices that use the range, each with its newest copy into or out of the range.
  std::map<int, CopyTicket> newest_copy;
};
struct Book {
  Mutex mutex;
  std::map<char*, Registration> ranges ABSL_GUARDED_BY(mutex);

  /// Notes that copy `ticket` of device `ordinal` uses the byte at `host`.
  void NoteCopy(const void* host, int ordinal, CopyTicket ticket) {
    const char* const address = static_cast<const char*>(host);
    MutexLock lock(&mutex);
    auto range = ranges.upper_bound(const_cast<char*>(address));
    if (range == ranges.begin()) return;
    Registration& registration = (--range)->second;
    if (address >= range->first + registration.bytes) return;
    const auto device = registration.newest_copy.find(ordinal);
    if (device != registration.newest_copy.end()) device->second = ticket;
  }
};
Book& TheBook() {
  static Book* const book = new Book;  // Never destroyed: statics may unregister late.
  return *book;
}

class Cuda final : public Device {
 public:
  static absl::StatusOr<Device*> Create(int ordinal);

  std::string name() const override { return name_; }
  bool is_host() const override { return false; }
  absl::Status RegisterMemory(void* base, size_t bytes) override;
  absl::Status UnregisterMemory(void* base, size_t bytes) override;
  absl::Status OrderAfter(StreamHandle stream) override;
  absl::StatusOr<CopyTicket> CopyToHost(void* destination, const void* source,
                                        size_t bytes) override;
  absl::StatusOr<CopyTicket> CopyFromHost(void* destination, const void* source,
                                          size_t bytes) override;
  absl::StatusOr<bool> IsDone(CopyTicket ticket) override;
  absl::Status Wait(CopyTicket ticket, absl::Duration timeout) override;
  absl::Status MakeStreamWait(StreamHandle stream) override;

 private:
  struct Mark {
    CopyTicket through = 0;  ///< Copies up to this ticket have ended when `event` has.
    cudaEvent_t event = nullptr;
  };

  Cuda(int ordinal, const Driver& driver, CUcontext context)
      : ordinal_(ordinal),
        name_(absl::StrCat("cuda:", ordinal)),
        driver_(driver),
        context_(context) {}

  absl::Status SetUp();
  /// Fails in a forked child (CUDA's state there is undefined) and while the process exits.
  absl::Status CheckUsable() const;
  absl::Status Error(const char* operation, cudaError_t error)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckNotCapturing(const char* operation, StreamHandle stream)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckOwnMemory(const void* address) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<CopyTicket> Copy(void* destination, const void* source, size_t bytes,
                                  cudaMemcpyKind kind);
  /// Records an event behind the newest copy, if the copy has none and an event is free.
  absl::Status MarkNewest() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Updates the progress of the stream.
  absl::Status Poll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int ordinal_;
  const std::string name_;
  const Driver driver_;
  const CUcontext context_;
  const base::ForkGuard fork_guard_;
  Mutex mutex_;
  cudaStream_t stream_ ABSL_GUARDED_BY(mutex_) = nullptr;
  // A wait refers to the newest record at the time of its queueing, so one event serves all waits.
  cudaEvent_t order_event_ ABSL_GUARDED_BY(mutex_) = nullptr;
  cudaEvent_t wait_event_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::deque<cudaEvent_t> free_events_ ABSL_GUARDED_BY(mutex_);
  std::deque<Mark> marks_ ABSL_GUARDED_BY(mutex_);  ///< Oldest first.
  CopyTicket issued_ ABSL_GUARDED_BY(mutex_) = 0;   ///< The newest copy.
  CopyTicket marked_ ABSL_GUARDED_BY(mutex_) = 0;   ///< The newest copy with an event behind it.
  CopyTicket done_ ABSL_GUARDED_BY(mutex_) = 0;     ///< Copies up to this ticket have ended.
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);       ///< Why the context is lost; OK before.
};

absl::StatusOr<Device*> Cuda::Create(int ordinal) {
  int count = 0;
  const std::string name = absl::StrCat("cuda:", ordinal);
  HOLDFAST_RETURN_IF_ERROR(ToStatus(name, "find", cudaGetDeviceCount(&count)));
  if (ordinal < 0 || ordinal >= count) {
    return absl::NotFoundError(
        absl::StrCat("find ", name, ": the machine has ", count, " CUDA device(s)"));
  }
  HOLDFAST_ASSIGN_OR_RETURN(const Driver driver, FindDriver());
  CUdevice device = 0;
  CUcontext context = nullptr;
  CUresult result = driver.device_get(&device, ordinal);
  // Never released: the device lives as long as the process, and exit code must not call the
  // driver.
  if (result == CUDA_SUCCESS) result = driver.retain(&context, device);
  if (result != CUDA_SUCCESS) {
    return absl::Status(result == CUDA_ERROR_OUT_OF_MEMORY ? absl::StatusCode::kResourceExhausted
                                                           : absl::StatusCode::kUnavailable,
                        absl::StrCat("open ", name, ": driver error ", result));
  }
  // Registered after CUDA's setup, so that this handler runs before CUDA's teardown.
  static const int registered =
      std::atexit([] { g_exiting.store(true, std::memory_order_relaxed); });
  if (registered != 0) return absl::ResourceExhaustedError("no exit handler left");
  std::unique_ptr<Cuda> cuda(new Cuda(ordinal, driver, context));
  HOLDFAST_RETURN_IF_ERROR(cuda->SetUp());
  return cuda.release();
}

absl::Status Cuda::SetUp() {
  MutexLock lock(&mutex_);
  Scope scope(driver_, context_, name_);
  HOLDFAST_RETURN_IF_ERROR(scope.status());
  // Non-blocking: else work on the legacy default stream would wait for every copy.
  HOLDFAST_RETURN_IF_ERROR(ToStatus(name_, "make a stream on",
                                    cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)));
  for (size_t i = 0; i < kEventsMax + 2; ++i) {
    cudaEvent_t event = nullptr;
    // Without timing: cheaper.
    HOLDFAST_RETURN_IF_ERROR(ToStatus(name_, "make an event on",
                                      cudaEventCreateWithFlags(&event, cudaEventDisableTiming)));
    free_events_.push_back(event);
  }
  order_event_ = free_events_.front();
  free_events_.pop_front();
  wait_event_ = free_events_.front();
  free_events_.pop_front();
  return absl::OkStatus();
}

absl::Status Cuda::CheckUsable() const {
  if (!fork_guard_.InCreator()) {
    return absl::FailedPreconditionError(
        absl::StrCat(name_, ": CUDA cannot be used in a forked child"));
  }
  if (g_exiting.load(std::memory_order_relaxed)) {
    return absl::FailedPreconditionError(absl::StrCat(name_, ": the process is exiting"));
  }
  return absl::OkStatus();
}

absl::Status Cuda::Error(const char* operation, cudaError_t error) {
  absl::Status status = ToStatus(name_, operation, error);
  if (IsFatal(error) && lost_.ok()) {
    // Returned from the next call on; the current call returns the fault itself, once.
    lost_ = absl::AbortedError(
        absl::StrCat(name_, " is unusable since an earlier fault: ", cudaGetErrorName(error)));
  }
  return status;
}

absl::Status Cuda::CheckNotCapturing(const char* operation, StreamHandle stream) {
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  HOLDFAST_RETURN_IF_ERROR(
      Error(operation, cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capturing)));
  // An event recorded on a capturing stream would pull the copy stream into the graph.
  if (capturing != cudaStreamCaptureStatusNone) {
    return absl::FailedPreconditionError(
        absl::StrCat(operation, " ", name_, ": the stream is capturing a graph"));
  }
  return absl::OkStatus();
}

// ---- Registration.

absl::Status Cuda::RegisterMemory(void* base, size_t bytes) {
  HOLDFAST_RETURN_IF_ERROR(CheckUsable());
  if (base == nullptr || bytes == 0) {
    return absl::InvalidArgumentError(absl::StrCat("register memory on ", name_, ": empty range"));
  }
  char* const begin = static_cast<char*>(base);
  MutexLock lock(&mutex_);
  HOLDFAST_RETURN_IF_ERROR(lost_);
  Book& book = TheBook();
  MutexLock book_lock(&book.mutex);
  const auto next = book.ranges.upper_bound(begin);
  if (next != book.ranges.begin()) {
    auto& [other, registration] = *std::prev(next);
    if (other == begin && registration.bytes == bytes) {
      registration.newest_copy.try_emplace(ordinal_, CopyTicket{0});
      return absl::OkStatus();
    }
    if (other + registration.bytes > begin) {
      return absl::InvalidArgumentError(absl::StrCat(
          "register memory on ", name_, ": it overlaps a range that is registered already"));
    }
  }
  if (next != book.ranges.end() && next->first < begin + bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "register memory on ", name_, ": it overlaps a range that is registered already"));
  }
  Scope scope(driver_, context_, name_);
  HOLDFAST_RETURN_IF_ERROR(scope.status());
  // Portable: pinned for every device's context. Mapped: kernels may read the memory by its
  // address.
  const cudaError_t error =
      cudaHostRegister(base, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  const bool foreign = error == cudaErrorHostMemoryAlreadyRegistered;
  if (foreign) {
    (void)cudaGetLastError();
  } else {
    HOLDFAST_RETURN_IF_ERROR(Error("register memory on", error));
  }
  book.ranges[begin] = {bytes, foreign, {{ordinal_, CopyTicket{0}}}};
  return absl::OkStatus();
}

absl::Status Cuda::UnregisterMemory(void* base, size_t bytes) {
  HOLDFAST_RETURN_IF_ERROR(CheckUsable());
  MutexLock lock(&mutex_);
  HOLDFAST_RETURN_IF_ERROR(lost_);
  Scope scope(driver_, context_, name_);
  HOLDFAST_RETURN_IF_ERROR(scope.status());
  HOLDFAST_RETURN_IF_ERROR(Poll());
  Book& book = TheBook();
  MutexLock book_lock(&book.mutex);
  const auto found = book.ranges.find(static_cast<char*>(base));
  if (found == book.ranges.end() || found->second.bytes != bytes ||
      found->second.newest_copy.count(ordinal_) == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("unregister memory of ", name_, ": that range is not registered"));
  }
  Registration& registration = found->second;
  if (registration.newest_copy[ordinal_] > done_) {
    return absl::FailedPreconditionError(
        absl::StrCat("unregister memory of ", name_, ": copies of that range are under way"));
  }
  if (registration.newest_copy.size() > 1) {
    registration.newest_copy.erase(ordinal_);
    return absl::OkStatus();
  }
  const bool foreign = registration.foreign;
  // Erased first, and also on failure: the state after a failed unregister is unknown, so no device
  // may use the range, and the caller quarantines the range.
  book.ranges.erase(found);
  if (foreign) {
    return absl::FailedPreconditionError(absl::StrCat(
        "unregister memory of ", name_, ": registered outside Holdfast, may be in use"));
  }
  return Error("unregister memory of", cudaHostUnregister(base));
}

// ---- Order between streams.

absl::Status Cuda::OrderAfter(StreamHandle stream) {
  HOLDFAST_RETURN_IF_ERROR(CheckUsable());
  MutexLock lock(&mutex_);
  HOLDFAST_RETURN_IF_ERROR(lost_);
  Scope scope(driver_, context_, name_);
  HOLDFAST_RETURN_IF_ERROR(scope.status());
  HOLDFAST_RETURN_IF_ERROR(CheckNotCapturing("order copies on", stream));
  HOLDFAST_RETURN_IF_ERROR(
      Error("order copies on", cudaEventRecord(order_event_, static_cast<cudaStream_t>(stream))));
  return Error("order copies on", cudaStreamWaitEvent(stream_, order_event_, 0));
}

absl::Status Cuda::MakeStreamWait(StreamHandle stream) {
  HOLDFAST_RETURN_IF_ERROR(CheckUsable());
  MutexLock lock(&mutex_);
  HOLDFAST_RETURN_IF_ERROR(lost_);
  Scope scope(driver_, context_, name_);
  HOLDFAST_RETURN_IF_ERROR(scope.status());
  HOLDFAST_RETURN_IF_ERROR(CheckNotCapturing("make a stream wait for", stream));
  HOLDFAST_RETURN_IF_ERROR(Error("make a stream wait for", cudaEventRecord(wait_event_, stream_)));
  return Error("make a stream wait for",
               cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), wait_event_, 0));
}

// ---- Copies.

absl::Status Cuda::CheckOwnMemory(const void* address) {
  cudaPointerAttributes attributes = {};
  HOLDFAST_RETURN_IF_ERROR(
      Error("look up memory on", cudaPointerGetAttributes(&attributes, address)));
  if (attributes.type == cudaMemoryTypeManaged) return absl::OkStatus();
  if (attributes.type == cudaMemoryTypeDevice && attributes.device == ordinal_) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "copy on ", name_, ": the address is ",
      attributes.type == cudaMemoryTypeDevice ? absl::StrCat("memory of cuda:", attributes.device)
                                              : std::string("host memory")));
}

absl::StatusOr<CopyTicket> Cuda::CopyToHost(void* destination, const void* source, size_t bytes) {
  return Copy(destination, source, bytes, cudaMemcpyDeviceToHost);
}

absl::StatusOr<CopyTicket> Cuda::CopyFromHost(void* destination, const void* source, size_t bytes) {
  return Copy(destination, source, bytes, cudaMemcpyHostToDevice);
}

absl::StatusOr<CopyTicket> Cuda::Copy(void* destination, const void* source, size_t bytes,
                                      cudaMemcpyKind kind) {
  HOLDFAST_RETURN_IF_ERROR(CheckUsable());
  if (bytes == 0) return CopyTicket{0};  // An empty tensor may have no address at all.
  const char* const on_device =
      static_cast<const char*>(kind == cudaMemcpyDeviceToHost ? source : destination);
  MutexLock lock(&mutex_);
  HOLDFAST_RETURN_IF_ERROR(lost_);
  Scope scope(driver_, context_, name_);
  HOLDFAST_RETURN_IF_ERROR(scope.status());
  // Check both ends: a length beyond the allocation shows up where the next byte is free.
  HOLDFAST_RETURN_IF_ERROR(CheckOwnMemory(on_device));
  HOLDFAST_RETURN_IF_ERROR(CheckOwnMemory(on_device + bytes - 1));
  HOLDFAST_RETURN_IF_ERROR(
      Error("copy on", cudaMemcpyAsync(destination, source, bytes, kind, stream_)));
  ++issued_;
  TheBook().NoteCopy(kind == cudaMemcpyDeviceToHost ? destination : source, ordinal_, issued_);
  // The copy is under way, so the caller must get its ticket. The copy stays unmarked, and a query
  // of the ticket returns the error again.
  (void)MarkNewest();
  return issued_;
}

absl::Status Cuda::MarkNewest() {
  if (marked_ == issued_ || free_events_.empty()) return absl::OkStatus();
  const cudaEvent_t event = free_events_.front();
  HOLDFAST_RETURN_IF_ERROR(Error("mark a copy on", cudaEventRecord(event, stream_)));
  free_events_.pop_front();
  marks_.push_back({issued_, event});
  marked_ = issued_;
  return absl::OkStatus();
}

absl::Status Cuda::Poll() {
  while (!marks_.empty()) {
    const cudaError_t error = cudaEventQuery(marks_.front().event);
    if (error == cudaErrorNotReady) {
      (void)cudaGetLastError();  // Not an error, but some runtimes latch the code.
      break;
    }
    HOLDFAST_RETURN_IF_ERROR(Error("copy on", error));
    done_ = marks_.front().through;
    free_events_.push_back(marks_.front().event);
    marks_.pop_front();
  }
  return MarkNewest();
}

absl::StatusOr<bool> Cuda::IsDone(CopyTicket ticket) {
  HOLDFAST_RETURN_IF_ERROR(CheckUsable());
  MutexLock lock(&mutex_);
  if (ticket > issued_) {
    return absl::InvalidArgumentError(absl::StrCat(name_, ": no copy ", ticket, " was started"));
  }
  if (ticket <= done_) return true;
  HOLDFAST_RETURN_IF_ERROR(lost_);
  Scope scope(driver_, context_, name_);
  HOLDFAST_RETURN_IF_ERROR(scope.status());
  HOLDFAST_RETURN_IF_ERROR(Poll());
  return ticket <= done_;
}

absl::Status Cuda::Wait(CopyTicket ticket, absl::Duration timeout) {
  // CUDA has no wait with a time-out, so poll: often at first, for short copies, then every half
  // millisecond, at almost no CPU cost.
  const absl::Time deadline = base::Now() + timeout;
  absl::Duration pause = absl::Microseconds(10);
  for (;;) {
    HOLDFAST_ASSIGN_OR_RETURN(const bool done, IsDone(ticket));
    if (done) return absl::OkStatus();
    const absl::Duration left = deadline - base::Now();
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError(absl::StrCat(
          "wait for a copy on ", name_, ": not done in ", absl::FormatDuration(timeout)));
    }
    absl::SleepFor(std::min(pause, left));
    pause = std::min(pause * 2, absl::Microseconds(500));
  }
}

// One Device per ordinal, made at its first use and never destroyed.
absl::StatusOr<Device*> FindOrCreate(int ordinal) {
  struct Devices {
    Mutex mutex;
    std::map<int, Device*> by_ordinal ABSL_GUARDED_BY(mutex);
    base::ForkGuard fork_guard;
  };
  static Devices* const devices = new Devices;
  if (!devices->fork_guard.InCreator()) {
    return absl::FailedPreconditionError("CudaDevice: CUDA cannot be used in a forked child");
  }
  if (g_exiting.load(std::memory_order_relaxed)) {
    return absl::FailedPreconditionError("CudaDevice: the process is exiting");
  }
  MutexLock lock(&devices->mutex);
  if (const auto found = devices->by_ordinal.find(ordinal); found != devices->by_ordinal.end()) {
    return found->second;
  }
  HOLDFAST_ASSIGN_OR_RETURN(Device* const device, Cuda::Create(ordinal));
  devices->by_ordinal[ordinal] = device;
  return device;
}

}  // namespace
}  // namespace holdfast::device

namespace holdfast {

void EnableCuda() { device::SetCudaFactory(&device::FindOrCreate); }

}  // namespace holdfast
