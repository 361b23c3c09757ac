// A worker between jobs: socket, attachment and ring. Serve places the object, which holds all
// memory of the worker, in a separate mapping.
#ifndef HOLDFAST_RUNTIME_WORKER_SERVER_H_
#define HOLDFAST_RUNTIME_WORKER_SERVER_H_

#include <cstdint>

#include "io_uring/queue.h"
#include "runtime/layout/wire.h"
#include "runtime/sys/assert.h"
#include "runtime/worker/job_run.h"
#include "runtime/worker/priorities.h"
#include "runtime/worker/serve.h"

namespace holdfast::worker {

/// A message with its fds; the receiver owns the fds.
struct Received {
  layout::Message message;
  int fds[layout::kAttachFds] = {-1, -1, -1, -1};
  int fd_count = 0;
};

struct Server {
  ServeOptions options;
  Attachment attached;
  Priorities priorities;
  io::Queue queue;
  /// Of the open queue; compared to see whether the next job can keep the queue.
  io::QueueOptions queue_options;
  bool queue_open = false;
  io::Queue read_queue;
  uint32_t jobs_done = 0;
  sys::LastWords last_words;
  bool stuck = false;  ///< Transfers did not end: the worker exits and leaves everything as is.
  JobRun run;
  alignas(64) char directory_buffer[kDirectoryBufferBytes];
};

enum class Receive {
  kMessage,
  kEnd,       ///< The trainer is dead, or has closed its end.
  kMismatch,  ///< Not a message of this version.
};

/// Waits for the next message, the socket's end, or the trainer's death, in this order of
/// preference. A job handles a dead trainer itself.
Receive ReceiveMessage(const Server& server, Received* out);

/// Maps the arena. 0 or an exit status.
int Attach(Server* server, Received* received);

/// Keeps the arena's mapping out of forked children and of core dumps.
void KeepToThisProcess(const Attachment& attached);

/// Closes the ring and unmaps the arena; liveness and doorbells stay.
void DropArena(Server* server);

/// As DropArena, for a dead trainer, unless another of its jobs waits.
void DropArenaOfTheDead(Server* server);

/// Gives the staged bytes back to the trainer, with the save still going on: once every file is
/// durable and proven, or once a failed save has no transfer in flight. Not for a job whose
/// transfers are stuck.
void ReleaseStaging(JobRun* run);

/// As DropArena, and closes all fds of kAttach.
void Detach(Server* server);

/// Runs the job in `received`'s control memory. 0 or an exit status.
int RunJob(Server* server, Received* received);

void CloseAll(Received* received);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_SERVER_H_
