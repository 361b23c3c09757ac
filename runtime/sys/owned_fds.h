// Which fds of this process are Holdfast's: a child that the host forks closes its copies of them,
// so that it keeps neither the arena, nor a socket, nor a lock alive.
//
// Every call that makes an fd, and every close, is in here: an fd is made and owned, or disowned
// and closed, in one section that no fork(2) of another thread can cut in two.
//
// Below the fork line, because a worker that is a thread of the host has fds here, too. In a worker
// that is a process of its own the table is of no use and does no harm.
#ifndef HOLDFAST_RUNTIME_SYS_OWNED_FDS_H_
#define HOLDFAST_RUNTIME_SYS_OWNED_FDS_H_

#include <sys/socket.h>
#include <sys/types.h>

struct io_uring;
struct io_uring_params;

namespace holdfast::sys {

/// Each makes the call of its name through the table of system calls, with its result and errno,
/// and owns what it returns. Close-on-exec is set, where the caller passes no flags of its own.
int OpenOwned(int directory, const char* path, int flags, mode_t mode);
int MemfdOwned(const char* name, unsigned flags);
int FsOpenOwned(const char* type, unsigned flags);
int FsMountOwned(int fs, unsigned flags, unsigned attributes);
int EventFdOwned();  ///< Of 0, and non-blocking.
int PidfdOwned(pid_t pid);
int DuplicateOwned(int fd);
int SocketPairOwned(int type, int ends[2]);  ///< Of AF_UNIX.

/// recvmsg(2) of a message that is there, or EAGAIN. Owns the fds that came with it.
ssize_t ReceiveOwned(int socket, struct msghdr* message);

/// liburing's queue_init_params and queue_exit: 0 or -errno.
int InitRingOwned(unsigned entries, struct io_uring* ring, struct io_uring_params* params);
void ExitRingOwned(struct io_uring* ring);

/// Owns an fd that this process was started with.
void AdoptFd(int fd);

/// close(2). An fd that is not owned (any more) is left alone: in a child the copy is closed
/// already, and its number may be the host's by now.
int CloseOwned(int fd);

/// For pthread_atfork(3). BeginFork waits until no section is under way and keeps new ones waiting;
/// both waits end after seconds, because a call can hang (a dead network file system) and a signal
/// handler may fork inside of a section. A child may then hold one fd too many.
void BeginFork();
void EndForkInParent();
/// Closes every owned fd, unless `keep`: then the child is a worker.
void EndForkInChild(bool keep);

}  // namespace holdfast::sys

#endif  // HOLDFAST_RUNTIME_SYS_OWNED_FDS_H_
