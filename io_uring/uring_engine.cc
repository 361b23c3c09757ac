// The engine on io_uring: submission, completion and the end.
//
// Transfers use no registered files: see README.md.
#include "io_uring/uring_engine.h"

#include <poll.h>

#include <cerrno>

#include "runtime/sys/assert.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"

namespace holdfast::io {
namespace {

// Origin of a completion, in the top byte of its user data. The lower bytes hold the index (8 bits)
// and, for polls, the generation: completions of a removed watch differ from its successor's.
enum class Kind : uint64_t { kTransfer = 1, kPoll, kProof, kRemoval };

constexpr uint64_t UserData(Kind kind, uint32_t index, uint32_t generation = 0) {
  return static_cast<uint64_t>(kind) << 56 | static_cast<uint64_t>(generation) << 8 | index;
}
constexpr Kind KindOf(uint64_t data) { return static_cast<Kind>(data >> 56); }
constexpr uint32_t IndexOf(uint64_t data) { return data & 0xff; }
constexpr uint32_t GenerationOf(uint64_t data) { return static_cast<uint32_t>(data >> 8); }

// Entries beyond `depth` are for watches: one to arm and one to remove each. Watches never use the
// first `depth` entries, and a transfer has at most one entry at a time. So a transfer always finds
// a free entry.
constexpr uint32_t kWatchEntries = 2 * kWatchesMax;

constexpr uint32_t kFlushTries = 16;
constexpr uint64_t kProofNs = 1'000 * sys::kNsPerMs;
constexpr uint64_t kCloseNs = 10'000 * sys::kNsPerMs;
constexpr uint64_t kSleepNsMax = 60'000 * sys::kNsPerMs;
// Retries of a refused submission.
constexpr uint64_t kRefusedSleepNs = 10 * sys::kNsPerMs;

bool IsRefusal(int result) { return result == -EINTR || result == -EAGAIN || result == -EBUSY; }

}  // namespace

int UringEngine::Setup(uint32_t entries) {
  // Only the task that made the ring may submit, and the kernel delivers completions on request. In
  // a forked child every call on an inherited copy then fails with EEXIST. Linux 6.0 and 6.1; older
  // kernels refuse with EINVAL.
  struct io_uring_params params = {};
  params.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
  int result = sys::InitRingOwned(entries, &ring_, &params);
  if (result == -EINVAL) {
    params = {};
    result = sys::InitRingOwned(entries, &ring_, &params);
  }
  return result;
}

void UringEngine::Exit() { sys::ExitRingOwned(&ring_); }

int UringEngine::Open(const QueueOptions& options, Text* why) {
  HOLDFAST_ASSERT(options.depth >= 1 && options.depth <= kDepthMax);
  int result = Setup(options.depth + kWatchEntries);
  if (result < 0) {
    why->Add("io_uring_setup: ").AddError(-result);
    if (result == -EPERM) why->Add(" (seccomp filter or kernel.io_uring_disabled)");
    if (result == -ENOSYS) why->Add(" (not in this kernel, or hidden by a seccomp filter)");
    if (result == -ENOMEM) why->Add(" (memory limit)");
    return -result;
  }
  slots_.Reset(options.depth);
  for (Watched& watch : watches_) watch = {.generation = watch.generation};
  io_priority_ = options.io_priority;
  closing_ = proved_ = false;
  broken_ = 0;
  registered_ = registered_bytes_ = 0;
  refused_ = 0;
  // A waiting time-out must not cost a request of its own, and completions must never be dropped.
  if ((ring_.features & IORING_FEAT_EXT_ARG) == 0 || (ring_.features & IORING_FEAT_NODROP) == 0) {
    Exit();
    why->Add("io_uring of this kernel is too old (before 5.11)");
    return ENOSYS;
  }
  // A child that touches the ring dies instead of writing the parent's memory. On kernels without
  // DONTFORK support the process id check of Queue remains.
  io_uring_ring_dontfork(&ring_);
  result = Prove();
  if (result != 0) {
    Exit();
    why->Add("io_uring_enter: ").AddError(result);
    return result;
  }
  result = options.holds_fds ? MakeHeldFds() : 0;
  if (result != 0) {
    Exit();
    why->Add("registering files: ").AddError(result);
  }
  return result;
}

int UringEngine::MakeHeldFds() {
  int none[kHeldFdsMax];
  for (int& fd : none) fd = -1;
  return -sys::Sys().uring_register_files(&ring_, none, kHeldFdsMax);
}

// The table of registered files lives as long as the ring, and the ring as long as its requests.
// Transfers use plain descriptors: see README.md.
int UringEngine::Hold(uint32_t index, int fd) {
  HOLDFAST_ASSERT(index < kHeldFdsMax);
  const int replaced = sys::Sys().uring_register_files_update(&ring_, index, &fd, 1);
  return replaced < 0 ? -replaced : 0;
}

int UringEngine::Prove() {
  struct io_uring_sqe* entry = io_uring_get_sqe(&ring_);
  io_uring_prep_nop(entry);
  entry->user_data = UserData(Kind::kProof, 0);
  const uint64_t deadline = sys::NowNs() + kProofNs;
  while (!proved_) {
    Flush();
    Completion none;
    Reap(&none, 1, nullptr);
    if (proved_) break;
    if (broken_ != 0) return broken_;
    const int slept = Sleep(deadline);
    if (slept < 0) return slept == -ETIME ? ETIMEDOUT : -slept;
  }
  return 0;
}

int UringEngine::Watch(uint32_t index, int fd) {
  HOLDFAST_ASSERT(index < kWatchesMax);
  Watched& watch = watches_[index];
  if (watch.armed) {
    struct io_uring_sqe* entry = TakeWatchEntry();
    if (entry == nullptr) {
      Flush();
      entry = TakeWatchEntry();
    }
    if (entry == nullptr) return EAGAIN;
    io_uring_prep_poll_remove(entry, UserData(Kind::kPoll, index, watch.generation));
    entry->user_data = UserData(Kind::kRemoval, index);
    Flush();
  }
  watch = {.fd = fd, .generation = watch.generation + 1};
  return 0;
}

struct io_uring_sqe* UringEngine::TakeWatchEntry() {
  if (broken_ != 0 || io_uring_sq_space_left(&ring_) <= slots_.depth()) return nullptr;
  return io_uring_get_sqe(&ring_);
}

void UringEngine::ArmWatches() {
  for (uint32_t i = 0; i < kWatchesMax; ++i) {
    Watched& watch = watches_[i];
    if (watch.fd < 0 || watch.armed) continue;
    struct io_uring_sqe* entry = TakeWatchEntry();
    if (entry == nullptr) return;  // the next round of Wait has room again
    io_uring_prep_poll_add(entry, watch.fd, POLLIN);
    entry->user_data = UserData(Kind::kPoll, i, watch.generation);
    watch.armed = true;
  }
}

int UringEngine::Submit(const Request& request) {
  if (broken_ != 0) return broken_;
  if (slots_.full()) return EAGAIN;
  const uint32_t index = slots_.Take(request);
  HOLDFAST_ASSERT(index <= 0xff);  // as user data has it
  Prepare(index);
  // Submit now, not at the next Wait: the caller digests in between, and the disk should not idle.
  const int result = Flush();
  if (result != 0) {
    // The broken engine submits no more, so the entry is free again and must not count as a
    // transfer.
    ring_.sq.sqes[(ring_.sq.sqe_tail - 1) & ring_.sq.ring_mask].user_data =
        UserData(Kind::kRemoval, 0);
    slots_.Release(index);
  }
  return result;
}

void UringEngine::Prepare(uint32_t index) {
  struct io_uring_sqe* entry = io_uring_get_sqe(&ring_);
  if (entry == nullptr) {  // impossible, see kWatchEntries
    broken_ = EOVERFLOW;
    return;
  }
  HOLDFAST_ASSERT(slots_.busy(index));
  const Transfer& transfer = slots_.at(index);
  HOLDFAST_ASSERT(transfer.bytes() > 0);
  const bool write = transfer.request.opcode == Opcode::kWrite;
  const int fd = transfer.request.fd;
  void* const buffer = transfer.buffer();
  // A transfer outside the registered buffers, or across two, is unregistered.
  const uint64_t first = reinterpret_cast<uintptr_t>(buffer) - registered_;
  const uint64_t last = first + transfer.bytes() - 1;
  const bool fixed = last < registered_bytes_ && first <= last &&
                     first / kRegisteredBufferBytes == last / kRegisteredBufferBytes;
  const auto buffer_index = static_cast<int>(first / kRegisteredBufferBytes);
  HOLDFAST_ASSERT(!fixed || buffer_index < static_cast<int>(kBuffersMax));
  if (fixed && write) {
    io_uring_prep_write_fixed(entry, fd, buffer, transfer.bytes(), transfer.offset(), buffer_index);
  } else if (fixed) {
    io_uring_prep_read_fixed(entry, fd, buffer, transfer.bytes(), transfer.offset(), buffer_index);
  } else if (write) {
    io_uring_prep_write(entry, fd, buffer, transfer.bytes(), transfer.offset());
  } else {
    io_uring_prep_read(entry, fd, buffer, transfer.bytes(), transfer.offset());
  }
  entry->ioprio = io_priority_;
  entry->user_data = UserData(Kind::kTransfer, index);
}

int UringEngine::Flush() {
  // Refused entries stay in the submission queue, and a wait does not submit entries: without this
  // loop Wait would wait for an interrupted submission for ever.
  for (uint32_t tries = 0; broken_ == 0 && !closing_ && tries < kFlushTries; ++tries) {
    if (io_uring_sq_ready(&ring_) == 0) return 0;
    const int result = sys::Sys().uring_submit(&ring_);
    if (result > 0) tries = 0;
    if (IsRefusal(result)) {
      ++refused_;
    } else if (result < 0) {
      broken_ = -result;
    }
  }
  return broken_;  // Wait submits the rest
}

int UringEngine::Reap(Completion* out, int capacity, uint32_t* wakeups) {
  int count = 0;
  struct io_uring_cqe* entry = nullptr;
  while (count < capacity && io_uring_peek_batch_cqe(&ring_, &entry, 1) == 1) {
    const uint64_t data = entry->user_data;
    const int32_t result = entry->res;
    io_uring_cq_advance(&ring_, 1);
    const uint32_t index = IndexOf(data);
    switch (KindOf(data)) {
      case Kind::kTransfer:
        HOLDFAST_ASSERT(slots_.in_flight() > 0);
        HOLDFAST_ASSERT(index < slots_.depth());
        if (Finish(index, result, &out[count])) ++count;
        break;
      case Kind::kPoll:
        if (index >= kWatchesMax || watches_[index].generation != GenerationOf(data)) break;
        watches_[index].armed = false;
        // An error wakes as well; a read of the fd returns the error.
        if (wakeups != nullptr) *wakeups |= 1u << index;
        break;
      case Kind::kProof:
        proved_ = result >= 0;
        if (!proved_) broken_ = -result;
        break;
      case Kind::kRemoval:
        break;  // ENOENT where the poll had fired first; its completion is of an old generation
    }
  }
  Flush();  // continued transfers
  return count;
}

bool UringEngine::Finish(uint32_t index, int32_t result, Completion* out) {
  if (!slots_.busy(index)) return false;
  Transfer& transfer = slots_.at(index);
  const auto hook = sys::Sys().uring_result;
  if (hook != nullptr) {
    result = hook(static_cast<uint8_t>(transfer.request.opcode), transfer.request.tag, result);
  }
  // The kernel got no thread for the request, as under a limit of processes. The caller needs no
  // thread.
  if (result == -ECANCELED && !closing_) result = transfer.Attempt();
  if (transfer.Advance(result) == Next::kAgain) {
    if (broken_ == 0 && !closing_) {
      Prepare(index);
      return false;
    }
    transfer.error = broken_ != 0 ? broken_ : ECANCELED;
  }
  HOLDFAST_ASSERT(transfer.error != 0 || transfer.done == transfer.request.bytes ||
                  transfer.request.opcode == Opcode::kRead);
  *out = transfer.End();
  slots_.Release(index);
  return true;
}

int UringEngine::Wait(Completion* out, int capacity, int timeout_ms, uint32_t* wakeups) {
  const uint64_t deadline = timeout_ms < 0
                                ? UINT64_MAX
                                : sys::NowNs() + static_cast<uint64_t>(timeout_ms) * sys::kNsPerMs;
  uint32_t woken = 0;
  for (bool last = false;;) {
    ArmWatches();
    Flush();
    const int count = Reap(out, capacity, &woken);
    HOLDFAST_ASSERT(count <= capacity);
    if (wakeups != nullptr) *wakeups = woken;
    if (count > 0 || woken != 0 || last) return count;
    if (broken_ != 0) return -broken_;
    if (timeout_ms < 0 && Idle()) return -EDEADLK;
    const int slept = Sleep(deadline);
    last = slept == -ETIME;
  }
}

bool UringEngine::Idle() const {
  for (const Watched& watch : watches_) {
    if (watch.fd >= 0) return false;
  }
  return slots_.in_flight() == 0;
}

// Sleeps until a completion is ready (or another change is possible). Returns 0, -ETIME at the
// deadline, or another -errno, which breaks the engine. Enters the kernel even after the deadline,
// because only there deferred completions are delivered.
int UringEngine::Sleep(uint64_t deadline_ns) {
  const uint64_t now = sys::NowNs();
  const uint64_t left = deadline_ns > now ? deadline_ns - now : 0;
  const uint64_t bound = io_uring_sq_ready(&ring_) > 0 ? kRefusedSleepNs : kSleepNsMax;
  const uint64_t time_ns = left < bound ? left : bound;
  struct io_uring_cqe* entry = nullptr;
  const int result = sys::Sys().uring_wait(&ring_, &entry, static_cast<int64_t>(time_ns));
  if (result == 0) return 0;
  if (result != -ETIME && !IsRefusal(result)) {
    broken_ = -result;
    return result;
  }
  if (result == -EAGAIN || result == -EBUSY) {
    const struct timespec pause = {.tv_sec = 0, .tv_nsec = sys::kNsPerMs};
    sys::Sys().nanosleep(&pause, nullptr);
  }
  return sys::NowNs() >= deadline_ns ? -ETIME : 0;
}

void UringEngine::Describe(Text* text) const {
  slots_.Describe(text);
  text->Add("; ring: ").Add(io_uring_sq_ready(&ring_)).Add(" not taken by the kernel, ");
  text->Add(io_uring_cq_ready(&ring_)).Add(" not reaped, ").Add(refused_).Add(" refusals");
  if (broken_ != 0) text->Add(", broken by ").AddError(broken_);
}

uint32_t UringEngine::UnconsumedTransfers() const {
  uint32_t count = 0;
  const unsigned head = ring_.sq.sqe_tail - io_uring_sq_ready(&ring_);
  for (unsigned i = head; i != ring_.sq.sqe_tail; ++i) {
    if (KindOf(ring_.sq.sqes[i & ring_.sq.ring_mask].user_data) == Kind::kTransfer) ++count;
  }
  HOLDFAST_ASSERT(count <= slots_.in_flight());
  return count;
}

bool UringEngine::Close() {
  closing_ = true;
  const uint64_t deadline = sys::NowNs() + kCloseNs;
  // Unsubmitted entries never run, so wait only for the others.
  while (slots_.in_flight() > UnconsumedTransfers()) {
    Completion dropped[8];
    if (Reap(dropped, 8, nullptr) > 0) continue;
    const int slept = Sleep(deadline);
    if (slept < 0) break;
  }
  // Unregister explicitly: otherwise the pins last as long as any copy of the ring's fd, and a
  // process forked from this one may hold a copy. Not with transfers in flight: old kernels wait
  // for transfers here without a bound.
  const bool ended = slots_.in_flight() <= UnconsumedTransfers();
  if (registered_bytes_ != 0 && ended) io_uring_unregister_buffers(&ring_);
  Exit();
  return ended;
}

}  // namespace holdfast::io
