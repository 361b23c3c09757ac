#include "tools/demo/saboteur.h"

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "tools/demo/worker_process.h"

namespace holdfast::demo {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr uint32_t kOverwriteBytesMax = 4096;
constexpr std::chrono::microseconds kPoll{50};
// The victim is published right after the hook has returned.
constexpr milliseconds kPublishTime{20};
constexpr milliseconds kSubmitTimeMax{1000};

/// Runs `step` until it says true or the time is up; whether it did.
template <typename Step>
bool Until(milliseconds time_max, const Step& step) {
  const Clock::time_point end = Clock::now() + time_max;
  while (!step()) {
    if (Clock::now() > end) return false;
  }
  return true;
}

}  // namespace

void Saboteur::Arm(uint32_t victim) {
  Disarm();
  disarmed_ = false;
  hit_ = false;
  ready_ = mischief_ != Mischief::kMutateAndRestore;
  restored_ = false;
  sealed_ = 0;
  bytes_before_ = 0;
  countdown_ = victim;
  if (mischief_ == Mischief::kMutateAndRestore) {
    restorer_ = std::thread([this] { RestoreBehindWorker(); });
  }
}

void Saboteur::Disarm() {
  countdown_ = -1;
  disarmed_ = true;
  if (restorer_.joinable()) restorer_.join();
}

std::string Saboteur::deed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return deed_;
}

void Saboteur::OnSealed(const SealedExtent& extent) {
  if (disarmed_.load() || countdown_.load() < 0) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    bytes_before_ += extent.bytes;
  }
  ++sealed_;
  // Nothing is published before the worker is held still.
  while (!ready_.load() && !disarmed_.load()) std::this_thread::sleep_for(kPoll);
  if (countdown_.fetch_sub(1) == 0) Overwrite(extent);
}

void Saboteur::Overwrite(const SealedExtent& extent) {
  // The end of the extent: tensor bytes also where the extent begins with the file's header.
  const uint32_t bytes = std::clamp(extent.bytes / 16, 1u, kOverwriteBytesMax);
  char* const at = static_cast<char*>(extent.memory) + extent.bytes - bytes;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    at_ = at;
    original_.assign(at, at + bytes);
    const uint64_t begin = extent.file_offset + extent.bytes - bytes;
    deed_ = absl::StrCat("overwrote ", bytes, " sealed bytes of ", extent.file, " [", begin, ", ",
                         begin + bytes, ") in staging memory");
  }
  // Every bit, so that it is a change whatever was there.
  for (uint32_t i = 0; i < bytes; ++i) at[i] = static_cast<char>(~at[i]);
  hit_.store(true, std::memory_order_release);
}

void Saboteur::RestoreBehindWorker() {
  while (sealed_.load() == 0 && !disarmed_.load()) std::this_thread::sleep_for(kPoll);
  const WorkerProcess worker;
  if (!worker.found()) {
    ready_ = true;
    return;
  }
  worker.Stop();
  const uint64_t submitted_before = worker.BytesSubmitted();
  ready_ = true;
  while (!hit_.load(std::memory_order_acquire) && !disarmed_.load()) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  std::this_thread::sleep_for(kPublishTime);
  uint64_t wanted = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    wanted = submitted_before + bytes_before_;
  }
  worker.Continue();
  Until(kSubmitTimeMax, [&] { return disarmed_.load() || worker.BytesSubmitted() >= wanted; });
  worker.Stop();
  std::this_thread::sleep_for(milliseconds(disk_ms_));
  if (hit_.load(std::memory_order_acquire)) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::copy(original_.begin(), original_.end(), at_);
    restored_ = true;
  }
  worker.Continue();
}

}  // namespace holdfast::demo
