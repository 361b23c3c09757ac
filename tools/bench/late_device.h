// A stand-in for an accelerator: its copies are made by somebody else, later.
#ifndef HOLDFAST_TOOLS_BENCH_LATE_DEVICE_H_
#define HOLDFAST_TOOLS_BENCH_LATE_DEVICE_H_

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>

#include "holdfast/device.h"

namespace holdfast::bench {

/// Copies in the order of their tickets, in a thread of its own, as the copy engine of a GPU does.
class LateDevice : public Device {
 public:
  LateDevice() : thread_([this] { Run(); }) {}
  ~LateDevice() override;

  std::string name() const override { return "late:0"; }
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
  struct Copy {
    void* destination;
    const void* source;
    size_t bytes;
  };
  void Run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Copy> copies_;
  CopyTicket started_ = 0;  // The ticket of the newest copy.
  CopyTicket done_ = 0;     // Of the last one that has ended.
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace holdfast::bench

#endif  // HOLDFAST_TOOLS_BENCH_LATE_DEVICE_H_
