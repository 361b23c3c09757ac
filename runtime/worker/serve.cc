// The worker's life: settle, attach, run jobs, end.
#include "runtime/worker/serve.h"

#include <sys/mman.h>
#include <sys/socket.h>

#include <new>

#include "runtime/layout/launcher.h"
#include "runtime/sys/assert.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/process.h"
#include "runtime/sys/system.h"
#include "runtime/worker/server.h"

namespace holdfast::worker {
namespace {

void SendDetached(int socket) {
  layout::Message message;
  message.kind = layout::MessageKind::kDetached;
  iovec part = {.iov_base = &message, .iov_len = sizeof(message)};
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  // A dead trainer needs no answer.
  (void)!sys::Sys().sendmsg(socket, &header, MSG_NOSIGNAL);
}

int ServeJobs(Server* server) {
  const uint32_t jobs_max = server->options.jobs_max;
  while (jobs_max == 0 || server->jobs_done < jobs_max) {
    // Between two jobs nothing of the last one is in use.
    HOLDFAST_ASSERT(server->last_words.text == nullptr && !server->stuck);
    Received received;
    const Receive how = ReceiveMessage(*server, &received);
    int exit_status = 0;
    if (how == Receive::kEnd) return 0;
    if (how == Receive::kMismatch) {
      CloseAll(&received);
      return layout::kExitMismatch;
    }
    switch (received.message.kind) {
      case layout::MessageKind::kAttach:
        exit_status = Attach(server, &received);
        break;
      case layout::MessageKind::kRun:
        exit_status = RunJob(server, &received);
        ++server->jobs_done;
        break;
      case layout::MessageKind::kDetach:
        DropArena(server);
        SendDetached(server->options.socket);
        break;
      case layout::MessageKind::kExit:
        CloseAll(&received);
        return 0;
      case layout::MessageKind::kDetached:
      default:
        exit_status = layout::kExitMismatch;
        break;
    }
    CloseAll(&received);
    if (exit_status != 0 || server->stuck) return exit_status;
  }
  return 0;
}

/// Prepares the process as a worker. Returns false on failure.
bool SettleProcess(ServeOptions* options) {
  const int socket = sys::CloseAllBut(options->socket);
  if (socket < 0) return false;
  options->socket = socket;
  sys::LeaveSession();
  sys::SettleProcessSignals();
  return true;
}

}  // namespace

int Serve(const ServeOptions& given) {
  ServeOptions options = given;
  const bool is_thread = !layout::TraitsOf(options.launcher).process;
  sigset_t signals_before;
  if (is_thread) {
    sys::BlockThreadSignals(&signals_before);
  } else if (!SettleProcess(&options)) {
    return layout::kExitAttach;
  }
  sys::AdoptFd(options.socket);
  int exit_status = layout::kExitAttach;
  // Not on the stack, because a host's thread may have a small one, and not from the heap.
  void* const memory = sys::Sys().mmap(nullptr, sizeof(Server), PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory != MAP_FAILED) {
    Server* const server = new (memory) Server;
    server->options = options;
    RememberPriorities(&server->priorities);
    server->last_words.in_trainer = is_thread;
    sys::SetLastWords(&server->last_words);
    exit_status = ServeJobs(server);
    // With unfinished transfers nothing can be closed or unmapped; the kernel waits for them at the
    // process's end.
    if (server->stuck && !is_thread) return exit_status;
    Detach(server);
    sys::SetLastWords(nullptr);
    server->~Server();
    sys::Sys().munmap(memory, sizeof(Server));
  }
  sys::CloseOwned(options.socket);
  if (is_thread) sys::RestoreThreadSignals(signals_before);
  return exit_status;
}

}  // namespace holdfast::worker
