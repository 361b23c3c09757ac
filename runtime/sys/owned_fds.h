// The fds of this process that Holdfast owns. A child forked by the host closes its copies, so that
// the child keeps no arena, socket or lock alive.
//
// Every call that makes an fd, and every close, stands in this file. Making and owning an fd is one
// section, and so is disowning and closing; no fork(2) of another thread falls inside a section.
//
// Below the fork line, because a worker thread of the host has fds here, too. In a worker process
// the table has no effect.
#ifndef HOLDFAST_RUNTIME_SYS_OWNED_FDS_H_
#define HOLDFAST_RUNTIME_SYS_OWNED_FDS_H_

#include <sys/socket.h>
#include <sys/types.h>

#include <cstdint>

struct io_uring;
struct io_uring_params;

namespace holdfast::sys {

/// Each function makes the system call of its name through the table of system calls, returns its
/// result and errno, and owns the new fds. Close-on-exec is set where the caller passes no flags.
int OpenOwned(int directory, const char* path, int flags, mode_t mode);
int MemfdOwned(const char* name, unsigned flags);
int FsOpenOwned(const char* type, unsigned flags);
int FsMountOwned(int fs, unsigned flags, unsigned attributes);
int EventFdOwned();  ///< Initial value 0, non-blocking.
int PidfdOwned(pid_t pid);
int DuplicateOwned(int fd);
int SocketPairOwned(int type, int ends[2]);  ///< AF_UNIX.

/// recvmsg(2) without blocking: a message or EAGAIN. Owns the fds of the message.
ssize_t ReceiveOwned(int socket, struct msghdr* message);

/// Returns true when ReceiveOwned would give a message. Takes nothing.
bool MessageWaits(int socket);

/// liburing's queue_init_params and queue_exit: 0 or -errno.
int InitRingOwned(unsigned entries, struct io_uring* ring, struct io_uring_params* params);
void ExitRingOwned(struct io_uring* ring);

/// Owns an inherited fd.
void AdoptFd(int fd);

/// close(2). An fd that is not owned is ignored: in a child the copy is closed already, and the
/// host may have reused its number.
int CloseOwned(int fd);

/// For pthread_atfork(3). BeginFork waits until no section is under way and holds new sections
/// back. Both waits end after seconds: a call can hang (a dead network file system), and a signal
/// handler may fork inside a section. A child may then hold one fd too many.
void BeginFork();
void EndForkInParent();
/// Closes every owned fd in the child, unless `keep` is set (the child is a worker).
void EndForkInChild(bool keep);

/// Number of forks, from the first process to this one, whose child closed its owned fds. An fd
/// from before the last of them is closed, and this process may have an owned fd of its number.
uint32_t ForksThatClosed();

}  // namespace holdfast::sys

#endif  // HOLDFAST_RUNTIME_SYS_OWNED_FDS_H_
