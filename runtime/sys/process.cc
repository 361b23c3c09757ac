#include "runtime/sys/process.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <initializer_list>

namespace holdfast::sys {
namespace {

constexpr int kKeptFd = 3;

// Sent to process trees by terminals, batch systems and service managers, or by the kernel for an
// error that is also an errno.
constexpr int kIgnored[] = {SIGINT,  SIGTERM, SIGHUP,  SIGQUIT, SIGPIPE, SIGXFSZ,
                            SIGUSR1, SIGUSR2, SIGALRM, SIGTSTP, SIGTTIN, SIGTTOU};

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
  // Raw: older C libraries lack the wrapper. Without the call (before Linux 5.9) the trainer's fds
  // stay open during the job, as in any foreign fork.
  ::syscall(SYS_close_range, kKeptFd + 1, ~0u, 0);
  const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int standard : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    // Without a /dev/null (an empty chroot) close the standard fds.
    if (null < 0) ::close(standard);
    if (null >= 0 && null != standard) ::dup2(null, standard);
  }
  if (null > kKeptFd) ::close(null);
  return kKeptFd;
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
