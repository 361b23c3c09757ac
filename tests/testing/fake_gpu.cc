#include "tests/testing/fake_gpu.h"

#include <pthread.h>

#include <cstring>
#include <iterator>
#include <utility>

namespace holdfast::testing {

using device::GpuAddress;
using device::GpuApi;
using device::GpuCode;
using device::GpuContext;
using device::GpuEvent;
using device::GpuStream;

FakeGpu& FakeGpu::Get() {
  static FakeGpu* const fake = new FakeGpu;
  // A forked child looks at the counts. A stream's thread must not hold the lock at the fork.
  static const int fork_safe = pthread_atfork(
      [] { Get().mutex_.lock(); }, [] { Get().mutex_.unlock(); }, [] { Get().mutex_.unlock(); });
  (void)fork_safe;
  return *fake;
}

std::string FakeGpu::Path() { return HOLDFAST_FAKE_GPU; }

void FakeGpu::Reset(int devices) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!streams_.empty()) EndStream(streams_.back().get(), &lock);
  held_ = false;
  contexts_ = std::vector<Context>(devices);
  events_.clear();
  memory_.clear();
  registered_.clear();
  failures_.clear();
  counts_.clear();
  contexts_pushed_ = calls_outside_context_ = calls_not_relaxed_ = 0;
}

// ---- Streams.

FakeGpu::Stream* FakeGpu::AddStream(int device) {
  streams_.push_back(std::make_unique<Stream>());
  Stream* const stream = streams_.back().get();
  stream->device = device;
  stream->thread = std::thread([this, stream] { RunStream(stream); });
  return stream;
}

FakeGpu::Stream* FakeGpu::Find(GpuStream handle, int device) {
  if (handle == nullptr) {
    Stream*& stream = contexts_[device].default_stream;
    if (stream == nullptr) stream = AddStream(device);
    return stream;
  }
  for (const auto& stream : streams_) {
    if (reinterpret_cast<GpuStream>(stream.get()) != handle) continue;
    return device < 0 || stream->device == device ? stream.get() : nullptr;
  }
  return nullptr;
}

void FakeGpu::EndStream(Stream* stream, std::unique_lock<std::mutex>* lock) {
  stream->ending = true;
  changed_.notify_all();
  std::thread thread = std::move(stream->thread);
  lock->unlock();
  thread.join();
  lock->lock();
  std::erase_if(streams_, [stream](const auto& each) { return each.get() == stream; });
}

bool FakeGpu::IsRunnable(const Stream& stream) const {
  if (stream.operations.empty()) return false;
  const Operation& next = stream.operations.front();
  return next.kind != Operation::kWait || next.event->done >= next.generation;
}

bool FakeGpu::IsQuiet() const {
  for (const auto& stream : streams_) {
    if (stream->executing) return false;
    if ((!held_ || stream->permitted) && IsRunnable(*stream)) return false;
  }
  return true;
}

void FakeGpu::RunStream(Stream* stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] {
      return stream->ending || ((!held_ || stream->permitted) && IsRunnable(*stream));
    });
    if (stream->ending) return;
    Execute(stream, &lock);
    changed_.notify_all();
  }
}

void FakeGpu::Execute(Stream* stream, std::unique_lock<std::mutex>* lock) {
  const Operation next = stream->operations.front();
  if (next.kind == Operation::kRecord) next.event->done = next.generation;
  if (next.kind == Operation::kCopy || next.kind == Operation::kFill) {
    Context& context = contexts_[stream->device];
    const bool is_last = context.coming != GpuCode::kSuccess && --context.copies_left <= 0;
    const size_t bytes = is_last ? next.bytes / 2 : next.bytes;
    stream->executing = true;
    lock->unlock();
    if (next.kind == Operation::kCopy) {
      std::memcpy(next.destination, next.source, bytes);
    } else {
      std::memset(next.destination, next.byte, bytes);
    }
    lock->lock();
    stream->executing = false;
    if (is_last) return Lose(stream->device);
  }
  stream->operations.pop_front();
}

void FakeGpu::Lose(int device) {
  Context& context = contexts_[device];
  context.fault = std::exchange(context.coming, GpuCode::kSuccess);
  for (const auto& stream : streams_) {
    if (stream->device == device) stream->operations.clear();
  }
}

void FakeGpu::Queue(Stream* stream, const Operation& operation) {
  stream->operations.push_back(operation);
  changed_.notify_all();
}

void FakeGpu::Hold() {
  std::unique_lock<std::mutex> lock(mutex_);
  held_ = true;
  changed_.wait(lock, [this] { return IsQuiet(); });
}

void FakeGpu::LetRun() {
  const std::unique_lock<std::mutex> lock(mutex_);
  held_ = false;
  changed_.notify_all();
}

void FakeGpu::Run(GpuStream handle) {
  std::unique_lock<std::mutex> lock(mutex_);
  Stream* const stream = Find(handle, -1);
  stream->permitted = true;
  changed_.notify_all();
  changed_.wait(lock, [this] { return IsQuiet(); });
  stream->permitted = false;
}

void FakeGpu::RunAll() {
  std::unique_lock<std::mutex> lock(mutex_);
  const bool held = std::exchange(held_, false);
  changed_.notify_all();
  changed_.wait(lock, [this] { return IsQuiet(); });
  held_ = held;
}

void FakeGpu::RunAllBut(GpuStream handle) {
  std::unique_lock<std::mutex> lock(mutex_);
  for (const auto& stream : streams_)
    stream->permitted = reinterpret_cast<GpuStream>(stream.get()) != handle;
  changed_.notify_all();
  changed_.wait(lock, [this] { return IsQuiet(); });
  for (const auto& stream : streams_) stream->permitted = false;
}

GpuStream FakeGpu::MakeStream(int device) {
  const std::unique_lock<std::mutex> lock(mutex_);
  return reinterpret_cast<GpuStream>(AddStream(device));
}

void FakeGpu::SetCapturing(GpuStream stream, bool capturing) {
  const std::unique_lock<std::mutex> lock(mutex_);
  Find(stream, -1)->capturing = capturing;
}

void FakeGpu::QueueWrite(GpuStream stream, char* destination, char byte) {
  const std::unique_lock<std::mutex> lock(mutex_);
  Queue(Find(stream, -1),
        {.kind = Operation::kFill, .destination = destination, .bytes = 1, .byte = byte});
}

size_t FakeGpu::queued(GpuStream stream) {
  const std::unique_lock<std::mutex> lock(mutex_);
  return Find(stream, -1)->operations.size();
}

char* FakeGpu::Allocate(size_t bytes, int device) {
  const std::unique_lock<std::mutex> lock(mutex_);
  Block block{std::make_unique<char[]>(bytes), bytes, device, false};
  char* const begin = block.bytes.get();
  memory_[begin] = std::move(block);
  return begin;
}

const FakeGpu::Block* FakeGpu::BlockOf(const void* address) {
  const char* const byte = static_cast<const char*>(address);
  const auto next = memory_.upper_bound(byte);
  if (next == memory_.begin()) return nullptr;
  const auto& [begin, block] = *std::prev(next);
  return byte < begin + block.size ? &block : nullptr;
}

// ---- Faults and evidence.

void FakeGpu::Fail(const std::string& call, GpuCode code, int skip, int times) {
  const std::unique_lock<std::mutex> lock(mutex_);
  failures_[call] = {code, skip, times};
}

bool FakeGpu::IsPlanned(const std::string& call) {
  const std::unique_lock<std::mutex> lock(mutex_);
  const auto found = failures_.find(call);
  return found != failures_.end() && found->second.times > 0;
}

void FakeGpu::FailNothing() {
  const std::unique_lock<std::mutex> lock(mutex_);
  failures_.clear();
}

void FakeGpu::LoseContext(int device, GpuCode fault, int copies) {
  std::unique_lock<std::mutex> lock(mutex_);
  contexts_[device].coming = fault;
  contexts_[device].copies_left = copies;
  // The bytes of a copy under way stop before anyone hears of the fault.
  changed_.wait(lock, [&] {
    for (const auto& stream : streams_) {
      if (stream->device == device && stream->executing) return false;
    }
    return true;
  });
  if (copies == 0 && contexts_[device].coming != GpuCode::kSuccess) Lose(device);
}

std::map<std::string, uint64_t> FakeGpu::counts() {
  const std::unique_lock<std::mutex> lock(mutex_);
  return counts_;
}
uint64_t FakeGpu::count(const std::string& call) { return counts()[call]; }
void FakeGpu::ClearCounts() {
  const std::unique_lock<std::mutex> lock(mutex_);
  counts_.clear();
}
size_t FakeGpu::registered() {
  const std::unique_lock<std::mutex> lock(mutex_);
  return registered_.size();
}
size_t FakeGpu::contexts_pushed() {
  const std::unique_lock<std::mutex> lock(mutex_);
  return contexts_pushed_;
}
uint64_t FakeGpu::calls_outside_context() {
  const std::unique_lock<std::mutex> lock(mutex_);
  return calls_outside_context_;
}
uint64_t FakeGpu::calls_not_relaxed() {
  const std::unique_lock<std::mutex> lock(mutex_);
  return calls_not_relaxed_;
}

}  // namespace holdfast::testing
