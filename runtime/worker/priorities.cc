#include "runtime/worker/priorities.h"

#include <sys/resource.h>

#include <cerrno>

#include "runtime/sys/process.h"
#include "runtime/sys/system.h"

namespace holdfast::worker {
namespace {

// ioprio_set(2); the C library's headers lack these constants.
constexpr int kIoPriorityWhoProcess = 1;
constexpr int kIoPriorityClassShift = 13;
constexpr int kNiceMax = 19;

uint16_t IoPriority(const Qos& qos) {
  if (qos.io_priority_class <= 0 || qos.io_priority_class > 3) return 0;
  return static_cast<uint16_t>(qos.io_priority_class << kIoPriorityClassShift |
                               (qos.io_priority_level & 7));
}

bool Granted(int result, const char* what, Priorities* priorities) {
  if (result == 0) return true;
  priorities->refused = what;
  priorities->refused_error = errno;
  return false;
}

}  // namespace

void RememberPriorities(Priorities* priorities) {
  priorities->nice = sys::NiceNow();
  priorities->has_cpus = sys::AffinityNow(&priorities->cpus);
}

void ApplyPriorities(const Qos& qos, Priorities* priorities) {
  priorities->refused = nullptr;
  // 0 is the calling thread in every call: a thread of the host changes only itself.
  if (qos.nice != 0 || priorities->changed_nice) {
    const int wanted = priorities->nice + qos.nice;
    Granted(sys::Sys().setpriority(PRIO_PROCESS, 0, wanted < kNiceMax ? wanted : kNiceMax), "nice",
            priorities);
    priorities->changed_nice = qos.nice != 0;
  }
  priorities->io_priority = IoPriority(qos);
  if (priorities->io_priority != 0 || priorities->changed_io) {
    const int result = sys::Sys().ioprio_set(kIoPriorityWhoProcess, 0, priorities->io_priority);
    if (!Granted(result, "I/O priority", priorities)) priorities->io_priority = 0;
    priorities->changed_io = priorities->io_priority != 0;
  }
  if (qos.cpu_count != 0) {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    for (uint32_t i = 0; i < qos.cpu_count; ++i) {
      if (qos.cpus[i] < CPU_SETSIZE) CPU_SET(qos.cpus[i], &cpus);
    }
    Granted(sys::Sys().sched_setaffinity(0, sizeof(cpus), &cpus), "CPUs", priorities);
    priorities->changed_cpus = true;
  } else if (priorities->changed_cpus && priorities->has_cpus) {
    sys::Sys().sched_setaffinity(0, sizeof(priorities->cpus), &priorities->cpus);
    priorities->changed_cpus = false;
  }
}

}  // namespace holdfast::worker
