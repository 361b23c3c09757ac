// See slow_device.h.
#include "tests/testing/slow_device.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/base/check.h"
#include "runtime/base/clock.h"

namespace holdfast::testing {

using base::MutexLock;

SlowDevice::SlowDevice(std::string name) : name_(std::move(name)) {}

SlowDevice::~SlowDevice() { StopCompleter(); }

// ---- Memory.

char* SlowDevice::Allocate(size_t bytes) {
  MutexLock lock(&mutex_);
  if (auto reused = free_.find(bytes); reused != free_.end()) {
    char* const memory = reused->second;
    free_.erase(reused);
    return memory;
  }
  auto memory = std::make_unique<char[]>(std::max<size_t>(bytes, 1));
  char* const begin = memory.get();
  std::memset(begin, kFresh, bytes);
  memory_[begin] = {std::move(memory), bytes};
  return begin;
}

void SlowDevice::Release(char* memory) {
  MutexLock lock(&mutex_);
  const auto found = memory_.find(memory);
  HOLDFAST_CHECK(found != memory_.end(), "released memory that this device never handed out");
  std::memset(memory, kReleased, found->second.second);
  free_.emplace(found->second.second, memory);
}

bool SlowDevice::IsDeviceMemory(const char* begin, size_t bytes) const {
  auto after = memory_.upper_bound(begin);
  if (after == memory_.begin()) return false;
  const auto& [base, block] = *--after;
  return static_cast<size_t>(begin - base) <= block.second &&
         bytes <= block.second - static_cast<size_t>(begin - base);
}

bool SlowDevice::IsRegistered(const char* begin, size_t bytes) const {
  for (const auto& [base, size] : registered_) {
    if (begin >= base && begin + bytes <= base + size) return true;
  }
  return false;
}

// ---- Ending copies.

std::vector<SlowDevice::PendingCopy> SlowDevice::pending() const {
  MutexLock lock(&mutex_);
  std::vector<PendingCopy> result;
  for (const auto& [ticket, copy] : copies_) result.push_back(copy.copy);
  return result;
}

bool SlowDevice::WaitForPending(size_t count, absl::Duration timeout) const {
  const absl::Time deadline = base::Now() + timeout;
  MutexLock lock(&mutex_);
  while (copies_.size() < count) {
    if (!changed_.WaitUntil(&mutex_, deadline)) return copies_.size() >= count;
  }
  return true;
}

void SlowDevice::RunUntil(Stream* stream, uint64_t position) {
  while (stream->done < position) {
    Work& work = stream->work[stream->done];
    if (work.run) {
      work.run();
    } else if (!copies_.empty() && copies_.begin()->first <= work.copies_through) {
      return;  // Waits for a copy in flight.
    }
    ++stream->done;
  }
}

void SlowDevice::Arrive(Copy* copy, size_t through) {
  for (const auto& [handle, position] : copy->after) {
    Stream& stream = streams_[handle];
    RunUntil(&stream, position);
    HOLDFAST_CHECK(stream.done >= position,
                   "a copy ends that is ordered after work which waits for another pending copy");
  }
  PendingCopy& state = copy->copy;
  through = std::min(through, state.bytes);
  if (through <= state.bytes_arrived) return;
  std::memcpy(state.destination + state.bytes_arrived, state.source + state.bytes_arrived,
              through - state.bytes_arrived);
  state.bytes_arrived = through;
}

void SlowDevice::End(CopyTicket ticket, absl::Status status) {
  const auto found = copies_.find(ticket);
  HOLDFAST_CHECK(found != copies_.end(), "no such pending copy");
  Arrive(&found->second, status.ok() ? found->second.copy.bytes : found->second.copy.bytes / 2);
  if (!status.ok()) errors_[ticket] = std::move(status);
  copies_.erase(found);
  changed_.NotifyAll();
}

void SlowDevice::Complete(CopyTicket ticket) {
  MutexLock lock(&mutex_);
  End(ticket, absl::OkStatus());
}

void SlowDevice::CompletePart(CopyTicket ticket, size_t bytes) {
  MutexLock lock(&mutex_);
  const auto found = copies_.find(ticket);
  HOLDFAST_CHECK(found != copies_.end(), "no such pending copy");
  Arrive(&found->second, bytes);
}

void SlowDevice::Fail(CopyTicket ticket, absl::Status status) {
  MutexLock lock(&mutex_);
  End(ticket, std::move(status));
}

bool SlowDevice::CompleteOldest() {
  MutexLock lock(&mutex_);
  if (copies_.empty()) return false;
  End(copies_.begin()->first, absl::OkStatus());
  return true;
}

bool SlowDevice::CompleteNewest() {
  MutexLock lock(&mutex_);
  if (copies_.empty()) return false;
  End(copies_.rbegin()->first, absl::OkStatus());
  return true;
}

void SlowDevice::CompleteAll() {
  MutexLock lock(&mutex_);
  while (!copies_.empty()) End(copies_.begin()->first, absl::OkStatus());
}

void SlowDevice::CompleteAllShuffled(uint64_t seed) {
  MutexLock lock(&mutex_);
  std::vector<CopyTicket> tickets;
  for (const auto& [ticket, copy] : copies_) tickets.push_back(ticket);
  std::shuffle(tickets.begin(), tickets.end(), std::mt19937_64(seed));
  for (const CopyTicket ticket : tickets) End(ticket, absl::OkStatus());
}

void SlowDevice::CompleteAtOnce(bool on) {
  MutexLock lock(&mutex_);
  at_once_ = on;
}

void SlowDevice::StartCompleter(uint64_t seed) {
  HOLDFAST_CHECK(!completer_.joinable(), "the completer runs already");
  completer_ = std::thread([this, seed] { RunCompleter(seed); });
}

void SlowDevice::StopCompleter() {
  if (!completer_.joinable()) return;
  {
    MutexLock lock(&mutex_);
    stop_completer_ = true;
    changed_.NotifyAll();
  }
  completer_.join();
  MutexLock lock(&mutex_);
  stop_completer_ = false;
}

void SlowDevice::RunCompleter(uint64_t seed) {
  std::mt19937_64 random(seed);
  MutexLock lock(&mutex_);
  while (!stop_completer_) {
    if (copies_.empty()) {
      (void)changed_.WaitUntil(&mutex_, absl::InfiniteFuture());
      continue;
    }
    auto chosen = copies_.begin();
    std::advance(chosen, static_cast<std::ptrdiff_t>(random() % copies_.size()));
    End(chosen->first, absl::OkStatus());
    // Lets other threads run between two completions, so that partly ended copies are observed.
    mutex_.Unlock();
    std::this_thread::yield();
    mutex_.Lock();
  }
}

// ---- Errors on demand.

void SlowDevice::FailCall(Call call, absl::Status status, uint32_t skip, uint32_t times) {
  MutexLock lock(&mutex_);
  planned_[call] = {std::move(status), skip, times};
}

absl::Status SlowDevice::PlannedError(Call call) {
  const auto found = planned_.find(call);
  if (found == planned_.end() || found->second.times == 0) return absl::OkStatus();
  Planned& planned = found->second;
  if (planned.skip > 0) {
    --planned.skip;
    return absl::OkStatus();
  }
  --planned.times;
  return planned.status;
}

// ---- The caller's streams.

StreamHandle SlowDevice::CreateStream() {
  MutexLock lock(&mutex_);
  stream_names_.push_back(std::make_unique<char>());
  return stream_names_.back().get();
}

void SlowDevice::Enqueue(StreamHandle stream, std::function<void()> work) {
  MutexLock lock(&mutex_);
  streams_[stream].work.push_back({std::move(work), 0});
}

size_t SlowDevice::RunStream(StreamHandle handle) {
  MutexLock lock(&mutex_);
  Stream& stream = streams_[handle];
  RunUntil(&stream, stream.work.size());
  return stream.work.size() - stream.done;
}

// ---- What happened.

std::vector<SlowDevice::LogEntry> SlowDevice::log() const {
  MutexLock lock(&mutex_);
  return log_;
}

std::map<char*, size_t> SlowDevice::registered() const {
  MutexLock lock(&mutex_);
  return registered_;
}

uint64_t SlowDevice::copies_unregistered() const {
  MutexLock lock(&mutex_);
  return copies_unregistered_;
}

// ---- Device.

absl::Status SlowDevice::RegisterMemory(void* base, size_t bytes) {
  MutexLock lock(&mutex_);
  if (absl::Status error = PlannedError(Call::kRegisterMemory); !error.ok()) return error;
  registered_[static_cast<char*>(base)] = bytes;
  log_.push_back({Call::kRegisterMemory, base, bytes, nullptr, 0});
  return absl::OkStatus();
}

absl::Status SlowDevice::UnregisterMemory(void* base, size_t bytes) {
  MutexLock lock(&mutex_);
  if (absl::Status error = PlannedError(Call::kUnregisterMemory); !error.ok()) return error;
  char* const begin = static_cast<char*>(base);
  const auto found = registered_.find(begin);
  if (found == registered_.end() || found->second != bytes) {
    return absl::FailedPreconditionError(absl::StrCat(name_, ": that memory is not registered"));
  }
  for (const auto& [ticket, copy] : copies_) {
    const char* const host = copy.copy.to_host ? copy.copy.destination : copy.copy.source;
    if (host >= begin && host < begin + bytes) {
      return absl::FailedPreconditionError(
          absl::StrCat(name_, ": copy ", ticket, " still uses the memory to unregister"));
    }
  }
  registered_.erase(found);
  log_.push_back({Call::kUnregisterMemory, base, bytes, nullptr, 0});
  return absl::OkStatus();
}

absl::Status SlowDevice::OrderAfter(StreamHandle stream) {
  MutexLock lock(&mutex_);
  if (absl::Status error = PlannedError(Call::kOrderAfter); !error.ok()) return error;
  order_[stream] = streams_[stream].work.size();
  log_.push_back({Call::kOrderAfter, nullptr, 0, stream, 0});
  return absl::OkStatus();
}

absl::StatusOr<CopyTicket> SlowDevice::CopyToHost(void* destination, const void* source,
                                                  size_t bytes) {
  return Start(Call::kCopyToHost, destination, source, bytes);
}

absl::StatusOr<CopyTicket> SlowDevice::CopyFromHost(void* destination, const void* source,
                                                    size_t bytes) {
  return Start(Call::kCopyFromHost, destination, source, bytes);
}

absl::StatusOr<CopyTicket> SlowDevice::Start(Call call, void* destination, const void* source,
                                             size_t bytes) {
  MutexLock lock(&mutex_);
  if (absl::Status error = PlannedError(call); !error.ok()) return error;
  if (bytes == 0) return CopyTicket{0};
  const bool to_host = call == Call::kCopyToHost;
  const char* const on_device = static_cast<const char*>(to_host ? source : destination);
  const char* const on_host = static_cast<const char*>(to_host ? destination : source);
  if (!IsDeviceMemory(on_device, bytes)) {
    return absl::InvalidArgumentError(absl::StrCat(name_, ": not memory of this device"));
  }
  if (!IsRegistered(on_host, bytes)) ++copies_unregistered_;
  const CopyTicket ticket = ++issued_;
  PendingCopy copy = {
      ticket, static_cast<char*>(destination), static_cast<const char*>(source), bytes, 0, to_host};
  copies_[ticket] = {copy, order_};
  log_.push_back({call, on_host, bytes, nullptr, ticket});
  if (at_once_) End(ticket, absl::OkStatus());
  changed_.NotifyAll();
  return ticket;
}

absl::StatusOr<bool> SlowDevice::IsDone(CopyTicket ticket) {
  MutexLock lock(&mutex_);
  if (absl::Status error = PlannedError(Call::kIsDone); !error.ok()) return error;
  if (ticket > issued_) {
    return absl::InvalidArgumentError(absl::StrCat(name_, ": no copy ", ticket, " was started"));
  }
  if (const auto failed = errors_.find(ticket); failed != errors_.end()) {
    absl::Status status = std::move(failed->second);
    errors_.erase(failed);
    return status;
  }
  return copies_.find(ticket) == copies_.end();
}

absl::Status SlowDevice::Wait(CopyTicket ticket, absl::Duration timeout) {
  const absl::Time deadline = base::Now() + timeout;
  for (;;) {
    absl::StatusOr<bool> done = IsDone(ticket);
    if (!done.ok()) return done.status();
    if (*done) return absl::OkStatus();
    MutexLock lock(&mutex_);
    if (copies_.find(ticket) == copies_.end()) continue;
    if (!changed_.WaitUntil(&mutex_, deadline) && copies_.find(ticket) != copies_.end()) {
      return absl::DeadlineExceededError(absl::StrCat(name_, ": copy ", ticket, " goes on"));
    }
  }
}

absl::Status SlowDevice::MakeStreamWait(StreamHandle stream) {
  MutexLock lock(&mutex_);
  if (absl::Status error = PlannedError(Call::kMakeStreamWait); !error.ok()) return error;
  streams_[stream].work.push_back({nullptr, issued_});
  log_.push_back({Call::kMakeStreamWait, nullptr, 0, stream, issued_});
  return absl::OkStatus();
}

}  // namespace holdfast::testing
