// The engine on pread(2) and pwrite(2).
//
// Open makes the lock, and threads hold the lock for a few instructions only. A forked child opens
// its own queue without threads and never waits for the lock.
#include "io_uring/pwrite_engine.h"

#include <poll.h>
#include <signal.h>

#include <cerrno>

#include "runtime/sys/assert.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"

namespace holdfast::io {
namespace {

constexpr size_t kStackBytes = 256 * 1024;  // sanitizers need most of it
// ioprio_set(2); not in the C library's headers.
constexpr int kIoPriorityWhoProcess = 1;

void Run(Transfer* transfer) {
  while (transfer->Advance(transfer->Attempt()) == Next::kAgain) {
  }
  HOLDFAST_ASSERT(transfer->error != 0 || transfer->done == transfer->request.bytes ||
                  transfer->request.opcode == Opcode::kRead);
}

class Locked {
 public:
  explicit Locked(pthread_mutex_t* mutex) : mutex_(mutex) { pthread_mutex_lock(mutex_); }
  ~Locked() { pthread_mutex_unlock(mutex_); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  pthread_mutex_t* mutex_;
};

}  // namespace

int PwriteEngine::Open(const QueueOptions& options, Text* why) {
  HOLDFAST_ASSERT(options.depth <= kDepthMax && options.threads <= kPwriteThreadsMax);
  slots_.Reset(options.depth);
  queued_ = done_ = Fifo{};
  for (int& fd : watched_) fd = -1;
  io_priority_ = options.io_priority;
  last_words_ = sys::GetLastWords();
  stop_ = false;
  thread_count_ = 0;
  done_fd_ = -1;
  pthread_mutex_init(&mutex_, nullptr);
  pthread_cond_init(&work_, nullptr);
  if (options.threads == 0) {
    why->Add("pwrite in the caller");
    return 0;
  }
  done_fd_ = sys::EventFdOwned();
  if (done_fd_ < 0) {
    const int error = errno;
    why->Add("eventfd: ").AddError(error);
    return error;
  }
  const int error = StartThreads(options.threads);
  if (thread_count_ == 0) {
    why->Add("pwrite in the caller: pthread_create: ").AddError(error);
    sys::CloseOwned(done_fd_);
    done_fd_ = -1;
    return 0;
  }
  why->Add("pwrite, threads: ").Add(thread_count_);
  if (error != 0) why->Add(" (then ").AddError(error).Add(")");
  return 0;
}

int PwriteEngine::StartThreads(uint32_t wanted) {
  // The host's signal handlers must not run on these threads, and SIGXFSZ, raised by a file size
  // limit, must not end the process.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStackBytes);
  int error = 0;
  while (thread_count_ < wanted && error == 0) {
    error = sys::Sys().thread_create(&threads_[thread_count_], &attributes, &ThreadMain, this);
    if (error == 0) ++thread_count_;
  }
  pthread_attr_destroy(&attributes);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return error;
}

void* PwriteEngine::ThreadMain(void* engine) {
  static_cast<PwriteEngine*>(engine)->ServeQueue();
  return nullptr;
}

void PwriteEngine::ServeQueue() {
  sys::SetLastWords(last_words_);
  // Optional: without the grant the process's own priority holds.
  if (io_priority_ != 0) sys::Sys().ioprio_set(kIoPriorityWhoProcess, 0, io_priority_);
  for (;;) {
    uint32_t index = 0;
    {
      const Locked lock(&mutex_);
      while (queued_.count == 0 && !stop_) pthread_cond_wait(&work_, &mutex_);
      if (queued_.count == 0) return;
      index = queued_.Pop();
      HOLDFAST_ASSERT(slots_.busy(index));
    }
    Run(&slots_.at(index));
    {
      const Locked lock(&mutex_);
      done_.Push(index);
    }
    // Fails only with 2^64 - 2 pending; Wait then wakes anyway.
    const uint64_t one = 1;
    sys::Sys().write(done_fd_, &one, sizeof one);
  }
}

int PwriteEngine::Watch(uint32_t index, int fd) {
  HOLDFAST_ASSERT(index < kWatchesMax);
  watched_[index] = fd;
  return 0;
}

bool PwriteEngine::CanSubmit() const {
  const Locked lock(&mutex_);
  return !slots_.full();
}

uint32_t PwriteEngine::in_flight() const {
  const Locked lock(&mutex_);
  return slots_.in_flight();
}

int PwriteEngine::Submit(const Request& request) {
  if (thread_count_ == 0) {
    if (slots_.full()) return EAGAIN;
    const uint32_t index = slots_.Take(request);
    Run(&slots_.at(index));
    done_.Push(index);
    return 0;
  }
  const Locked lock(&mutex_);
  if (slots_.full()) return EAGAIN;
  queued_.Push(slots_.Take(request));
  pthread_cond_signal(&work_);
  return 0;
}

int PwriteEngine::Collect(Completion* out, int capacity) {
  const Locked lock(&mutex_);
  HOLDFAST_ASSERT(queued_.count + done_.count <= slots_.in_flight());
  int count = 0;
  while (count < capacity && done_.count > 0) {
    const uint32_t index = done_.Pop();
    HOLDFAST_ASSERT(slots_.busy(index));
    out[count++] = slots_.at(index).End();
    slots_.Release(index);
  }
  return count;
}

// Sleeps until a completion may be ready or a watched fd is readable, and sets the bits of such
// watches in `wakeups`. Returns 0 or -errno.
int PwriteEngine::Poll(int timeout_ms, uint32_t* wakeups) {
  // Slots without an fd keep their place: poll(2) ignores negative fds.
  struct pollfd fds[kWatchesMax + 1] = {};
  for (uint32_t i = 0; i < kWatchesMax; ++i) fds[i] = {.fd = watched_[i], .events = POLLIN};
  fds[kWatchesMax] = {.fd = done_fd_, .events = POLLIN};
  const int ready = sys::Sys().poll(fds, kWatchesMax + 1, timeout_ms);
  if (ready < 0) return errno == EINTR || errno == EAGAIN ? 0 : -errno;
  for (uint32_t i = 0; i < kWatchesMax; ++i) {
    if (fds[i].revents != 0) *wakeups |= 1u << i;
  }
  if (fds[kWatchesMax].revents != 0) {
    uint64_t drained = 0;
    sys::Sys().read(done_fd_, &drained, sizeof drained);
  }
  return 0;
}

int PwriteEngine::Wait(Completion* out, int capacity, int timeout_ms, uint32_t* wakeups) {
  const uint64_t deadline = timeout_ms < 0
                                ? UINT64_MAX
                                : sys::NowNs() + static_cast<uint64_t>(timeout_ms) * sys::kNsPerMs;
  bool watching = false;
  for (const int fd : watched_) watching |= fd >= 0;
  uint32_t woken = 0;
  int count = 0;
  int sleep_ms = 0;  // the first poll must not miss a watch between completions
  for (;;) {
    const int polled = Poll(sleep_ms, &woken);
    count = Collect(out, capacity);
    if (count > 0 || woken != 0) break;
    if (polled < 0) return polled;
    if (timeout_ms < 0 && !watching && in_flight() == 0) return -EDEADLK;
    const uint64_t now = sys::NowNs();
    if (now >= deadline) break;
    // Rounded up, so that the last sleep is not a spin; in slices, so that a lost wake-up heals.
    constexpr uint64_t kSliceMs = 1'000;
    const uint64_t left_ms = (deadline - now - 1) / sys::kNsPerMs + 1;
    sleep_ms = static_cast<int>(left_ms < kSliceMs ? left_ms : kSliceMs);
  }
  if (wakeups != nullptr) *wakeups = woken;
  return count;
}

void PwriteEngine::Describe(Text* text) const {
  const Locked lock(&mutex_);
  slots_.Describe(text);
  text->Add("; threads: ").Add(thread_count_).Add(", queued: ").Add(queued_.count);
  text->Add(", not reaped: ").Add(done_.count);
}

void PwriteEngine::Close() {
  {
    const Locked lock(&mutex_);
    stop_ = true;
    HOLDFAST_ASSERT(done_.count + queued_.count <= slots_.in_flight());
    pthread_cond_broadcast(&work_);
  }
  // Without a bound: a thread that is stuck in the kernel still uses this object's memory.
  for (uint32_t i = 0; i < thread_count_; ++i) pthread_join(threads_[i], nullptr);
  thread_count_ = 0;
  HOLDFAST_ASSERT(queued_.count == 0);  // the threads run queued transfers before their end
  if (done_fd_ >= 0) sys::CloseOwned(done_fd_);
  done_fd_ = -1;
  pthread_cond_destroy(&work_);
  pthread_mutex_destroy(&mutex_);
}

}  // namespace holdfast::io
