// The ladder of engines with the reason for each rung, and the guard against forked copies.
#include "io_uring/queue.h"

#include <fcntl.h>

#include <cerrno>
#include <new>

#include "io_uring/pwrite_engine.h"
#include "io_uring/text.h"
#include "io_uring/uring_engine.h"
#include "runtime/sys/assert.h"
#include "runtime/sys/system.h"

namespace holdfast::io {
namespace {

constexpr size_t kReasonBytes = 160;  // as in the completion slot

struct State {
  pid_t owner = 0;  // process that called Open; 0: not open
  EngineRung rung = EngineRung::kAuto;
  char reason[kReasonBytes] = "not opened";
  UringEngine uring;
  PwriteEngine pwrite;

  bool foreign() const { return owner != 0 && owner != sys::Sys().getpid(); }
  bool on_ring() const { return rung != EngineRung::kPwrite; }
  // Errno that refuses a call on this object; 0: allowed.
  int refusal() const { return owner == 0 ? EBADF : foreign() ? EXDEV : 0; }
};
static_assert(alignof(State) <= 64);

State& Of(unsigned char* storage) { return *std::launder(reinterpret_cast<State*>(storage)); }
const State& Of(const unsigned char* storage) {
  return *std::launder(reinterpret_cast<const State*>(storage));
}

bool Valid(const QueueOptions& options) {
  return options.depth >= 1 && options.depth <= kDepthMax && options.threads <= kPwriteThreadsMax;
}

// Tries the requested io_uring rungs. Returns 0 and sets the rung, or returns an errno.
int OpenUring(const QueueOptions& options, State* state, Text* why) {
  const EngineRung asked = options.rung;
  const int error = state->uring.Open(options, why);
  if (error != 0) return error;
  state->rung = EngineRung::kUring;
  if (asked == EngineRung::kUring) {
    why->Add("io_uring, as asked for");
    return 0;
  }
  if (asked == EngineRung::kAuto && (!options.may_register || options.region == nullptr)) {
    why->Add("io_uring; registering buffers was not asked for");
    return 0;
  }
  char registering[kReasonBytes];
  Text not_registered(registering, sizeof registering);
  const int refused = state->uring.Register(options.region, options.region_bytes, &not_registered);
  if (refused == 0) {
    state->rung = EngineRung::kUringFixed;
    why->Add("io_uring with registered buffers");
    return 0;
  }
  // A failure costs some CPU time per request, never the save.
  why->Add("io_uring; ").Add(registering);
  if (asked == EngineRung::kAuto) return 0;
  state->uring.Close();
  return refused;
}

int OpenLadder(const QueueOptions& options, State* state) {
  Text why(state->reason, sizeof state->reason);
  if (!Valid(options)) {
    why.Add("options out of range");
    return EINVAL;
  }
  if (options.rung == EngineRung::kPwrite) {
    state->rung = EngineRung::kPwrite;
    return state->pwrite.Open(options, &why);
  }
  const int error = OpenUring(options, state, &why);
  if (error == 0 || options.rung != EngineRung::kAuto) return error;
  why.Add("; ");
  state->rung = EngineRung::kPwrite;
  return state->pwrite.Open(options, &why);
}

}  // namespace

Queue::Queue() {
  static_assert(sizeof(State) <= kStorageBytes);
  ::new (storage_) State;
}

Queue::~Queue() { Close(); }

int Queue::Open(const QueueOptions& options) {
  State& state = Of(storage_);
  if (state.owner != 0) return state.foreign() ? EXDEV : EBUSY;
  const int error = OpenLadder(options, &state);
  if (error == 0) {
    HOLDFAST_ASSERT(state.rung != EngineRung::kAuto);
    HOLDFAST_ASSERT(in_flight() == 0);
    state.owner = sys::Sys().getpid();
  } else {
    state.rung = EngineRung::kAuto;
  }
  return error;
}

int Queue::Watch(uint32_t index, int fd) {
  State& state = Of(storage_);
  if (const int refusal = state.refusal(); refusal != 0) return refusal;
  if (index >= kWatchesMax) return EINVAL;
  if (fd >= 0 && sys::Sys().fcntl(fd, F_GETFD, 0) < 0) return errno;
  return state.on_ring() ? state.uring.Watch(index, fd) : state.pwrite.Watch(index, fd);
}

int Queue::Hold(uint32_t index, int fd) {
  State& state = Of(storage_);
  if (const int refusal = state.refusal(); refusal != 0) return refusal;
  if (index >= kHeldFdsMax) return EINVAL;
  return state.on_ring() ? state.uring.Hold(index, fd) : 0;
}

bool Queue::CanSubmit() const {
  // The pwrite engine locks; the lock changes no state that a caller can see.
  State& state = const_cast<State&>(Of(storage_));
  if (state.refusal() != 0) return false;
  return state.on_ring() ? state.uring.CanSubmit() : state.pwrite.CanSubmit();
}

int Queue::Submit(const Request& request) {
  State& state = Of(storage_);
  if (const int refusal = state.refusal(); refusal != 0) return refusal;
  const bool known = request.opcode == Opcode::kWrite || request.opcode == Opcode::kRead;
  if (!known || request.bytes == 0 || request.buffer == nullptr) return EINVAL;
  if (request.fd < 0) return EBADF;
  return state.on_ring() ? state.uring.Submit(request) : state.pwrite.Submit(request);
}

int Queue::Wait(Completion* out, int capacity, int timeout_ms, uint32_t* wakeups) {
  State& state = Of(storage_);
  if (wakeups != nullptr) *wakeups = 0;
  if (const int refusal = state.refusal(); refusal != 0) return -refusal;
  if (capacity < 1) return -EINVAL;
  return state.on_ring() ? state.uring.Wait(out, capacity, timeout_ms, wakeups)
                         : state.pwrite.Wait(out, capacity, timeout_ms, wakeups);
}

uint32_t Queue::in_flight() const {
  State& state = const_cast<State&>(Of(storage_));
  if (state.refusal() != 0) return 0;
  return state.on_ring() ? state.uring.in_flight() : state.pwrite.in_flight();
}

EngineRung Queue::rung() const { return Of(storage_).rung; }

const char* Queue::reason() const { return Of(storage_).reason; }

void Queue::Describe(char* out, size_t bytes) const {
  State& state = const_cast<State&>(Of(storage_));
  Text text(out, bytes);
  if (const int refusal = state.refusal(); refusal != 0) {
    text.Add(refusal == EXDEV ? "opened by another process" : "not open");
    return;
  }
  if (state.on_ring()) {
    text.Add(state.rung == EngineRung::kUringFixed ? "io_uring, registered: " : "io_uring: ");
    state.uring.Describe(&text);
  } else {
    text.Add("pwrite: ");
    state.pwrite.Describe(&text);
  }
}

bool Queue::Close() {
  State& state = Of(storage_);
  // A forked copy owns neither the ring, nor the threads, nor the fds.
  if (state.refusal() != 0) return true;
  bool ended = true;
  if (state.on_ring()) {
    ended = state.uring.Close();
  } else {
    state.pwrite.Close();
  }
  state.owner = 0;
  return ended;
}

}  // namespace holdfast::io
