// Time and CPU time from one point on.
#ifndef HOLDFAST_TOOLS_BENCH_CLOCK_H_
#define HOLDFAST_TOOLS_BENCH_CLOCK_H_

#include <sys/resource.h>
#include <time.h>

namespace holdfast::bench {

class Stopwatch {
 public:
  Stopwatch()
      : wall_(Now(CLOCK_MONOTONIC)), cpu_(Cpu(RUSAGE_SELF)), children_(Cpu(RUSAGE_CHILDREN)) {}

  double seconds() const { return Now(CLOCK_MONOTONIC) - wall_; }
  /// Of the whole process.
  double cpu_seconds() const { return Cpu(RUSAGE_SELF) - cpu_; }
  /// Of children that ended and were waited for meanwhile.
  double children_cpu_seconds() const { return Cpu(RUSAGE_CHILDREN) - children_; }

 private:
  static double Now(clockid_t clock) {
    timespec time = {};
    clock_gettime(clock, &time);
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
  }
  static double Cpu(int who) {
    rusage usage = {};
    getrusage(who, &usage);
    return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
  }
  double wall_;
  double cpu_;
  double children_;
};

}  // namespace holdfast::bench

#endif  // HOLDFAST_TOOLS_BENCH_CLOCK_H_
