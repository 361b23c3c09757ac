// A stand-in for a GPU whose copies end when the test says so, in the order that the test says.
//
// Its memory is a heap of its own and a copy's bytes are read and arrive only at completion, like
// DMA at its latest: whoever reads the destination, or changes the source, too early is found out.
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

  /// A copy that has been started and has not ended.
  struct PendingCopy {
    CopyTicket ticket = 0;
    char* destination = nullptr;
    const char* source = nullptr;
    size_t bytes = 0;
    size_t bytes_arrived = 0;
    bool to_host = true;
  };

  /// One successful call, in order; fields that the call does not have are zero.
  struct LogEntry {
    Call call;
    const void* address = nullptr;
    size_t bytes = 0;
    StreamHandle stream = nullptr;
    CopyTicket ticket = 0;
  };

  explicit SlowDevice(std::string name = "slow:0");
  ~SlowDevice() override;

  // ---- Its memory.

  /// Bytes of the device, filled with kFresh. Freed with the device at the latest.
  char* Allocate(size_t bytes);
  /// Overwrites with kReleased at once and hands the bytes out again at the next Allocate of that
  /// size: as hostile as a caching allocator can be.
  void Release(char* memory);
  static constexpr char kFresh = static_cast<char>(0xdd);
  static constexpr char kReleased = static_cast<char>(0xee);

  // ---- Ending copies.

  std::vector<PendingCopy> pending() const;
  /// Waits until at least `count` copies are pending; false when `timeout` passes first.
  bool WaitForPending(size_t count, absl::Duration timeout) const;
  /// The copy's bytes arrive now, and it ends. Work that the copy was ordered after runs first.
  void Complete(CopyTicket ticket);
  /// The first `bytes` arrive; the copy goes on.
  void CompletePart(CopyTicket ticket, size_t bytes);
  /// The copy ends with an error. Half of its bytes arrive, as on a real fault.
  void Fail(CopyTicket ticket, absl::Status status);
  /// False when nothing is pending.
  bool CompleteOldest();
  bool CompleteNewest();
  void CompleteAll();
  void CompleteAllShuffled(uint64_t seed);
  /// From now on copies end as they are started.
  void CompleteAtOnce(bool on);
  /// A thread of its own ends copies in a random order, until StopCompleter or the destructor.
  void StartCompleter(uint64_t seed);
  void StopCompleter();

  // ---- Errors on demand.

  /// After `skip` more calls of that kind, the next `times` return `status` and do nothing.
  void FailCall(Call call, absl::Status status, uint32_t skip = 0, uint32_t times = 1);

  // ---- The caller's streams.

  StreamHandle CreateStream();
  /// Queues work; it must not call the device. Null is the default stream.
  void Enqueue(StreamHandle stream, std::function<void()> work);
  /// Runs queued work up to the first wait for a copy that has not ended. Returns what is left.
  size_t RunStream(StreamHandle stream);

  // ---- What happened.

  std::vector<LogEntry> log() const;
  /// Registered ranges by base address.
  std::map<char*, size_t> registered() const;
  /// Copies to memory that was not registered then: right, but slow on a real GPU.
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
  /// A failed copy's error is returned once; asked again, the copy counts as ended. (Whoever drops
  /// the first answer takes garbage for data.)
  absl::StatusOr<bool> IsDone(CopyTicket ticket) override;
  absl::Status Wait(CopyTicket ticket, absl::Duration timeout) override;
  absl::Status MakeStreamWait(StreamHandle stream) override;

 private:
  struct Copy {
    PendingCopy copy;
    std::map<StreamHandle, uint64_t> after;  ///< Stream to the position that must have run.
  };
  struct Work {
    std::function<void()> run;      ///< Empty for a wait.
    CopyTicket copies_through = 0;  ///< A wait: all copies up to this one.
  };
  struct Stream {
    std::vector<Work> work;
    uint64_t done = 0;  ///< Of `work`, from its front.
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
  /// Runs `stream` until `position` or until it has to wait for a copy.
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
