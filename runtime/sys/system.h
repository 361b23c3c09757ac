// The table of system calls. Every call of Holdfast goes through the table, so that a test can make
// the Nth one fail.
//
// Plain function pointers rather than an interface: the table works below the fork line (no heap,
// no constructors) and for calls inside liburing.
#ifndef HOLDFAST_RUNTIME_SYS_SYSTEM_H_
#define HOLDFAST_RUNTIME_SYS_SYSTEM_H_

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>

#include <cstddef>
#include <cstdint>

struct io_uring;
struct io_uring_cqe;
struct io_uring_params;
struct iovec;
struct statfs;
struct statx;

namespace holdfast::sys {

/// Each entry has the contract of the call of its name: -1 and errno on failure. The `uring_`
/// entries return -errno, as liburing does.
struct SystemCalls {
  int (*openat)(int directory, const char* path, int flags, mode_t mode);
  int (*close)(int fd);
  ssize_t (*read)(int fd, void* buffer, size_t bytes);
  ssize_t (*write)(int fd, const void* buffer, size_t bytes);
  ssize_t (*pread)(int fd, void* buffer, size_t bytes, off_t offset);
  ssize_t (*pwrite)(int fd, const void* buffer, size_t bytes, off_t offset);
  int (*fsync)(int fd);
  int (*sync_file_range)(int fd, off_t offset, off_t bytes, unsigned flags);
  int (*fallocate)(int fd, int mode, off_t offset, off_t bytes);
  int (*ftruncate)(int fd, off_t bytes);
  int (*fstat)(int fd, struct stat* out);
  int (*fstatat)(int directory, const char* path, struct stat* out, int flags);
  int (*fstatfs)(int fd, struct statfs* out);
  int (*futimens)(int fd, const struct timespec times[2]);
  int (*statx)(int directory, const char* path, int flags, unsigned mask, struct statx* out);
  ssize_t (*readlinkat)(int directory, const char* path, char* buffer, size_t bytes);
  int (*mkdirat)(int directory, const char* path, mode_t mode);
  int (*unlinkat)(int directory, const char* path, int flags);
  int (*renameat2)(int from_directory, const char* from, int to_directory, const char* to,
                   unsigned flags);
  ssize_t (*getdents64)(int fd, void* buffer, size_t bytes);
  int (*flock)(int fd, int operation);
  int (*fcntl)(int fd, int command, long argument);
  int (*memfd_create)(const char* name, unsigned flags);
  int (*fsopen)(const char* type, unsigned flags);
  int (*fsconfig)(int fd, unsigned command, const char* key, const void* value, int auxiliary);
  int (*fsmount)(int fd, unsigned flags, unsigned attributes);
  void* (*mmap)(void* address, size_t bytes, int protection, int flags, int fd, off_t offset);
  int (*munmap)(void* address, size_t bytes);
  int (*madvise)(void* address, size_t bytes, int advice);
  int (*poll)(struct pollfd* fds, nfds_t count, int timeout_ms);
  int (*eventfd)(unsigned initial, int flags);
  int (*pidfd_open)(pid_t pid, unsigned flags);
  ssize_t (*sendmsg)(int fd, const struct msghdr* message, int flags);
  ssize_t (*recvmsg)(int fd, struct msghdr* message, int flags);
  int (*clock_gettime)(clockid_t clock, struct timespec* out);
  int (*nanosleep)(const struct timespec* request, struct timespec* rest);
  int (*setpriority)(int which, unsigned who, int value);
  int (*ioprio_set)(int which, int who, int value);
  int (*sched_setaffinity)(pid_t pid, size_t bytes, const void* mask);
  int (*getrlimit)(int resource, struct rlimit* out);
  pid_t (*getpid)();
  /// capget(2): `header` and `data` are the kernel's structs, version 3.
  int (*capget)(void* header, void* data);
  /// Returns an error number, as pthread_create does.
  int (*thread_create)(pthread_t* out, const pthread_attr_t* attributes, void* (*body)(void*),
                       void* argument);

  // Trainer only: starting, watching and reaping workers.
  int (*socketpair)(int domain, int type, int protocol, int ends[2]);
  pid_t (*fork)();
  int (*posix_spawn)(pid_t* pid, const char* path, const posix_spawn_file_actions_t* actions,
                     const posix_spawnattr_t* attributes, char* const arguments[],
                     char* const environment[]);  // returns the errno itself
  int (*waitid)(idtype_t type, id_t id, siginfo_t* out, int options);
  int (*pidfd_send_signal)(int pidfd, int signal);
  int (*kill)(pid_t pid, int signal);

  int (*uring_queue_init_params)(unsigned entries, struct io_uring* ring,
                                 struct io_uring_params* params);
  int (*uring_register_buffers)(struct io_uring* ring, const struct iovec* buffers, unsigned count);
  int (*uring_register_files)(struct io_uring* ring, const int* fds, unsigned count);
  /// Returns the number of replaced entries.
  int (*uring_register_files_update)(struct io_uring* ring, unsigned index, const int* fds,
                                     unsigned count);
  int (*uring_submit)(struct io_uring* ring);
  /// io_uring_wait_cqe_timeout with a relative time-out; -ETIME when it passes. Submits nothing.
  int (*uring_wait)(struct io_uring* ring, struct io_uring_cqe** out, int64_t timeout_ns);
  /// Receives every transfer's result from the ring (bytes or -errno) and may change the result;
  /// `opcode` is an io::Opcode, `tag` the request's. Null in production.
  int32_t (*uring_result)(uint8_t opcode, uint64_t tag, int32_t result);
};

/// The current table. Replaced only by tests, before any thread or process of Holdfast exists.
extern SystemCalls g_system;

/// The kernel's entries.
extern const SystemCalls kKernel;

inline const SystemCalls& Sys() { return g_system; }

/// CLOCK_MONOTONIC in nanoseconds.
uint64_t NowNs();
inline constexpr uint64_t kNsPerMs = 1'000'000;
inline constexpr uint64_t kNsPerSecond = 1'000'000'000;

/// Of every file and lock that Holdfast makes in a checkpoint's directory; the umask applies.
inline constexpr mode_t kFileMode = 0666;

}  // namespace holdfast::sys

#endif  // HOLDFAST_RUNTIME_SYS_SYSTEM_H_
