// The worker as the operating system shows it: for holding it still at the worst moment.
#ifndef HOLDFAST_TOOLS_DEMO_WORKER_PROCESS_H_
#define HOLDFAST_TOOLS_DEMO_WORKER_PROCESS_H_

#include <sys/types.h>

#include <cstdint>

namespace holdfast::demo {

/// The only child of this process, held by a pidfd, so that no later process of the same number can
/// be meant.
class WorkerProcess {
 public:
  WorkerProcess();
  ~WorkerProcess();
  WorkerProcess(const WorkerProcess&) = delete;
  WorkerProcess& operator=(const WorkerProcess&) = delete;

  /// False if there is no child, or more than one.
  bool found() const { return pidfd_ >= 0; }

  void Stop() const;
  void Continue() const;

  /// Bytes that it has asked the kernel to write so far (/proc/PID/io); 0 if the kernel does not
  /// say.
  uint64_t BytesSubmitted() const;

 private:
  pid_t pid_ = 0;
  int pidfd_ = -1;
};

}  // namespace holdfast::demo

#endif  // HOLDFAST_TOOLS_DEMO_WORKER_PROCESS_H_
