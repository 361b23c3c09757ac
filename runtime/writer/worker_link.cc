#include "runtime/writer/worker_link.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "runtime/base/clock.h"
#include "runtime/base/keep_forever.h"
#include "runtime/base/status.h"
#include "runtime/sys/assert.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/retry.h"
#include "runtime/sys/system.h"
#include "runtime/worker/serve.h"
#include "runtime/writer/spawn.h"

// The C library has it from 2.32 on. In front of an older one the symbol is null.
#pragma weak sigabbrev_np

namespace holdfast::writer {
namespace {

bool IsReadable(int fd, int timeout_ms) {
  pollfd entry{.fd = fd, .events = POLLIN, .revents = 0};
  return sys::PollFor(&entry, 1, timeout_ms) > 0;
}

void Ring(int eventfd) {
  const uint64_t one = 1;
  // EAGAIN means that the counter is full, so the other side is already being woken.
  (void)!sys::Sys().write(eventfd, &one, sizeof(one));
}

std::string DescribeExit(int status) {
  switch (status) {
    case layout::kExitMismatch:
      return "exited: the worker program is of another version than this library";
    case layout::kExitAttach:
      return "exited: it could not take its descriptors, or map its memory (ulimit -n, ulimit -v)";
    case sys::kExitAssertion:
      return "exited: it found its own state wrong";
    case 127:
      return "exited with status 127: the worker program could not be started (missing shared "
             "library?)";
    default:
      return absl::StrCat("exited with status ", status);
  }
}

absl::StatusOr<base::UniqueFd> MakeEventFd() {
  base::UniqueFd fd(sys::EventFdOwned());
  if (!fd.valid()) return base::ErrnoStatus("create", "eventfd of a worker", errno);
  return fd;
}

}  // namespace

absl::StatusOr<std::shared_ptr<WorkerLink>> WorkerLink::Launch(const LinkOptions& options) {
  std::shared_ptr<WorkerLink> link(new WorkerLink());
  const absl::Status started = link->Start(options);
  if (!started.ok()) {
    // A worker that was started and could not be attached must not outlive its link.
    link->Kill();
    return started;
  }
  return link;
}

absl::Status WorkerLink::Start(const LinkOptions& options) {
  launcher_ = options.launcher;
  traits_ = layout::TraitsOf(launcher_);
  kept_ = options.kept || traits_.kept;
  arena_fd_ = options.arena_fd;
  arena_bytes_ = options.arena_bytes;
  time_take_max_ = options.time_take_max;
  HOLDFAST_ASSIGN_OR_RETURN(to_worker_, MakeEventFd());
  HOLDFAST_ASSIGN_OR_RETURN(to_trainer_, MakeEventFd());
  HOLDFAST_RETURN_IF_ERROR(WatchTrainer());
  int ends[2];
  if (sys::SocketPairOwned(SOCK_SEQPACKET, ends) != 0) {
    return base::ErrnoStatus("create", "the worker's socket", errno);
  }
  socket_ = base::UniqueFd(ends[0]);
  base::UniqueFd worker_end(ends[1]);
  if (traits_.program) {
    HOLDFAST_RETURN_IF_ERROR(StartSpawned(options, std::move(worker_end)));
  } else if (traits_.process) {
    HOLDFAST_RETURN_IF_ERROR(StartForked(std::move(worker_end)));
  } else {
    HOLDFAST_ASSIGN_OR_RETURN(ended_, MakeEventFd());
    HOLDFAST_RETURN_IF_ERROR(StartThread(std::move(worker_end)));
  }
  return Attach();
}

absl::Status WorkerLink::WatchTrainer() {
  trainer_watch_ = base::UniqueFd(sys::PidfdOwned(sys::Sys().getpid()));
  if (trainer_watch_.valid()) return absl::OkStatus();
  // The fallback without pidfd_open: a socket whose other end is held by this process only (foreign
  // children close the end). The socket hangs up with the process's death.
  int ends[2];
  if (sys::SocketPairOwned(SOCK_STREAM, ends) != 0) {
    return base::ErrnoStatus("create", "the socket by which a worker sees the trainer's end",
                             errno);
  }
  trainer_end_ = base::UniqueFd(ends[0]);
  trainer_watch_ = base::UniqueFd(ends[1]);
  return absl::OkStatus();
}

absl::Status WorkerLink::WatchWorker() {
  pidfd_ = base::UniqueFd(sys::PidfdOwned(pid_));
  if (pidfd_.valid()) return absl::OkStatus();
  const int error = errno;
  // The host reaps all children, and the child has ended: the number may be another process's.
  if (error == ESRCH) pid_ = -1;
  // Without a pidfd there is no proof that the worker is gone, and no fallback.
  return base::ErrnoStatus("watch by pidfd_open",
                           "the worker that was just started (the launcher thread needs none)",
                           error);
}

absl::Status WorkerLink::StartSpawned(const LinkOptions& options, base::UniqueFd worker_end) {
  HOLDFAST_ASSIGN_OR_RETURN(pid_,
                            SpawnWorker(options.program, options.title, kept_, worker_end.get()));
  return WatchWorker();
}

absl::Status WorkerLink::StartForked(base::UniqueFd worker_end) {
  const base::ForkScope own_fork;
  const pid_t pid = sys::Sys().fork();
  if (pid < 0) return base::ErrnoStatus("fork", "worker", errno);
  if (pid == 0) {
    // The child: below the fork line from here on. _exit, never exit: the trainer's atexit handlers
    // (CUDA's, Python's) belong to the trainer.
    _exit(worker::Serve({.socket = worker_end.get(), .launcher = launcher_, .jobs_max = 1}));
  }
  pid_ = pid;
  return WatchWorker();
}

absl::Status WorkerLink::StartThread(base::UniqueFd worker_end) {
  // Serve closes the socket, so Serve gets a duplicate: UniqueFd must remain the only closer of its
  // own.
  const int socket = sys::DuplicateOwned(worker_end.get());
  if (socket < 0) return base::ErrnoStatus("duplicate", "the worker's socket", errno);
  const absl::Status started = thread_.Start([this, socket] {
    thread_status_.store(worker::Serve({.socket = socket, .launcher = launcher_, .jobs_max = 0}));
    Ring(ended_.get());
    Ring(to_trainer_.get());
  });
  if (!started.ok()) sys::CloseOwned(socket);
  return started;
}

absl::Status WorkerLink::Attach() {
  const int fds[layout::kAttachFds] = {arena_fd_, trainer_watch_.get(), to_worker_.get(),
                                       to_trainer_.get()};
  return Send(layout::MessageKind::kAttach, arena_bytes_, fds, layout::kAttachFds);
}

absl::Status WorkerLink::Run(int control_fd, uint64_t control_bytes, int parent_fd, int lock_fd) {
  const int fds[layout::kRunFds] = {control_fd, parent_fd, lock_fd};
  const base::MutexLock lock(&send_mutex_);
  return Send(layout::MessageKind::kRun, control_bytes, fds, layout::kRunFds);
}

absl::Status WorkerLink::Send(layout::MessageKind kind, uint64_t bytes, const int* fds,
                              int fd_count) {
  layout::Message message;
  message.kind = kind;
  message.bytes = bytes;
  iovec part{.iov_base = &message, .iov_len = sizeof(message)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * layout::kAttachFds)] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (fd_count > 0) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(sizeof(int) * static_cast<size_t>(fd_count));
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int) * static_cast<size_t>(fd_count));
    std::memcpy(CMSG_DATA(rights), fds, sizeof(int) * static_cast<size_t>(fd_count));
  }
  const absl::Time end = base::Now() + time_take_max_;
  while (sys::Sys().sendmsg(socket_.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (errno != EAGAIN && errno != EINTR) return WhyRefused(errno);
    // Hundreds of jobs are queued already.
    if (base::Now() > end) {
      return absl::DeadlineExceededError(absl::StrCat("hand a job to the worker: it took none for ",
                                                      absl::FormatDuration(time_take_max_)));
    }
    constexpr int kLookMs = 100;  // A thread may close its end some time after its last job.
    pollfd room{.fd = socket_.get(), .events = POLLOUT, .revents = 0};
    sys::Sys().poll(&room, 1, kLookMs);
  }
  return absl::OkStatus();
}

absl::Status WorkerLink::WhyRefused(int error) {
  const absl::Status refused = base::ErrnoStatus("hand a job to", "the worker", error);
  // The worker's end of the socket is closed, so the process is about to end. Its exit status
  // (another version, a missing library) says more than "broken pipe".
  constexpr int kEndMs = 1000;
  const bool closed = error == EPIPE || error == ECONNRESET;
  if (!closed || !pidfd_.valid() || !IsReadable(pidfd_.get(), kEndMs)) return refused;
  return absl::AbortedError(absl::StrCat("hand a job to the worker: it ", Reap()));
}

void WorkerLink::RingDoorbell() { Ring(to_worker_.get()); }

void WorkerLink::DrainDoorbell() {
  uint64_t count = 0;
  (void)!sys::Sys().read(to_trainer_.get(), &count, sizeof(count));
}

void WorkerLink::Exit() {
  const base::MutexLock lock(&send_mutex_);
  // A dead worker needs no message.
  (void)Send(layout::MessageKind::kExit, 0, nullptr, 0);
}

bool WorkerLink::IsGone() const {
  return IsReadable(traits_.process ? pidfd_.get() : ended_.get(), 0);
}

pid_t WorkerLink::pid() const { return traits_.process ? pid_ : sys::Sys().getpid(); }

bool WorkerLink::HasHungUp() const {
  pollfd entry{.fd = socket_.get(), .events = 0, .revents = 0};
  return sys::Sys().poll(&entry, 1, 0) > 0 && (entry.revents & POLLHUP) != 0;
}

std::string WorkerLink::Reap() {
  const base::MutexLock lock(&reap_mutex_);
  if (exit_text_.empty()) exit_text_ = TakeExitStatus();
  return exit_text_;
}

std::string WorkerLink::TakeExitStatus() {
  if (!traits_.process) {
    const int status = thread_status_.load();
    return status == 0 ? "ended: its thread returned" : DescribeExit(status);
  }
  siginfo_t info{};
  const int result = sys::Uninterrupted(
      [&] { return sys::Sys().waitid(P_PIDFD, static_cast<id_t>(pidfd_.get()), &info, WEXITED); });
  if (result != 0) return "ended, and the host process took its exit status";
  if (info.si_code == CLD_EXITED) return DescribeExit(info.si_status);
  const char* const name = sigabbrev_np != nullptr ? sigabbrev_np(info.si_status) : nullptr;
  return absl::StrCat("was killed by signal ", info.si_status,
                      name != nullptr ? absl::StrCat(" (", name, ")") : "",
                      info.si_status == SIGKILL ? ": the out-of-memory killer, or somebody" : "");
}

void WorkerLink::ReapKilled() {
  // Only where opening the pidfd failed (no fd was left): Launch has killed the child, which had no
  // work yet. The pid is still this process's child, and must not stay behind as a zombie.
  siginfo_t info{};
  if (pid_ <= 0) return;
  (void)sys::Uninterrupted(
      [&] { return sys::Sys().waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED); });
}

bool WorkerLink::IsReaped() {
  const base::MutexLock lock(&reap_mutex_);
  return !exit_text_.empty();
}

void WorkerLink::Kill() {
  given_up_.store(true, std::memory_order_relaxed);
  if (pidfd_.valid()) {
    sys::Sys().pidfd_send_signal(pidfd_.get(), SIGKILL);
  } else if (pid_ > 0) {
    // Only where opening the pidfd of a child of this very call failed for another reason than that
    // the host has reaped the child.
    sys::Sys().kill(pid_, SIGKILL);
  }
}

void WorkerLink::Abandon(std::shared_ptr<WorkerLink> link) {
  link->Kill();
  if (link->traits_.process) return;
  link->Exit();
  base::KeepForever(std::move(link));
}

WorkerLink::~WorkerLink() {
  if (!guard_.InCreator()) {
    // A foreign child inherited the object but owns neither the worker nor the thread.
    thread_.Forget();
    return;
  }
  if (kept_ && socket_.valid()) Exit();
  thread_.Join();
  if (!pidfd_.valid()) {
    ReapKilled();
    return;
  }
  if (IsReaped()) return;
  // No transfer is in flight. A worker that still does not end is broken, and must not become a
  // zombie.
  constexpr int kEndMs = 10'000;
  if (!kept_ || !IsReadable(pidfd_.get(), kEndMs)) Kill();
  if (IsReadable(pidfd_.get(), kEndMs)) Reap();
}

absl::Status WorkerLink::DropRegistration() {
  const base::MutexLock lock(&send_mutex_);
  const absl::Status asked = Send(layout::MessageKind::kDetach, 0, nullptr, 0);
  if (!asked.ok()) return UnlessGone(asked);
  constexpr int kAnswerMs = 10'000;
  layout::Message answer;
  if (!IsReadable(socket_.get(), kAnswerMs)) {
    // A late answer would be taken for the answer to a later question.
    Kill();
    return absl::DeadlineExceededError(
        "detach the kept worker from the arena: no answer; it was killed, and the pages stay");
  }
  const ssize_t got = sys::Sys().read(socket_.get(), &answer, sizeof(answer));
  // ECONNRESET: the worker died before it read the question.
  if (got < 0)
    return UnlessGone(base::ErrnoStatus("detach", "the kept worker from the arena", errno));
  if (got != sizeof(answer) || answer.magic != layout::kWireMagic ||
      answer.kind != layout::MessageKind::kDetached) {
    // End of file: the worker is gone, and its registration too.
    if (got == 0) return absl::OkStatus();
    return absl::InternalError(
        "detach the kept worker from the arena: unexpected answer; the pages stay");
  }
  return absl::OkStatus();
}

absl::Status WorkerLink::RestoreRegistration() {
  const base::MutexLock lock(&send_mutex_);
  return UnlessGone(Attach());
}

absl::Status WorkerLink::UnlessGone(const absl::Status& status) const {
  // A dead worker holds no registration; the next save starts another worker.
  return status.ok() || IsGone() ? absl::OkStatus() : status;
}

}  // namespace holdfast::writer
