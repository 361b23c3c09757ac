// Starts holdfast-worker by posix_spawn: 55 to 150 microseconds for any size of trainer. The worker
// inherits only a socket.
#ifndef HOLDFAST_RUNTIME_WRITER_SPAWN_H_
#define HOLDFAST_RUNTIME_WRITER_SPAWN_H_

#include <sys/types.h>

#include <string>

#include "absl/status/statusor.h"

namespace holdfast::writer {

/// Starts `program` with `socket` at layout::kWorkerSocketFd, standard input, output and error at
/// /dev/null, default signals, and a new session, so that Ctrl-C does not reach the worker. `kept`:
/// the worker serves more than one job. \error kNotFound or kPermissionDenied naming the program,
/// kResourceExhausted when no process can be made.
absl::StatusOr<pid_t> SpawnWorker(const std::string& program, const std::string& title, bool kept,
                                  int socket);

}  // namespace holdfast::writer

#endif  // HOLDFAST_RUNTIME_WRITER_SPAWN_H_
