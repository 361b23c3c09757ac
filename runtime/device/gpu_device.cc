// A GPU as a device, over the driver's table of calls. Host code only, no kernels.
//
// - A single non-blocking stream per device carries every copy, so that copies end in the order of
//   their start. A ticket is a copy's ordinal; a bounded ring of events shows the progress of the
//   stream. When the ring is full a copy gets no event and is covered by a later one.
// - Every call runs in the device's primary context; afterwards the calling thread has the former
//   context, or no context, again. A context left behind on the first GPU takes half a gigabyte for
//   each rank of a node.
// - Every call runs in relaxed capture mode: a query or a registration must not break a graph that
//   another thread captures at that moment.
#include "runtime/device/gpu_device.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <deque>
#include <iterator>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "runtime/base/clock.h"
#include "runtime/base/status.h"

namespace holdfast::device {
namespace {

using base::Mutex;
using base::MutexLock;

constexpr size_t kEventsMax = 256;

// True once exit handlers run. An earlier handler may have torn the driver down, and a call then
// crashes. relaxed: the flag is set and read on its own.
std::atomic<bool> g_exiting{false};

// Keeps calls of the driver out of forked children, where the driver's state is undefined, and out
// of exit.
absl::Status CheckProcess(const base::ForkGuard& guard, const std::string& name) {
  if (!guard.InCreator()) {
    return absl::FailedPreconditionError(
        absl::StrCat(name, ": a GPU cannot be used in a forked child"));
  }
  if (g_exiting.load(std::memory_order_relaxed)) {
    return absl::FailedPreconditionError(absl::StrCat(name, ": the process is exiting"));
  }
  return absl::OkStatus();
}

GpuAddress AddressOf(const void* memory) { return reinterpret_cast<GpuAddress>(memory); }

// Clears the error latched by HIP for an expected result.
void Ignore(const GpuCalls& calls) {
  if (calls.last_error != nullptr) (void)calls.last_error();
}

// Puts this thread in a device's context during the scope, without breaking captures of
// other threads.
class Scope {
 public:
  Scope(const GpuCalls& calls, GpuContext context, int ordinal)
      : calls_(calls), code_(Enter(context, ordinal)) {
    if (code_ != GpuCode::kSuccess) return;
    code_ = calls_.exchange_capture_mode(&mode_);
    relaxed_ = code_ == GpuCode::kSuccess;
  }
  ~Scope() {
    if (relaxed_) (void)calls_.exchange_capture_mode(&mode_);
    GpuContext popped = nullptr;
    if (!entered_) return;
    if (calls_.api == GpuApi::kCuda) {
      (void)calls_.context_pop(&popped);
    } else {
      (void)calls_.set_device(former_);
    }
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  GpuCode code() const { return code_; }

 private:
  GpuCode Enter(GpuContext context, int ordinal) {
    GpuCode code = GpuCode::kSuccess;
    if (calls_.api == GpuApi::kCuda) {
      code = calls_.context_push(context);
    } else {
      code = calls_.current_device(&former_);
      if (code == GpuCode::kSuccess) code = calls_.set_device(ordinal);
    }
    entered_ = code == GpuCode::kSuccess;
    return code;
  }

  const GpuCalls& calls_;
  int former_ = 0;
  int mode_ = kCaptureModeRelaxed;
  bool entered_ = false;
  bool relaxed_ = false;
  GpuCode code_;
};

class Gpu final : public Device {
 public:
  static absl::StatusOr<Device*> Make(const GpuCalls& calls, HostRanges* host_ranges, int ordinal);

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
    GpuEvent event = nullptr;
  };

  Gpu(const GpuCalls& calls, HostRanges* host_ranges, int ordinal, GpuContext context)
      : ordinal_(ordinal),
        name_(absl::StrCat(NameOf(calls.api), ":", ordinal)),
        calls_(calls),
        context_(context),
        host_ranges_(*host_ranges) {}

  absl::Status SetUp();
  absl::Status CheckUsable() const { return CheckProcess(fork_guard_, name_); }
  absl::Status Error(const char* operation, GpuCode code) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Makes `then` wait, by `event`, for what `first` has queued; `caller` is one of them.
  absl::Status Follow(const char* operation, GpuStream caller, GpuEvent event, GpuStream first,
                      GpuStream then) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckNotCapturing(const char* operation, GpuStream stream)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckOwnMemory(const void* address) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// `start` queues the copy on the stream of copies.
  template <typename Start>
  absl::StatusOr<CopyTicket> Copy(const void* on_device, const void* host, size_t bytes,
                                  Start start);
  /// Records an event behind the newest copy, if the copy has none and an event is free.
  absl::Status MarkNewest() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Updates the progress of the stream.
  absl::Status Poll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int ordinal_;
  const std::string name_;
  const GpuCalls calls_;
  const GpuContext context_;  ///< Null for HIP.
  const base::ForkGuard fork_guard_;
  HostRanges& host_ranges_;
  Mutex mutex_;
  GpuStream stream_ ABSL_GUARDED_BY(mutex_) = nullptr;
  // A wait refers to the newest record at the time of its queueing, so one event serves all waits.
  GpuEvent order_event_ ABSL_GUARDED_BY(mutex_) = nullptr;
  GpuEvent wait_event_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::deque<GpuEvent> free_events_ ABSL_GUARDED_BY(mutex_);
  std::deque<Mark> marks_ ABSL_GUARDED_BY(mutex_);  ///< Oldest first.
  CopyTicket issued_ ABSL_GUARDED_BY(mutex_) = 0;   ///< The newest copy.
  CopyTicket marked_ ABSL_GUARDED_BY(mutex_) = 0;   ///< The newest copy with an event behind it.
  CopyTicket done_ ABSL_GUARDED_BY(mutex_) = 0;     ///< Copies up to this ticket have ended.
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);       ///< Why the context is lost; OK before.
};

// Every public method but the end of a finished copy begins so, with the lock held.
#define HOLDFAST_ENTER_DEVICE(operation)         \
  HOLDFAST_RETURN_IF_ERROR(lost_);               \
  const Scope scope(calls_, context_, ordinal_); \
  HOLDFAST_RETURN_IF_ERROR(Error(operation, scope.code()))

absl::StatusOr<Device*> Gpu::Make(const GpuCalls& calls, HostRanges* host_ranges, int ordinal) {
  const std::string name = absl::StrCat(NameOf(calls.api), ":", ordinal);
  int count = 0;
  HOLDFAST_RETURN_IF_ERROR(ToStatus(calls, "find", name, calls.device_count(&count)));
  if (ordinal < 0 || ordinal >= count) {
    return absl::NotFoundError(
        absl::StrCat("find ", name, ": the driver shows ", count, " device(s) to this process"));
  }
  GpuContext context = nullptr;
  if (calls.api == GpuApi::kCuda) {
    int device = 0;
    HOLDFAST_RETURN_IF_ERROR(ToStatus(calls, "find", name, calls.device_get(&device, ordinal)));
    // Never released: the device lives as long as the process, and exit code must not call the
    // driver.
    HOLDFAST_RETURN_IF_ERROR(
        ToStatus(calls, "open the context of", name, calls.context_retain(&context, device)));
  }
  // Registered after the driver's setup, so that this handler runs before its teardown.
  static const int registered =
      std::atexit([] { g_exiting.store(true, std::memory_order_relaxed); });
  if (registered != 0) return absl::ResourceExhaustedError("no exit handler left");
  std::unique_ptr<Gpu> gpu(new Gpu(calls, host_ranges, ordinal, context));
  HOLDFAST_RETURN_IF_ERROR(gpu->SetUp());
  return gpu.release();
}

absl::Status Gpu::SetUp() {
  MutexLock lock(&mutex_);
  HOLDFAST_ENTER_DEVICE("enter");
  // Non-blocking: else work on the legacy default stream would wait for every copy.
  HOLDFAST_RETURN_IF_ERROR(
      Error("make a stream on", calls_.stream_create(&stream_, kStreamNonBlocking)));
  for (size_t i = 0; i < kEventsMax + 2; ++i) {
    GpuEvent event = nullptr;
    // Without timing: cheaper.
    HOLDFAST_RETURN_IF_ERROR(
        Error("make an event on", calls_.event_create(&event, kEventDisableTiming)));
    free_events_.push_back(event);
  }
  order_event_ = free_events_.front();
  free_events_.pop_front();
  wait_event_ = free_events_.front();
  free_events_.pop_front();
  return absl::OkStatus();
}

absl::Status Gpu::Error(const char* operation, GpuCode code) {
  absl::Status status = ToStatus(calls_, operation, name_, code);
  if (IsFatal(code) && lost_.ok()) {
    // Returned from the next call on; the current call returns the fault itself, once.
    lost_ = absl::AbortedError(
        absl::StrCat(name_, " is unusable since an earlier fault: ", status.message()));
  }
  return status;
}

absl::Status Gpu::CheckNotCapturing(const char* operation, GpuStream stream) {
  int capturing = kNotCapturing;
  const GpuCode code = calls_.stream_is_capturing(stream, &capturing);
  // Of the default stream: another stream is capturing that work here would join.
  const bool implicit = code == GpuCode::kStreamCaptureImplicit;
  if (implicit) {
    Ignore(calls_);
  } else {
    HOLDFAST_RETURN_IF_ERROR(Error(operation, code));
  }
  // An event recorded on a capturing stream would pull the copy stream into the graph.
  if (implicit || capturing != kNotCapturing) {
    return absl::FailedPreconditionError(
        absl::StrCat(operation, " ", name_, ": the stream is capturing a graph"));
  }
  return absl::OkStatus();
}

// ---- Registration.

absl::Status Gpu::RegisterMemory(void* base, size_t bytes) {
  constexpr char kOperation[] = "register memory on";
  HOLDFAST_RETURN_IF_ERROR(CheckUsable());
  if (base == nullptr || bytes == 0) {
    return absl::InvalidArgumentError(absl::StrCat(kOperation, " ", name_, ": empty range"));
  }
  char* const begin = static_cast<char*>(base);
  MutexLock lock(&mutex_);
  HOLDFAST_RETURN_IF_ERROR(lost_);
  MutexLock ranges_lock(&host_ranges_.mutex);
  auto& ranges = host_ranges_.ranges;
  const auto next = ranges.upper_bound(begin);
  bool overlaps = next != ranges.end() && next->first < begin + bytes;
  if (next != ranges.begin()) {
    auto& [other, range] = *std::prev(next);
    if (other == begin && range.bytes == bytes) {
      range.newest_copy.try_emplace(ordinal_, CopyTicket{0});
      return absl::OkStatus();
    }
    overlaps = overlaps || other + range.bytes > begin;
  }
  if (overlaps) {
    return absl::InvalidArgumentError(
        absl::StrCat(kOperation, " ", name_, ": it overlaps a range that is registered already"));
  }
  HOLDFAST_ENTER_DEVICE(kOperation);
  const GpuCode code =
      calls_.host_register(base, bytes, kHostRegisterPortable | kHostRegisterMapped);
  const bool foreign = code == GpuCode::kHostMemoryAlreadyRegistered;
  if (foreign) {
    Ignore(calls_);
  } else {
    HOLDFAST_RETURN_IF_ERROR(Error(kOperation, code));
  }
  ranges[begin] = {bytes, foreign, {{ordinal_, CopyTicket{0}}}};
  return absl::OkStatus();
}

absl::Status Gpu::UnregisterMemory(void* base, size_t bytes) {
  constexpr char kOperation[] = "unregister memory of";
  HOLDFAST_RETURN_IF_ERROR(CheckUsable());
  MutexLock lock(&mutex_);
  HOLDFAST_ENTER_DEVICE(kOperation);
  HOLDFAST_RETURN_IF_ERROR(Poll());
  MutexLock ranges_lock(&host_ranges_.mutex);
  auto& ranges = host_ranges_.ranges;
  const auto found = ranges.find(static_cast<char*>(base));
  if (found == ranges.end() || found->second.bytes != bytes ||
      found->second.newest_copy.count(ordinal_) == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(kOperation, " ", name_, ": that range is not registered"));
  }
  HostRanges::Range& range = found->second;
  if (range.newest_copy[ordinal_] > done_) {
    return absl::FailedPreconditionError(
        absl::StrCat(kOperation, " ", name_, ": copies of that range are under way"));
  }
  if (range.newest_copy.size() > 1) {
    range.newest_copy.erase(ordinal_);
    return absl::OkStatus();
  }
  const bool foreign = range.foreign;
  // Erased first, and also on failure: the state after a failed unregister is unknown, so no device
  // may use the range, and the caller quarantines the range.
  ranges.erase(found);
  if (foreign) {
    return absl::FailedPreconditionError(
        absl::StrCat(kOperation, " ", name_, ": registered outside Holdfast, may be in use"));
  }
  return Error(kOperation, calls_.host_unregister(base));
}

// ---- Order between streams.

absl::Status Gpu::OrderAfter(StreamHandle stream) {
  GpuStream const caller = static_cast<GpuStream>(stream);
  HOLDFAST_RETURN_IF_ERROR(CheckUsable());
  MutexLock lock(&mutex_);
  return Follow("order copies on", caller, order_event_, caller, stream_);
}

absl::Status Gpu::MakeStreamWait(StreamHandle stream) {
  GpuStream const caller = static_cast<GpuStream>(stream);
  HOLDFAST_RETURN_IF_ERROR(CheckUsable());
  MutexLock lock(&mutex_);
  return Follow("make a stream wait for", caller, wait_event_, stream_, caller);
}

absl::Status Gpu::Follow(const char* operation, GpuStream caller, GpuEvent event, GpuStream first,
                         GpuStream then) {
  HOLDFAST_ENTER_DEVICE(operation);
  HOLDFAST_RETURN_IF_ERROR(CheckNotCapturing(operation, caller));
  HOLDFAST_RETURN_IF_ERROR(Error(operation, calls_.event_record(event, first)));
  return Error(operation, calls_.stream_wait_event(then, event, 0));
}

// ---- Copies.

absl::Status Gpu::CheckOwnMemory(const void* address) {
  unsigned type = 0;
  unsigned managed = 0;
  int owner = -1;
  int attributes[] = {kAttributeMemoryType, kAttributeIsManaged, kAttributeDeviceOrdinal};
  void* values[] = {&type, &managed, &owner};
  const GpuCode code =
      calls_.pointer_attributes(std::size(attributes), attributes, values, AddressOf(address));
  HOLDFAST_RETURN_IF_ERROR(Error("look up memory on", code));
  if (managed != 0) return absl::OkStatus();
  const bool on_device = type == kMemoryTypeDevice;
  if (on_device && owner == ordinal_) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "copy on ", name_, ": the address is ",
      on_device ? absl::StrCat("memory of ", NameOf(calls_.api), ":", owner) : "host memory"));
}

absl::StatusOr<CopyTicket> Gpu::CopyToHost(void* destination, const void* source, size_t bytes) {
  return Copy(source, destination, bytes, [&](GpuStream stream) {
    return calls_.copy_to_host(destination, AddressOf(source), bytes, stream);
  });
}

absl::StatusOr<CopyTicket> Gpu::CopyFromHost(void* destination, const void* source, size_t bytes) {
  return Copy(destination, source, bytes, [&](GpuStream stream) {
    return calls_.copy_from_host(AddressOf(destination), source, bytes, stream);
  });
}

template <typename Start>
absl::StatusOr<CopyTicket> Gpu::Copy(const void* on_device, const void* host, size_t bytes,
                                     Start start) {
  HOLDFAST_RETURN_IF_ERROR(CheckUsable());
  if (bytes == 0) return CopyTicket{0};  // An empty tensor may have no address at all.
  MutexLock lock(&mutex_);
  HOLDFAST_ENTER_DEVICE("copy on");
  // Check both ends: a length beyond the allocation shows up where the next byte is free.
  HOLDFAST_RETURN_IF_ERROR(CheckOwnMemory(on_device));
  HOLDFAST_RETURN_IF_ERROR(CheckOwnMemory(static_cast<const char*>(on_device) + bytes - 1));
  HOLDFAST_RETURN_IF_ERROR(Error("copy on", start(stream_)));
  ++issued_;
  host_ranges_.NoteCopy(host, ordinal_, issued_);
  // The copy is under way, so the caller must get its ticket. The copy stays unmarked, and a query
  // of the ticket returns the error again.
  (void)MarkNewest();
  return issued_;
}

absl::Status Gpu::MarkNewest() {
  if (marked_ == issued_ || free_events_.empty()) return absl::OkStatus();
  GpuEvent const event = free_events_.front();
  HOLDFAST_RETURN_IF_ERROR(Error("mark a copy on", calls_.event_record(event, stream_)));
  free_events_.pop_front();
  marks_.push_back({issued_, event});
  marked_ = issued_;
  return absl::OkStatus();
}

absl::Status Gpu::Poll() {
  while (!marks_.empty()) {
    const GpuCode code = calls_.event_query(marks_.front().event);
    if (code == GpuCode::kNotReady) {
      Ignore(calls_);
      break;
    }
    HOLDFAST_RETURN_IF_ERROR(Error("copy on", code));
    done_ = marks_.front().through;
    free_events_.push_back(marks_.front().event);
    marks_.pop_front();
  }
  return MarkNewest();
}

absl::StatusOr<bool> Gpu::IsDone(CopyTicket ticket) {
  HOLDFAST_RETURN_IF_ERROR(CheckUsable());
  MutexLock lock(&mutex_);
  if (ticket > issued_) {
    return absl::InvalidArgumentError(absl::StrCat(name_, ": no copy ", ticket, " was started"));
  }
  if (ticket <= done_) return true;
  HOLDFAST_ENTER_DEVICE("copy on");
  HOLDFAST_RETURN_IF_ERROR(Poll());
  return ticket <= done_;
}

absl::Status Gpu::Wait(CopyTicket ticket, absl::Duration timeout) {
  // A driver has no wait with a time-out, so poll: often at first, for short copies, then every
  // half millisecond, at almost no CPU cost.
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

#undef HOLDFAST_ENTER_DEVICE

}  // namespace

void HostRanges::NoteCopy(const void* host, int ordinal, CopyTicket ticket) {
  const char* const address = static_cast<const char*>(host);
  MutexLock lock(&mutex);
  auto next = ranges.upper_bound(const_cast<char*>(address));
  if (next == ranges.begin()) return;
  auto& [begin, range] = *std::prev(next);
  if (address >= begin + range.bytes) return;
  const auto device = range.newest_copy.find(ordinal);
  if (device != range.newest_copy.end()) device->second = ticket;
}

absl::StatusOr<Device*> GpuDevices::Find(int ordinal) {
  HOLDFAST_RETURN_IF_ERROR(
      CheckProcess(fork_guard_, absl::StrCat("find ", NameOf(api_), ":", ordinal)));
  MutexLock lock(&mutex_);
  if (const auto found = by_ordinal_.find(ordinal); found != by_ordinal_.end()) {
    return found->second;
  }
  HOLDFAST_ASSIGN_OR_RETURN(Device* const device, Make(ordinal));
  by_ordinal_[ordinal] = device;
  return device;
}

absl::StatusOr<Device*> GpuDevices::Make(int ordinal) {
  if (!calls_.has_value()) {
    HOLDFAST_ASSIGN_OR_RETURN(const GpuCalls calls, FindGpuCalls(api_, library_));
    HOLDFAST_RETURN_IF_ERROR(ToStatus(
        calls, "start", absl::StrCat("the driver of ", NameOf(api_), " devices"), calls.init(0)));
    calls_ = calls;
  }
  return Gpu::Make(*calls_, &host_ranges_, ordinal);
}

}  // namespace holdfast::device

namespace holdfast {

absl::StatusOr<Device*> CudaDevice(int ordinal) {
  static device::GpuDevices* const devices = new device::GpuDevices(device::GpuApi::kCuda);
  return devices->Find(ordinal);
}

absl::StatusOr<Device*> HipDevice(int ordinal) {
  static device::GpuDevices* const devices = new device::GpuDevices(device::GpuApi::kHip);
  return devices->Find(ordinal);
}

}  // namespace holdfast
