// The worker's body, the same under every launcher: serve save and delete jobs that arrive on a
// socket.
//
// Below the fork line: may run in a forked child of a multi-threaded trainer. See
// runtime/worker/README.md.
#ifndef HOLDFAST_RUNTIME_WORKER_SERVE_H_
#define HOLDFAST_RUNTIME_WORKER_SERVE_H_

#include <cstdint>

#include "holdfast/pod.h"

namespace holdfast::worker {

struct ServeOptions {
  int socket = -1;  ///< SOCK_SEQPACKET, see layout/wire.h. Closed at the end.
  /// A thread leaves process-wide settings (umask, session, name) alone.
  Launcher launcher = Launcher::kSpawn;
  uint32_t jobs_max = 1;  ///< The number of jobs before the end; 0: unlimited.
};

/// Serves until `jobs_max`, kExit, the socket's end, or the trainer's death (after the job in
/// flight was finished or stopped, as its flags say). Returns an exit status: 0, or layout::kExit*.
int Serve(const ServeOptions& options);

/// Returns true when `fd` is a socket of the trainer's kind. A program that was started by hand has
/// another descriptor at the number, or none.
bool IsWorkerSocket(int fd);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_SERVE_H_
