#include "runtime/sys/process.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <initializer_list>

namespace holdfast::sys {
namespace {

constexpr int kKeptFd = 3;

// Sent to process trees by terminals, batch systems and service managers, or by the kernel for an
// error that is also an errno.
constexpr int kIgnored[] = {SIGINT,  SIGTERM, SIGHUP,  SIGQUIT, SIGPIPE, SIGXFSZ,
                            SIGUSR1, SIGUSR2, SIGALRM, SIGTSTP, SIGTTIN, SIGTTOU};

// Without /proc (before Linux 5.9) the trainer's fds stay open during the job.
void CloseFrom(int first) {
  // Raw: older C libraries lack the wrapper.
  if (::syscall(SYS_close_range, first, ~0u, 0) == 0) return;
  // Before Linux 5.9. No opendir(3): a forked child has no heap. Nor may it have a free descriptor.
  ::close(first);
  const int folder = ::open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return;
  alignas(dirent64) char entries[4096];
  ssize_t bytes;
  while ((bytes = ::syscall(SYS_getdents64, folder, entries, sizeof(entries))) > 0) {
    for (ssize_t at = 0; at < bytes;) {
      const auto* const entry = reinterpret_cast<const dirent64*>(entries + at);
      at += entry->d_reclen;
      int fd = 0;  // stays 0 for "." and ".."
      for (const char* digit = entry->d_name; *digit >= '0' && *digit <= '9'; ++digit)
        fd = fd * 10 + (*digit - '0');
      if (fd >= first && fd != folder) ::close(fd);
    }
  }
  ::close(folder);
}

}  // namespace

void LeaveSession() { ::setsid(); }

void SetThreadName(const char* name) { ::prctl(PR_SET_NAME, name, 0, 0, 0); }

void SettleProcessSignals() {
  // A forked child inherits the host's handlers, whose interpreter or framework does not exist
  // here.
  struct sigaction action = {};
  action.sa_handler = SIG_DFL;
  for (int signal = 1; signal < _NSIG; ++signal) ::sigaction(signal, &action, nullptr);
  action.sa_handler = SIG_IGN;
  for (const int signal : kIgnored) ::sigaction(signal, &action, nullptr);
  sigset_t none;
  ::sigemptyset(&none);
  ::pthread_sigmask(SIG_SETMASK, &none, nullptr);
}

void BlockThreadSignals(sigset_t* before) {
  sigset_t all;
  ::sigfillset(&all);
  for (const int own : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGABRT}) ::sigdelset(&all, own);
  ::pthread_sigmask(SIG_SETMASK, &all, before);
}

void RestoreThreadSignals(const sigset_t& before) {
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

int CloseAllBut(int keep) {
  if (keep != kKeptFd) {
    if (::dup3(keep, kKeptFd, O_CLOEXEC) < 0) return -1;
  }
  CloseFrom(kKeptFd + 1);
  const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int standard : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    // Without a /dev/null (an empty chroot) close the standard fds.
    if (null < 0) ::close(standard);
    if (null >= 0 && null != standard) ::dup2(null, standard);
  }
  if (null > kKeptFd) ::close(null);
  return kKeptFd;
}

uint64_t RandomBits() {
  uint64_t bits = 0;
  if (::syscall(SYS_getrandom, &bits, sizeof(bits), 0) == sizeof(bits)) return bits;
  // A filter refuses the call, or the kernel is older than 3.17.
  timespec now = {};
  ::clock_gettime(CLOCK_REALTIME, &now);
  bits = static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
  return (bits ^ static_cast<uint64_t>(::getpid()) << 32) * 0x9e3779b97f4a7c15u;
}

void SetUmask(uint32_t mask) { ::umask(static_cast<mode_t>(mask & 0777)); }

int NiceNow() {
  errno = 0;
  const int value = ::getpriority(PRIO_PROCESS, 0);
  return value == -1 && errno != 0 ? 0 : value;
}

bool AffinityNow(cpu_set_t* out) {
  CPU_ZERO(out);
  return ::sched_getaffinity(0, sizeof(*out), out) == 0;
}

void ExitNow(int status) { ::_exit(status); }

}  // namespace holdfast::sys
