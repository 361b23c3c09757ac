#include "runtime/base/thread.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "runtime/base/check.h"
#include "runtime/base/clock.h"
#include "runtime/base/status.h"
#include "runtime/sys/process.h"
#include "runtime/sys/system.h"

namespace holdfast::base {
namespace {

constexpr absl::Duration kTimeForMemory = absl::Seconds(30);
constexpr absl::Duration kPause = absl::Milliseconds(5);

// Of a thread of the library: the begin of a wait for memory, and the last lack of memory.
struct Waiting {
  absl::Time since = absl::InfinitePast();
  absl::Time last = absl::InfinitePast();
};
// Null in threads of the host. The model: in a shared library, the first access of a thread to
// others would take memory.
[[gnu::tls_model("initial-exec")]] thread_local Waiting* t_waiting = nullptr;

std::new_handler g_host_handler = nullptr;

/// Pauses the thread, after which `operator new` tries again. An exception would leave a thread of
/// the library and end the host. Threads of the host get the host's handler.
void OnNoMemory() {
  if (t_waiting == nullptr) {
    if (g_host_handler == nullptr) throw std::bad_alloc();
    return g_host_handler();
  }
  const absl::Time now = base::Now();
  if (now - t_waiting->last > absl::Seconds(1)) t_waiting->since = now;
  t_waiting->last = now;
  if (now - t_waiting->since > kTimeForMemory) throw std::bad_alloc();
  absl::SleepFor(kPause);
}

void* Run(void* given) {
  Waiting waiting;
  t_waiting = &waiting;
  const std::unique_ptr<std::function<void()>> work(static_cast<std::function<void()>*>(given));
  (*work)();
  return nullptr;
}

}  // namespace

absl::Status Thread::Start(std::function<void()> body) {
  HOLDFAST_CHECK(!started_, "a thread is started once");
  static std::once_flag once;
  std::call_once(once, [] { g_host_handler = std::set_new_handler(OnNoMemory); });
  auto given = std::make_unique<std::function<void()>>(std::move(body));
  // The host's handlers must not run on this thread's stack; the mask is inherited.
  sigset_t before;
  sys::BlockThreadSignals(&before);
  const int error = sys::Sys().thread_create(&thread_, nullptr, Run, given.get());
  sys::RestoreThreadSignals(before);
  if (error != 0) return ErrnoStatus("start", "a thread (ulimit -u, ulimit -v, pids.max)", error);
  (void)given.release();
  started_ = true;
  return absl::OkStatus();
}

void Thread::Join() {
  if (started_) pthread_join(thread_, nullptr);
  started_ = false;
}

void Thread::Detach() {
  if (started_) pthread_detach(thread_);
  started_ = false;
}

uint32_t DefaultThreads() {
  // 0: unknown. More threads take CPUs from the training and copy no faster.
  return std::clamp(std::thread::hardware_concurrency(), 1u, 4u);
}

}  // namespace holdfast::base
