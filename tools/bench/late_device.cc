#include "tools/bench/late_device.h"

#include <cstring>

namespace holdfast::bench {

LateDevice::~LateDevice() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

absl::Status LateDevice::RegisterMemory(void*, size_t) { return absl::OkStatus(); }
absl::Status LateDevice::UnregisterMemory(void*, size_t) { return absl::OkStatus(); }
absl::Status LateDevice::OrderAfter(StreamHandle) { return absl::OkStatus(); }
absl::Status LateDevice::MakeStreamWait(StreamHandle) { return absl::OkStatus(); }

absl::StatusOr<CopyTicket> LateDevice::CopyToHost(void* destination, const void* source,
                                                  size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  copies_.push_back({destination, source, bytes});
  changed_.notify_all();
  return ++started_;
}

absl::StatusOr<CopyTicket> LateDevice::CopyFromHost(void* destination, const void* source,
                                                    size_t bytes) {
  return CopyToHost(destination, source, bytes);
}

absl::StatusOr<bool> LateDevice::IsDone(CopyTicket ticket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return done_ >= ticket;
}

absl::Status LateDevice::Wait(CopyTicket ticket, absl::Duration timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  const bool done = changed_.wait_for(lock, absl::ToChronoNanoseconds(timeout),
                                      [this, ticket] { return done_ >= ticket; });
  return done ? absl::OkStatus() : absl::DeadlineExceededError("the copy goes on");
}

void LateDevice::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !copies_.empty(); });
    if (copies_.empty()) return;
    const Copy copy = copies_.front();
    copies_.pop_front();
    lock.unlock();
    std::memcpy(copy.destination, copy.source, copy.bytes);
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
}

}  // namespace holdfast::bench
