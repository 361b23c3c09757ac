#include "tools/trainer/late_device.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace holdfast::trainer {

absl::StatusOr<CopyTicket> LateDevice::CopyToHost(void* destination, const void* source,
                                                  size_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::chrono::microseconds delay(random_() % static_cast<uint64_t>(delay_max_.count() + 1));
  copies_[++started_] = {destination, source, bytes, Clock::now() + delay,
                         std::exchange(on_next_lost_, nullptr)};
  return started_;
}

absl::StatusOr<CopyTicket> LateDevice::CopyFromHost(void* destination, const void* source,
                                                    size_t bytes) {
  std::memcpy(destination, source, bytes);
  return CopyTicket{0};
}

void LateDevice::RunDue(Clock::time_point now) {
  std::erase_if(copies_, [this, now](const auto& entry) {
    const Copy& copy = entry.second;
    if (copy.due > now) return false;
    if (copy.on_lost != nullptr) {
      lost_[entry.first] = copy.on_lost;
    } else {
      std::memcpy(copy.destination, copy.source, copy.bytes);
    }
    return true;
  });
}

void LateDevice::LoseNext(std::function<void()> on_lost) {
  const std::lock_guard lock(mutex_);
  on_next_lost_ = std::move(on_lost);
}

absl::StatusOr<bool> LateDevice::IsDone(CopyTicket ticket) {
  std::unique_lock lock(mutex_);
  RunDue(Clock::now());
  const auto lost = lost_.extract(ticket);
  if (lost.empty()) return !copies_.contains(ticket);
  lock.unlock();
  lost.mapped()();
  return absl::InternalError(absl::StrCat(name(), ": copy ", ticket, " is lost"));
}

absl::Status LateDevice::Wait(CopyTicket ticket, absl::Duration timeout) {
  const absl::Time end = absl::Now() + timeout;
  while (true) {
    const auto done = IsDone(ticket);
    if (!done.ok()) return done.status();
    if (*done) return absl::OkStatus();
    if (absl::Now() >= end)
      return absl::DeadlineExceededError(absl::StrCat(name(), ": copy ", ticket, " goes on"));
    absl::SleepFor(absl::Milliseconds(1));
  }
}

absl::Status LateDevice::MakeStreamWait(StreamHandle) {
  const std::lock_guard lock(mutex_);
  RunDue(Clock::time_point::max());
  return absl::OkStatus();
}

}  // namespace holdfast::trainer
