// Messages between a trainer and its workers: one SOCK_SEQPACKET socket per worker, with file
// descriptors beside each message.
//
// The socket carries work, and the proof that a worker's transfers have ended: the worker registers
// its end with each ring, and the kernel closes a ring's files only after the ring's last transfer.
// So the trainer's end hangs up when the process and its rings are gone. Liveness uses the pidfds
// (the trainer's own, passed with kAttach; the worker's, held by the trainer): a process forked by
// the trainer may keep a copy of the trainer's end. Without pidfd_open(2) a second socket replaces
// the trainer's pidfd.
#ifndef HOLDFAST_RUNTIME_LAYOUT_WIRE_H_
#define HOLDFAST_RUNTIME_LAYOUT_WIRE_H_

#include <cstdint>

#include "runtime/layout/job.h"

namespace holdfast::layout {

inline constexpr uint64_t kWireMagic = 0x3145'5249'5746'4c48;

enum class MessageKind : uint32_t {
  kAttach = 1,  ///< fds: arena, the trainer's life, doorbell to the worker, doorbell to the
                ///< trainer. First, once.
  kRun = 2,  ///< fds: control memory, parent directory, lock (the directory whose flock this save
             ///< holds; the parent again where none). The worker may start: this message is the
             ///< trainer's "go".
  kDetach = 3,  ///< no fds: unmap and unregister the arena, then answer with kDetached. kAttach may
                ///< follow.
  kExit = 4,    ///< no fds: end after the queued jobs.
  kDetached = 5,  ///< worker to trainer, the acknowledgment of kDetach.
};

/// Number of fds with each kind.
inline constexpr int kAttachFds = 4;
inline constexpr int kRunFds = 3;

/// The socket's fd in a spawned worker.
inline constexpr int kWorkerSocketFd = 3;

struct Message {
  uint64_t magic = kWireMagic;
  uint32_t layout_version = kLayoutVersion;
  MessageKind kind = MessageKind::kExit;
  uint64_t bytes = 0;  ///< kAttach: the arena's; kRun: the control memory's.
};

/// Exit statuses of holdfast-worker beside 0, for a worker without a result. Results use the
/// completion slot.
inline constexpr int kExitMismatch = 70;  ///< A trainer of another layout version.
inline constexpr int kExitAttach = 71;    ///< The arena or a job table could not be mapped.
inline constexpr int kExitStuck = 72;     ///< Transfers did not end within the deadline.
inline constexpr int kExitUsage = 64;     ///< Started by hand.

}  // namespace holdfast::layout

#endif  // HOLDFAST_RUNTIME_LAYOUT_WIRE_H_
