// The worker's end of the socket, and the arena.
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <cstring>

#include "runtime/layout/launcher.h"
#include "runtime/sys/assert.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/retry.h"
#include "runtime/sys/system.h"
#include "runtime/worker/server.h"

namespace holdfast::worker {
namespace {

constexpr uint64_t kHugePageBytes = 2ull << 20;
// Before kAttach the worker has no pidfd of the trainer, so the wait is bounded.
constexpr int kFirstMessageMs = 30'000;
constexpr int kLookMs = 10'000;

/// Takes all fds from a message's control data.
void TakeFds(msghdr* header, Received* out) {
  for (cmsghdr* part = CMSG_FIRSTHDR(header); part != nullptr; part = CMSG_NXTHDR(header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      if (out->fd_count < layout::kAttachFds) {
        out->fds[out->fd_count++] = fd;
      } else {
        sys::CloseOwned(fd);
      }
    }
  }
  HOLDFAST_ASSERT(out->fd_count >= 0 && out->fd_count <= layout::kAttachFds);
}

Receive ReadMessage(int socket, Received* out) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * layout::kAttachFds)];
  iovec part = {.iov_base = &out->message, .iov_len = sizeof(out->message)};
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  const ssize_t got = sys::Uninterrupted([&] { return sys::ReceiveOwned(socket, &header); });
  if (got <= 0) return Receive::kEnd;
  TakeFds(&header, out);
  if (got != static_cast<ssize_t>(sizeof(out->message)) || (header.msg_flags & MSG_TRUNC) != 0 ||
      out->message.magic != layout::kWireMagic ||
      out->message.layout_version != layout::kLayoutVersion) {
    return Receive::kMismatch;
  }
  return Receive::kMessage;
}

void CloseFd(int* fd) {
  if (*fd >= 0) sys::CloseOwned(*fd);
  *fd = -1;
}

/// Maps the arena for writing if registration is possible, because the kernel pins for writing
/// only. Maps it read-only otherwise: a wild store of the process then cannot change sealed bytes.
bool MapArena(Attachment* attached, bool may_register) {
  HOLDFAST_ASSERT(attached->arena_fd >= 0 && attached->arena_bytes > 0);
  void* memory = MAP_FAILED;
  if (may_register) {
    memory = sys::Sys().mmap(nullptr, attached->arena_bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                             attached->arena_fd, 0);
    attached->writable = memory != MAP_FAILED;
  }
  if (memory == MAP_FAILED) {
    memory = sys::Sys().mmap(nullptr, attached->arena_bytes, PROT_READ, MAP_SHARED,
                             attached->arena_fd, 0);
  }
  if (memory == MAP_FAILED) return false;
  HOLDFAST_ASSERT(attached->arena == nullptr);
  attached->arena = static_cast<char*>(memory);
  KeepToThisProcess(*attached);
  return true;
}

}  // namespace

void KeepToThisProcess(const Attachment& attached) {
  HOLDFAST_ASSERT(attached.arena != nullptr && attached.arena_bytes > 0);
  // The worker may be a thread of the host: a child that the host forks must not hold this memory.
  sys::Sys().madvise(attached.arena, attached.arena_bytes, MADV_DONTFORK);
  // A core dump of a worker must not carry the model.
  sys::Sys().madvise(attached.arena, attached.arena_bytes, MADV_DONTDUMP);
}

Receive ReceiveMessage(const Server& server, Received* out) {
  while (true) {
    // A negative fd is ignored: before kAttach only the socket is there.
    pollfd fds[2] = {{.fd = server.options.socket, .events = POLLIN, .revents = 0},
                     {.fd = server.attached.trainer, .events = POLLIN, .revents = 0}};
    const bool attached = server.attached.trainer >= 0;
    const int ready = sys::PollFor(fds, 2, attached ? kLookMs : kFirstMessageMs);
    if (ready == 0 && attached) continue;
    // A failing poll would not show the trainer's death either.
    if (ready <= 0) return Receive::kEnd;
    if ((fds[0].revents & POLLIN) == 0) {
      // poll looks at the fds one after the other. A job and then the trainer's death may have
      // arrived in between. The messages of a dead trainer are complete by now.
      const bool trainer_died = (fds[1].revents & POLLIN) != 0;
      if (!trainer_died || sys::PollFor(fds, 1, 0) <= 0) return Receive::kEnd;
    }
    return ReadMessage(server.options.socket, out);
  }
}

int Attach(Server* server, Received* received) {
  HOLDFAST_ASSERT(received->fd_count >= 0 && received->fd_count <= layout::kAttachFds);
  if (received->fd_count != layout::kAttachFds) return layout::kExitAttach;
  Detach(server);
  Attachment& attached = server->attached;
  attached = Attachment{};
  attached.arena_fd = received->fds[0];
  attached.trainer = received->fds[1];
  attached.doorbell = received->fds[2];
  attached.trainer_doorbell = received->fds[3];
  received->fd_count = 0;  // The attachment owns the fds now.
  attached.arena_bytes = received->message.bytes;
  if (attached.arena_bytes == 0) return 0;
  struct stat status = {};
  // A mapping beyond the file's end would turn an access into a SIGBUS.
  if (sys::Sys().fstat(attached.arena_fd, &status) != 0 ||
      static_cast<uint64_t>(status.st_size) < attached.arena_bytes) {
    return layout::kExitAttach;
  }
  // hugetlbfs and huge tmpfs report their page size here.
  attached.huge_pages = static_cast<uint64_t>(status.st_blksize) >= kHugePageBytes;
  // Registering small pages costs 20 ms per GiB, so only a kept worker registers them.
  const layout::LauncherTraits traits = layout::TraitsOf(server->options.launcher);
  const bool may_register = attached.huge_pages || (traits.process && traits.kept);
  return MapArena(&attached, may_register) ? 0 : layout::kExitAttach;
}

void DropArena(Server* server) {
  HOLDFAST_ASSERT(!server->stuck);
  // Unregisters first: pages that are punched under a registration live on in the registration
  // only, and the disk would get old bytes.
  if (server->queue_open) server->queue.Close();
  server->queue_open = false;
  Attachment& attached = server->attached;
  if (attached.arena != nullptr) sys::Sys().munmap(attached.arena, attached.arena_bytes);
  attached.arena = nullptr;
  attached.arena_bytes = 0;
  CloseFd(&attached.arena_fd);
}

void DropArenaOfTheDead(Server* server) {
  // Its messages are complete by now: a save that it has staged may wait behind this job.
  if (!sys::MessageWaits(server->options.socket)) DropArena(server);
}

void ReleaseStaging(JobRun* run) {
  if (run->staging_released) return;
  run->staging_released = true;
  // The trainer may write these bytes after the store.
  HOLDFAST_ASSERT(!run->io_stuck);
  HOLDFAST_ASSERT(run->figures.engine == EngineRung::kAuto || run->queue->in_flight() == 0);
  // release: pairs with the supervisor's load, after which the next save writes these bytes.
  run->job->staging_released.store(1, std::memory_order_release);
  RingTrainer(*run->attached);
  const bool kept = layout::TraitsOf(run->launcher).kept;
  // Ranks may wait for each other for minutes, and a worker of one job attaches only once.
  if (!kept && run->job->world_size > 1) {
    DropArena(run->server);
  } else if (run->trainer_died) {
    DropArenaOfTheDead(run->server);
  }
}

void Detach(Server* server) {
  DropArena(server);
  Attachment& attached = server->attached;
  CloseFd(&attached.trainer);
  CloseFd(&attached.doorbell);
  CloseFd(&attached.trainer_doorbell);
  HOLDFAST_ASSERT(attached.arena == nullptr && attached.arena_fd < 0);
}

bool IsWorkerSocket(int fd) {
  struct stat status = {};
  return sys::Sys().fstat(fd, &status) == 0 && S_ISSOCK(status.st_mode);
}

void CloseAll(Received* received) {
  HOLDFAST_ASSERT(received->fd_count >= 0 && received->fd_count <= layout::kAttachFds);
  for (int i = 0; i < received->fd_count; ++i) sys::CloseOwned(received->fds[i]);
  received->fd_count = 0;
}

}  // namespace holdfast::worker
