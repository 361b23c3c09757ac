// A queue of aligned reads and writes with completions, on the best engine that works here.
//
// Knows files and bytes, never saves. Below the fork line: no heap, no locks of the host's, no
// exceptions; all its memory is inside the object, which the caller places (it is some tens of KiB:
// not on a small stack).
#ifndef HOLDFAST_IO_URING_QUEUE_H_
#define HOLDFAST_IO_URING_QUEUE_H_

#include <cstddef>
#include <cstdint>

#include "holdfast/pod.h"

namespace holdfast::io {

inline constexpr uint32_t kDepthMax = 64;
inline constexpr uint32_t kWatchesMax = 4;
inline constexpr uint32_t kHeldFdsMax = 2;
inline constexpr uint32_t kPwriteThreadsMax = 16;

enum class Opcode : uint8_t { kWrite = 1, kRead = 2 };

/// One transfer. `buffer`, `offset` and `bytes` are multiples of kIoAlignment where the fd is
/// O_DIRECT.
struct Request {
  Opcode opcode = Opcode::kWrite;
  int fd = -1;
  void* buffer = nullptr;
  uint64_t offset = 0;
  uint32_t bytes = 0;
  uint64_t tag = 0;  ///< Comes back in the completion.
};

/// The end of one transfer. Short transfers were continued by the queue: `bytes` is less than asked
/// only with an error, or where a read met the end of the file.
struct Completion {
  uint64_t tag = 0;
  uint32_t bytes = 0;
  int32_t error = 0;  ///< errno, 0 for success.
};

struct QueueOptions {
  EngineRung rung =
      EngineRung::kAuto;   ///< Anything but kAuto: that one or an error, no climbing down.
  uint32_t depth = 8;      ///< Requests in flight, 1 to kDepthMax.
  uint32_t threads = 2;    ///< Of the pwrite rung; 0: synchronous, in the caller (forked children).
  void* region = nullptr;  ///< Memory that all buffers lie in, for registration; may be null.
  size_t region_bytes = 0;
  bool may_register =
      false;  ///< kAuto tries the fixed rung only if set (huge pages, or a kept worker).
  /// The queue has places for `Hold`. A ring that cannot give them is refused.
  bool holds_fds = false;
  /// ioprio value for each request, one that ioprio_set(2) grants this process; 0 is the process's
  /// own. The synchronous pwrite rung leaves the caller's as it is.
  uint16_t io_priority = 0;
};

/// \threadsafety One thread, the one that called Open (the ring refuses any other, and so saves
/// locking).
/// \forksafety Not usable in a child of the process that opened it: every call there returns
/// EXDEV-like failures rather than touching the parent's ring.
class Queue {
 public:
  Queue();
  ~Queue();  // Close()
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  /// Opens the best engine. Returns 0 or an errno; `reason()` then says which rung and why, also on
  /// failure.
  int Open(const QueueOptions& options);

  /// Wakes Wait when `fd` becomes readable: eventfds and pidfds. Slot `index` < kWatchesMax; fd -1
  /// removes it (do so before closing the fd). Returns 0 or an errno.
  int Watch(uint32_t index, int fd);

  /// Keeps the open file description of `fd` open until the last transfer of this queue has landed,
  /// whatever ends the process before that. The kernel runs the direct writes of a ring to their
  /// end after its process was killed, and reads their buffers until then; it closes what the ring
  /// holds only afterwards. So the other end of a socket, or a lock, shows that the buffers are
  /// free. Slot `index` < kHeldFdsMax; fd -1 empties it. The pwrite rung needs no copy: its
  /// transfers end before its process does. Returns 0 or an errno.
  int Hold(uint32_t index, int fd);

  bool CanSubmit() const;

  /// Starts a transfer. Returns 0, EAGAIN when `depth` are in flight, or another errno (nothing was
  /// started).
  int Submit(const Request& request);

  /// Collects finished transfers, at least one unless the time passes or a watched fd is readable.
  /// Returns the number of completions; `*wakeups` gets bit i for watched slot i. `timeout_ms` 0
  /// polls, -1 has no bound of its own (callers use it only with a watch that is sure to fire;
  /// -EDEADLK with nothing in flight and no watch). A watch is level-triggered: its bit is set
  /// again until the fd is drained. `wakeups` may be null. Returns -errno if the engine itself
  /// broke; what was in flight is then unknown and its buffers stay in use until Close.
  int Wait(Completion* out, int capacity, int timeout_ms, uint32_t* wakeups);

  uint32_t in_flight() const;
  EngineRung rung() const;
  const char* reason() const;

  /// One line about what is in flight, for time-out reports; always terminated.
  void Describe(char* out, size_t bytes) const;

  /// Waits for what is in flight, unregisters explicitly (closing a ring whose fd lives on
  /// elsewhere would keep the pins), closes. Idempotent. False: the ring broke and some transfers
  /// did not end in time, so the kernel may use their buffers for ever.
  bool Close();

 private:
  static constexpr size_t kStorageBytes = 48 * 1024;
  alignas(64) unsigned char storage_[kStorageBytes];
};

/// What opening a file for direct I/O really gave.
struct DirectOpen {
  int fd = -1;
  DirectIo direct = DirectIo::kNo;
  uint32_t memory_alignment =
      0;  ///< Asked from STATX_DIOALIGN; 0 where the file system does not say.
  uint32_t offset_alignment = 0;
};

/// Opens `name` below `directory` with O_DIRECT where possible (and `want_direct`), without where
/// the file system refuses, and proves what it got by a deliberately misaligned probe on files
/// opened for writing that are still empty (and by STATX_DIOALIGN alone on files opened for
/// reading). `flags` and `mode` as open(2); O_CLOEXEC is added. Returns 0 or an errno. The fd is an
/// owned one: sys::CloseOwned closes it.
int OpenDirect(int directory, const char* name, int flags, uint32_t mode, bool want_direct,
               DirectOpen* out);

}  // namespace holdfast::io

#endif  // HOLDFAST_IO_URING_QUEUE_H_
