// Which fds of this process are Holdfast's: a child that the host forks closes its copies of them,
// so that it keeps neither the arena, nor a socket, nor a lock alive.
//
// Below the fork line, because a worker that is a thread of the host has fds here, too. In a worker
// that is a process of its own the table is of no use and does no harm.
#ifndef HOLDFAST_RUNTIME_SYS_OWNED_FDS_H_
#define HOLDFAST_RUNTIME_SYS_OWNED_FDS_H_

#include <sys/types.h>

namespace holdfast::sys {

/// Lets a forked child close its copy of `fd`. Negative fds are ignored.
void OwnFd(int fd);

/// Takes that back, before the fd is closed or handed away. False if it is not owned (any more): in
/// a child, whose copy is closed already and whose number may be somebody else's by now.
bool DisownFd(int fd);

/// Closes every owned fd. For a forked child, which has one thread.
void CloseOwnedFds();

/// openat(2) and close(2) of an owned fd, through the table of system calls.
int OpenOwned(int directory, const char* path, int flags, mode_t mode);
int CloseOwned(int fd);

}  // namespace holdfast::sys

#endif  // HOLDFAST_RUNTIME_SYS_OWNED_FDS_H_
