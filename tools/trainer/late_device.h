// A stand-in for a GPU: its copies read their source some time after their start, in any order.
#ifndef HOLDFAST_TOOLS_TRAINER_LATE_DEVICE_H_
#define HOLDFAST_TOOLS_TRAINER_LATE_DEVICE_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <string>

#include "holdfast/device.h"

namespace holdfast::trainer {

/// Host memory behind a queue of late copies, as slow_device.py. A copy that is due runs when its
/// end is asked for; a stream that is made to wait finds all copies done, as the next kernel would.
///
/// \threadsafety All methods may be called from any thread.
class LateDevice final : public Device {
 public:
  /// A copy is due between its start and `delay_max` later. `seed`: of these times.
  explicit LateDevice(uint64_t seed,
                      std::chrono::microseconds delay_max = std::chrono::milliseconds(20))
      : random_(seed), delay_max_(delay_max) {}

  std::string name() const override { return "stand-in:0"; }
  bool is_host() const override { return false; }
  absl::Status RegisterMemory(void*, size_t) override { return absl::OkStatus(); }
  absl::Status UnregisterMemory(void*, size_t) override { return absl::OkStatus(); }
  absl::Status OrderAfter(StreamHandle) override { return absl::OkStatus(); }
  absl::StatusOr<CopyTicket> CopyToHost(void* destination, const void* source,
                                        size_t bytes) override;
  absl::StatusOr<CopyTicket> CopyFromHost(void* destination, const void* source,
                                          size_t bytes) override;
  absl::StatusOr<bool> IsDone(CopyTicket ticket) override;
  absl::Status Wait(CopyTicket ticket, absl::Duration timeout) override;
  absl::Status MakeStreamWait(StreamHandle) override;

  /// Loses the copy that is started next: its end is an error, before which `on_lost` is called,
  /// and no byte was copied. Null: loses none.
  void LoseNext(std::function<void()> on_lost);

 private:
  using Clock = std::chrono::steady_clock;

  struct Copy {
    void* destination = nullptr;
    const void* source = nullptr;
    size_t bytes = 0;
    Clock::time_point due;
    std::function<void()> on_lost;  // null: the copy is not lost
  };

  /// Runs what is due. `mutex_` must be held.
  void RunDue(Clock::time_point now);

  std::mutex mutex_;
  std::mt19937_64 random_;
  const std::chrono::microseconds delay_max_;
  CopyTicket started_ = 0;
  std::map<CopyTicket, Copy> copies_;
  std::map<CopyTicket, std::function<void()>> lost_;  // which have ended
  std::function<void()> on_next_lost_;
};

}  // namespace holdfast::trainer

#endif  // HOLDFAST_TOOLS_TRAINER_LATE_DEVICE_H_
