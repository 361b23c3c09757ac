#include "runtime/base/thread.h"

#include <algorithm>
#include <memory>
#include <thread>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/status.h"
#include "runtime/sys/process.h"
#include "runtime/sys/system.h"

namespace holdfast::base {
namespace {

void* Run(void* given) {
  const std::unique_ptr<std::function<void()>> work(static_cast<std::function<void()>*>(given));
  (*work)();
  return nullptr;
}

}  // namespace

absl::Status Thread::Start(std::function<void()> body) {
  HOLDFAST_CHECK(!started_, "a thread is started once");
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
