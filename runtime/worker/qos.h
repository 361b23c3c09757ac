// A worker's manners, applied by itself so that the trainer never waits for them.
#ifndef HOLDFAST_RUNTIME_WORKER_QOS_H_
#define HOLDFAST_RUNTIME_WORKER_QOS_H_

#include <sched.h>

#include <cstdint>

#include "holdfast/pod.h"

namespace holdfast::worker {

/// How the worker was started: a kept one goes back to it between jobs, as far as it may.
struct Manners {
  int nice = 0;
  cpu_set_t cpus;
  bool has_cpus = false;
  bool changed_nice = false;
  bool changed_io = false;
  bool changed_cpus = false;
  // Of the present job.
  uint16_t io_priority = 0;       ///< As granted, for the requests; 0 is "as the process".
  const char* refused = nullptr;  ///< The last setting that was refused, and why.
  int refused_error = 0;
};

void RememberManners(Manners* manners);

/// Nice value, I/O priority and CPUs of the calling thread. What is refused is left as it is and
/// noted: a save without its priority is better than none. An I/O priority that was refused must
/// not be put on requests either, which the kernel would refuse one by one.
void ApplyQos(const Qos& qos, Manners* manners);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_QOS_H_
