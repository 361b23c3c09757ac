// The ladder of engines with the reason for each rung, and the guard against forked copies.
#include "io_uring/queue.h"

#include <fcntl.h>

#include <cerrno>

#include "runtime/sys/assert.h"
#include "runtime/sys/system.h"

namespace holdfast::io {
namespace {

bool Valid(const QueueOptions& options) {
  return options.depth >= 1 && options.depth <= kDepthMax && options.threads <= kPwriteThreadsMax;
}

}  // namespace

// Tries the requested io_uring rungs. Returns 0 and sets the rung, or returns an errno.
int Queue::OpenUring(const QueueOptions& options, Text* why) {
  const EngineRung asked = options.rung;
  const int error = uring_.Open(options, why);
  if (error != 0) return error;
  rung_ = EngineRung::kUring;
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
  const int refused = uring_.Register(options.region, options.region_bytes, &not_registered);
  if (refused == 0) {
    rung_ = EngineRung::kUringFixed;
    why->Add("io_uring with registered buffers");
    return 0;
  }
  // A failure costs some CPU time per request, never the save.
  why->Add("io_uring; ").Add(registering);
  if (asked == EngineRung::kAuto) return 0;
  uring_.Close();
  return refused;
}

int Queue::OpenLadder(const QueueOptions& options) {
  Text why(reason_, sizeof reason_);
  if (!Valid(options)) {
    why.Add("options out of range");
    return EINVAL;
  }
  if (options.rung == EngineRung::kPwrite) {
    rung_ = EngineRung::kPwrite;
    return pwrite_.Open(options, &why);
  }
  const int error = OpenUring(options, &why);
  if (error == 0 || options.rung != EngineRung::kAuto) return error;
  why.Add("; ");
  rung_ = EngineRung::kPwrite;
  return pwrite_.Open(options, &why);
}

bool Queue::foreign() const { return owner_ != 0 && owner_ != sys::Sys().getpid(); }

int Queue::Open(const QueueOptions& options) {
  if (owner_ != 0) return foreign() ? EXDEV : EBUSY;
  const int error = OpenLadder(options);
  if (error == 0) {
    HOLDFAST_ASSERT(rung_ != EngineRung::kAuto);
    HOLDFAST_ASSERT(in_flight() == 0);
    owner_ = sys::Sys().getpid();
  } else {
    rung_ = EngineRung::kAuto;
  }
  return error;
}

int Queue::Watch(uint32_t index, int fd) {
  if (const int refused = refusal(); refused != 0) return refused;
  if (index >= kWatchesMax) return EINVAL;
  if (fd >= 0 && sys::Sys().fcntl(fd, F_GETFD, 0) < 0) return errno;
  return on_ring() ? uring_.Watch(index, fd) : pwrite_.Watch(index, fd);
}

int Queue::Hold(uint32_t index, int fd) {
  if (const int refused = refusal(); refused != 0) return refused;
  if (index >= kHeldFdsMax) return EINVAL;
  return on_ring() ? uring_.Hold(index, fd) : 0;
}

bool Queue::CanSubmit() const {
  if (refusal() != 0) return false;
  return on_ring() ? uring_.CanSubmit() : pwrite_.CanSubmit();
}

int Queue::Submit(const Request& request) {
  if (const int refused = refusal(); refused != 0) return refused;
  const bool known = request.opcode == Opcode::kWrite || request.opcode == Opcode::kRead;
  if (!known || request.bytes == 0 || request.buffer == nullptr) return EINVAL;
  if (request.fd < 0) return EBADF;
  return on_ring() ? uring_.Submit(request) : pwrite_.Submit(request);
}

int Queue::Wait(Completion* out, int capacity, int timeout_ms, uint32_t* wakeups) {
  if (wakeups != nullptr) *wakeups = 0;
  if (const int refused = refusal(); refused != 0) return -refused;
  if (capacity < 1) return -EINVAL;
  const int count = on_ring() ? uring_.Wait(out, capacity, timeout_ms, wakeups)
                              : pwrite_.Wait(out, capacity, timeout_ms, wakeups);
  HOLDFAST_ASSERT(count <= capacity);
  return count;
}

uint32_t Queue::in_flight() const {
  if (refusal() != 0) return 0;
  return on_ring() ? uring_.in_flight() : pwrite_.in_flight();
}

void Queue::Describe(char* out, size_t bytes) const {
  Text text(out, bytes);
  if (const int refused = refusal(); refused != 0) {
    text.Add(refused == EXDEV ? "opened by another process" : "not open");
    return;
  }
  if (on_ring()) {
    text.Add(rung_ == EngineRung::kUringFixed ? "io_uring, registered: " : "io_uring: ");
    uring_.Describe(&text);
  } else {
    text.Add("pwrite: ");
    pwrite_.Describe(&text);
  }
}

bool Queue::Close() {
  // A forked copy owns neither the ring, nor the threads, nor the fds.
  if (refusal() != 0) return true;
  HOLDFAST_ASSERT(rung_ != EngineRung::kAuto);
  bool ended = true;
  if (on_ring()) {
    ended = uring_.Close();
  } else {
    pwrite_.Close();
  }
  owner_ = 0;
  return ended;
}

}  // namespace holdfast::io
