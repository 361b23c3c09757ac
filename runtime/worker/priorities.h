// The worker's scheduling settings. The worker applies them, so that the trainer never waits for
// the calls.
#ifndef HOLDFAST_RUNTIME_WORKER_PRIORITIES_H_
#define HOLDFAST_RUNTIME_WORKER_PRIORITIES_H_

#include <sched.h>

#include <cstdint>

#include "holdfast/pod.h"

namespace holdfast::worker {

/// The settings at the worker's start. A kept worker restores them between jobs, as far as
/// permitted.
struct Priorities {
  int nice = 0;
  cpu_set_t cpus;
  bool has_cpus = false;
  bool changed_nice = false;
  bool changed_io = false;
  bool changed_cpus = false;
  // Of the present job.
  uint16_t io_priority = 0;       ///< As granted, for the requests; 0 is "as the process".
  const char* refused = nullptr;  ///< The last refused setting, with the reason.
  int refused_error = 0;
};

void RememberPriorities(Priorities* priorities);

/// Sets nice value, I/O priority and CPUs of the calling thread. A refused setting is left
/// unchanged and noted: a save without its priority is better than no save. A refused I/O priority
/// must not be set on requests either, because the kernel would refuse each request.
void ApplyPriorities(const Qos& qos, Priorities* priorities);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_PRIORITIES_H_
