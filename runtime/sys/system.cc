// The kernel's entries of the table of system calls: one forwarding function each.
#include "runtime/sys/system.h"

#include <fcntl.h>
#include <liburing.h>
#include <sched.h>
#include <stdio.h>  // renameat2
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

namespace holdfast::sys {
namespace {

// Forwarders for variadic calls, for calls that the C library lacks or types differently, and for
// calls with a translated argument. Other entries point at the C library directly.
int OpenAt(int directory, const char* path, int flags, mode_t mode) {
  return ::openat(directory, path, flags, mode);
}

int Fcntl(int fd, int command, long argument) { return ::fcntl(fd, command, argument); }

int SetPriority(int which, unsigned who, int value) {
  return ::setpriority(static_cast<__priority_which_t>(which), who, value);
}

int GetLimit(int resource, struct rlimit* out) {
  return ::getrlimit(static_cast<__rlimit_resource_t>(resource), out);
}

int IoPrioritySet(int which, int who, int value) {
  return static_cast<int>(::syscall(SYS_ioprio_set, which, who, value));
}

int PidfdOpen(pid_t pid, unsigned flags) {
  return static_cast<int>(::syscall(SYS_pidfd_open, pid, flags));
}

int PidfdSendSignal(int pidfd, int signal) {
  return static_cast<int>(::syscall(SYS_pidfd_send_signal, pidfd, signal, nullptr, 0));
}

int CapGet(void* header, void* data) {
  return static_cast<int>(::syscall(SYS_capget, header, data));
}

int SetAffinity(pid_t pid, size_t bytes, const void* mask) {
  return ::sched_setaffinity(pid, bytes, static_cast<const cpu_set_t*>(mask));
}

ssize_t ReadDirectory(int fd, void* buffer, size_t bytes) {
  return static_cast<ssize_t>(::syscall(SYS_getdents64, fd, buffer, bytes));
}

// By number: the C library has these calls only since 2.36, musl has none.
int FsOpen(const char* type, unsigned flags) {
  return static_cast<int>(::syscall(SYS_fsopen, type, flags));
}

int FsConfig(int fd, unsigned command, const char* key, const void* value, int auxiliary) {
  return static_cast<int>(::syscall(SYS_fsconfig, fd, command, key, value, auxiliary));
}

int FsMount(int fd, unsigned flags, unsigned attributes) {
  return static_cast<int>(::syscall(SYS_fsmount, fd, flags, attributes));
}

int EventFd(unsigned initial, int flags) { return ::eventfd(initial, flags); }

int UringWait(struct io_uring* ring, struct io_uring_cqe** out, int64_t timeout_ns) {
  struct __kernel_timespec timeout = {.tv_sec = timeout_ns / int64_t{kNsPerSecond},
                                      .tv_nsec = timeout_ns % int64_t{kNsPerSecond}};
  return ::io_uring_wait_cqe_timeout(ring, out, timeout_ns < 0 ? nullptr : &timeout);
}

}  // namespace

constexpr SystemCalls kKernel = {
    .openat = OpenAt,
    .close = ::close,
    .read = ::read,
    .write = ::write,
    .pread = ::pread,
    .pwrite = ::pwrite,
    .fsync = ::fsync,
    .sync_file_range = ::sync_file_range,
    .fallocate = ::fallocate,
    .ftruncate = ::ftruncate,
    .fstat = ::fstat,
    .fstatat = ::fstatat,
    .fstatfs = ::fstatfs,
    .futimens = ::futimens,
    .statx = ::statx,
    .readlinkat = ::readlinkat,
    .mkdirat = ::mkdirat,
    .unlinkat = ::unlinkat,
    .renameat2 = ::renameat2,
    .getdents64 = ReadDirectory,
    .flock = ::flock,
    .fcntl = Fcntl,
    .memfd_create = ::memfd_create,
    .fsopen = FsOpen,
    .fsconfig = FsConfig,
    .fsmount = FsMount,
    .mmap = ::mmap,
    .munmap = ::munmap,
    .madvise = ::madvise,
    .poll = ::poll,
    .eventfd = EventFd,
    .pidfd_open = PidfdOpen,
    .sendmsg = ::sendmsg,
    .recvmsg = ::recvmsg,
    .clock_gettime = ::clock_gettime,
    .nanosleep = ::nanosleep,
    .setpriority = SetPriority,
    .ioprio_set = IoPrioritySet,
    .sched_setaffinity = SetAffinity,
    .getrlimit = GetLimit,
    .getpid = ::getpid,
    .capget = CapGet,
    .thread_create = ::pthread_create,
    .socketpair = ::socketpair,
    .fork = ::fork,
    .posix_spawn = ::posix_spawn,
    .waitid = ::waitid,
    .pidfd_send_signal = PidfdSendSignal,
    .kill = ::kill,
    .uring_queue_init_params = ::io_uring_queue_init_params,
    .uring_register_buffers = ::io_uring_register_buffers,
    .uring_register_files = ::io_uring_register_files,
    .uring_register_files_update = ::io_uring_register_files_update,
    .uring_submit = ::io_uring_submit,
    .uring_wait = UringWait,
    .uring_result = nullptr,
};

// A constant initializer: the table is valid before any constructor runs, in every process.
constinit SystemCalls g_system = kKernel;

uint64_t NowNs() {
  struct timespec now = {};
  // CLOCK_MONOTONIC with a valid pointer cannot fail: clock_gettime(2).
  Sys().clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * kNsPerSecond + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace holdfast::sys
