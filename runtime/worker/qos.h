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
};

void RememberManners(Manners* manners);

/// Nice value, I/O priority and CPUs of the calling thread. What is refused is left as it is: a
/// less polite save is better than none.
void ApplyQos(const Qos& qos, Manners* manners);

/// The ioprio value of a job; 0 is "as the process".
uint16_t IoPriority(const Qos& qos);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_QOS_H_
