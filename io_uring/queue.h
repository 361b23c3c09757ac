// A queue of aligned reads and writes with completions, on the best engine that works here.
//
// Handles files and bytes, not saves. Below the fork line: no heap, no locks of the host, no
// exceptions. All memory is inside the object, which has some tens of KiB: not for a small stack.
#ifndef HOLDFAST_IO_URING_QUEUE_H_
#define HOLDFAST_IO_URING_QUEUE_H_

#include <sys/types.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>

#include "holdfast/pod.h"
#include "io_uring/pwrite_engine.h"
#include "io_uring/transfer.h"
#include "io_uring/uring_engine.h"

namespace holdfast::io {

/// \threadsafety One thread, the caller of Open. The ring refuses other threads and so saves
/// locking.
/// \forksafety Not usable in a child of the process that called Open: every call there returns
/// EXDEV-like failures and leaves the parent's ring alone.
class Queue {
 public:
  Queue() = default;
  ~Queue() { Close(); }
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  /// Opens the best engine. Returns 0 or an errno; `reason()` then names the rung and the reason,
  /// also on failure.
  int Open(const QueueOptions& options);

  /// Wakes Wait when `fd` (an eventfd or pidfd) becomes readable. Slot `index` < kWatchesMax; fd -1
  /// removes the watch, before the caller closes the fd. Returns 0 or an errno.
  int Watch(uint32_t index, int fd);

  /// Keeps the open file description of `fd` open until the queue's last transfer has ended, also
  /// after the death of the process. The kernel completes a ring's direct writes after its process
  /// was killed, reads their buffers until then, and closes the ring's files only afterwards. So
  /// the other end of a socket, or a lock, shows that the buffers are free. Slot `index` <
  /// kHeldFdsMax; fd -1 empties the slot. The pwrite rung needs no copy: its transfers end before
  /// its process. Returns 0 or an errno.
  int Hold(uint32_t index, int fd);

  bool CanSubmit() const;

  /// Starts a transfer. Returns 0, EAGAIN when `depth` transfers are in flight, or another errno;
  /// on failure no transfer starts.
  int Submit(const Request& request);

  /// Collects finished transfers: at least one, unless the time passes or a watched fd is readable.
  /// Returns the number of completions; `*wakeups` (may be null) gets bit i for watched slot i. A
  /// watch is level-triggered: its bit is set again until the fd is drained. `timeout_ms` 0 polls.
  /// -1 has no bound and is for callers with a watch that is sure to fire; -EDEADLK with no
  /// transfer in flight and no watch. Returns -errno if the engine itself broke: transfers in
  /// flight are then unknown, and their buffers stay in use until Close.
  int Wait(Completion* out, int capacity, int timeout_ms, uint32_t* wakeups);

  uint32_t in_flight() const;
  /// True when a submission has failed for good: every later transfer and watch would.
  bool broken() const { return on_ring() && uring_.broken(); }
  EngineRung rung() const { return rung_; }
  const char* reason() const { return reason_; }

  /// Writes one line about transfers in flight, for time-out reports; always terminated.
  void Describe(char* out, size_t bytes) const;

  /// Waits for transfers in flight, unregisters, closes. Explicit unregistering matters: closing a
  /// ring whose fd is open elsewhere would keep the pins. Idempotent. Returns false when the ring
  /// broke and some transfers did not end in time: the kernel may use their buffers for ever.
  bool Close();

 private:
  static constexpr size_t kReasonBytes = 160;  // as in the completion slot

  int OpenLadder(const QueueOptions& options);
  int OpenUring(const QueueOptions& options, Text* why);
  bool foreign() const;
  bool on_ring() const { return rung_ != EngineRung::kPwrite; }
  // Errno that refuses a call on this object; 0: allowed.
  int refusal() const { return owner_ == 0 ? EBADF : foreign() ? EXDEV : 0; }

  pid_t owner_ = 0;  // process that called Open; 0: not open
  EngineRung rung_ = EngineRung::kAuto;
  char reason_[kReasonBytes] = "not opened";
  UringEngine uring_;
  PwriteEngine pwrite_;
};

/// Result of opening a file for direct I/O.
struct DirectOpen {
  int fd = -1;
  DirectIo direct = DirectIo::kNo;
  uint32_t memory_alignment = 0;  ///< From STATX_DIOALIGN; 0 where the file system reports none.
  uint32_t offset_alignment = 0;
};

/// Opens `name` below `directory` with O_DIRECT if `want_direct`, and without O_DIRECT where the
/// file system refuses. Proof of direct I/O for an empty file opened for writing is a misaligned
/// probe; for a file opened for reading, STATX_DIOALIGN alone. `flags` and `mode` as open(2);
/// O_CLOEXEC is added. Returns 0 or an errno. The fd is owned: sys::CloseOwned closes the fd.
int OpenDirect(int directory, const char* name, int flags, uint32_t mode, bool want_direct,
               DirectOpen* out);

/// Makes an open file buffered. For a file system that accepted O_DIRECT at open and refuses a
/// transfer with EINVAL: it needs more than kIoAlignment. Returns 0 or an errno.
int SwitchOffDirect(int fd);

}  // namespace holdfast::io

#endif  // HOLDFAST_IO_URING_QUEUE_H_
