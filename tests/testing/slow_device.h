// A fake GPU whose copies end on the test's command, in the test's order.
//
// Its memory is a heap of its own. The device reads and delivers a copy's bytes only at completion,
// like the slowest DMA: a test finds a destination read too early and a source changed too early.
#ifndef HOLDFAST_TESTS_TESTING_SLOW_DEVICE_H_
#define HOLDFAST_TESTS_TESTING_SLOW_DEVICE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "holdfast/device.h"
#include "runtime/base/mutex.h"

namespace holdfast::testing {

/// \threadsafety All methods may be called from any thread.
class SlowDevice final : public Device {
 public:
  enum class Call {
    kRegisterMemory,
    kUnregisterMemory,
    kOrderAfter,
    kCopyToHost,
    kCopyFromHost,
    kIsDone,
    kMakeStreamWait,
  };

  /// A copy in flight.
  struct PendingCopy {
    CopyTicket ticket = 0;
    char* destination = nullptr;
    const char* source = nullptr;
    size_t bytes = 0;
    size_t bytes_arrived = 0;
    bool to_host = true;
  };

  /// One successful call, in order; fields without a value are zero.
  struct LogEntry {
    Call call;
    const void* address = nullptr;
    size_t bytes = 0;
    StreamHandle stream = nullptr;
    CopyTicket ticket = 0;
  };

  explicit SlowDevice(std::string name = "slow:0");
  ~SlowDevice() override;

  // ---- Memory.

  /// Allocates bytes of the device, filled with kFresh. Freed with the device at the latest.
  char* Allocate(size_t bytes);
  /// Overwrites the bytes with kReleased at once and returns them at the next Allocate of that
  /// size, like a hostile caching allocator.
  void Release(char* memory);
  static constexpr char kFresh = static_cast<char>(0xdd);
  static constexpr char kReleased = static_cast<char>(0xee);

  // ---- Ending copies.

  std::vector<PendingCopy> pending() const;
  /// Waits until at least `count` copies are pending; returns false when `timeout` passes first.
  bool WaitForPending(size_t count, absl::Duration timeout) const;
  /// Delivers the copy's bytes and ends the copy, after running the work ordered before the copy.
  void Complete(CopyTicket ticket);
  /// Delivers the first `bytes`; the copy goes on.
  void CompletePart(CopyTicket ticket, size_t bytes);
  /// Ends the copy with an error and half of its bytes, as on a real fault.
  void Fail(CopyTicket ticket, absl::Status status);
  /// Returns false when no copy is pending.
  bool CompleteOldest();
  bool CompleteNewest();
  void CompleteAll();
  void CompleteAllShuffled(uint64_t seed);
  /// Makes later copies end at their start.
  void CompleteAtOnce(bool on);
  /// Starts a thread that ends copies in a random order, until StopCompleter or the destructor.
  void StartCompleter(uint64_t seed);
  void StopCompleter();

  // ---- Errors on demand.

  /// Makes `times` calls of that kind return `status` without effect, after `skip` more calls.
  void FailCall(Call call, absl::Status status, uint32_t skip = 0, uint32_t times = 1);

  // ---- The caller's streams.

  StreamHandle CreateStream();
  /// Queues work, which must not call the device. Null is the default stream.
  void Enqueue(StreamHandle stream, std::function<void()> work);
  /// Runs queued work up to the first wait for a copy in flight. Returns the rest.
  size_t RunStream(StreamHandle stream);

  // ---- Records.

  std::vector<LogEntry> log() const;
  /// Registered ranges by base address.
  std::map<char*, size_t> registered() const;
  /// Copies to unregistered memory: correct, but slow on a real GPU.
  uint64_t copies_unregistered() const;

  // ---- Device.

  std::string name() const override { return name_; }
  bool is_host() const override { return false; }
  absl::Status RegisterMemory(void* base, size_t bytes) override;
  absl::Status UnregisterMemory(void* base, size_t bytes) override;
  absl::Status OrderAfter(StreamHandle stream) override;
  absl::StatusOr<CopyTicket> CopyToHost(void* destination, const void* source,
                                        size_t bytes) override;
  absl::StatusOr<CopyTicket> CopyFromHost(void* destination, const void* source,
                                          size_t bytes) override;
  /// Returns a failed copy's error once; afterwards the copy counts as ended. A caller that drops
  /// the error takes garbage for data.
  absl::StatusOr<bool> IsDone(CopyTicket ticket) override;
  absl::Status Wait(CopyTicket ticket, absl::Duration timeout) override;
  absl::Status MakeStreamWait(StreamHandle stream) override;

 private:
  struct Copy {
    PendingCopy copy;
    std::map<StreamHandle, uint64_t> after;  ///< Stream to required position.
  };
  struct Work {
    std::function<void()> run;      ///< Empty for a wait.
    CopyTicket copies_through = 0;  ///< A wait: copies up to this ticket.
  };
  struct Stream {
    std::vector<Work> work;
    uint64_t done = 0;  ///< Done entries of `work`, from the front.
  };
  struct Planned {
    absl::Status status;
    uint32_t skip = 0;
    uint32_t times = 0;
  };

  absl::Status PlannedError(Call call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsDeviceMemory(const char* begin, size_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsRegistered(const char* begin, size_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<CopyTicket> Start(Call call, void* destination, const void* source, size_t bytes);
  /// Runs `stream` until `position` or until a wait for a copy.
  void RunUntil(Stream* stream, uint64_t position) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Arrive(Copy* copy, size_t through) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void End(CopyTicket ticket, absl::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RunCompleter(uint64_t seed);

  const std::string name_;
  mutable base::Mutex mutex_;
  mutable base::Condition changed_;
  CopyTicket issued_ ABSL_GUARDED_BY(mutex_) = 0;
  bool at_once_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<CopyTicket, Copy> copies_ ABSL_GUARDED_BY(mutex_);
  std::map<CopyTicket, absl::Status> errors_ ABSL_GUARDED_BY(mutex_);
  std::map<StreamHandle, Stream> streams_ ABSL_GUARDED_BY(mutex_);
  std::map<StreamHandle, uint64_t> order_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<char>> stream_names_ ABSL_GUARDED_BY(mutex_);
  std::map<const char*, std::pair<std::unique_ptr<char[]>, size_t>> memory_ ABSL_GUARDED_BY(mutex_);
  std::multimap<size_t, char*> free_ ABSL_GUARDED_BY(mutex_);
  std::map<char*, size_t> registered_ ABSL_GUARDED_BY(mutex_);
  std::map<Call, Planned> planned_ ABSL_GUARDED_BY(mutex_);
  std::vector<LogEntry> log_ ABSL_GUARDED_BY(mutex_);
  uint64_t copies_unregistered_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stop_completer_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread completer_;
};

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_TESTING_SLOW_DEVICE_H_
