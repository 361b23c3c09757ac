#include "runtime/worker/qos.h"

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

bool Granted(int result, const char* what, Manners* manners) {
  if (result == 0) return true;
  manners->refused = what;
  manners->refused_error = errno;
  return false;
}

}  // namespace

void RememberManners(Manners* manners) {
  manners->nice = sys::NiceNow();
  manners->has_cpus = sys::AffinityNow(&manners->cpus);
}

void ApplyQos(const Qos& qos, Manners* manners) {
  manners->refused = nullptr;
  // 0 is the calling thread in every call: a thread of the host changes only itself.
  if (qos.nice != 0 || manners->changed_nice) {
    const int wanted = manners->nice + qos.nice;
    Granted(sys::Sys().setpriority(PRIO_PROCESS, 0, wanted < kNiceMax ? wanted : kNiceMax), "nice",
            manners);
    manners->changed_nice = qos.nice != 0;
  }
  manners->io_priority = IoPriority(qos);
  if (manners->io_priority != 0 || manners->changed_io) {
    const int result = sys::Sys().ioprio_set(kIoPriorityWhoProcess, 0, manners->io_priority);
    if (!Granted(result, "I/O priority", manners)) manners->io_priority = 0;
    manners->changed_io = manners->io_priority != 0;
  }
  if (qos.cpu_count != 0) {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    for (uint32_t i = 0; i < qos.cpu_count; ++i) {
      if (qos.cpus[i] < CPU_SETSIZE) CPU_SET(qos.cpus[i], &cpus);
    }
    Granted(sys::Sys().sched_setaffinity(0, sizeof(cpus), &cpus), "CPUs", manners);
    manners->changed_cpus = true;
  } else if (manners->changed_cpus && manners->has_cpus) {
    sys::Sys().sched_setaffinity(0, sizeof(manners->cpus), &manners->cpus);
    manners->changed_cpus = false;
  }
}

}  // namespace holdfast::worker
