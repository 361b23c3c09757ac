// Settings of the calling process or thread that a worker makes once, before its first job.
//
// Not in the table of system calls: none of them can fail in a way that a save must react to (what
// fails leaves a worker that is less polite or less hidden, never one that writes wrong bytes).
// Below the fork line.
#ifndef HOLDFAST_RUNTIME_SYS_PROCESS_H_
#define HOLDFAST_RUNTIME_SYS_PROCESS_H_

#include <sched.h>
#include <signal.h>

#include <cstdint>

namespace holdfast::sys {

/// Leaves the caller's session, so that what a terminal or a job manager sends to the trainer's
/// process group does not reach this process.
void LeaveSession();

/// The name in `ps` and `top`, cut to 15 bytes.
void SetThreadName(const char* name);

/// Every signal gets its default, then those that would end or stop a save in flight are ignored:
/// the process ends when its job ends, or by SIGKILL. Nothing stays blocked.
void SettleProcessSignals();

/// For a thread of the host: blocks every signal but those of the thread's own faults. SIGXFSZ and
/// SIGPIPE, which the kernel sends to the writing thread, then become mere errnos.
void BlockThreadSignals(sigset_t* before);
void RestoreThreadSignals(const sigset_t& before);

/// Moves `keep` to fd 3 and closes every other fd; standard input, output and error become
/// /dev/null, so that pipes of the trainer's do not live on here. Returns the new fd of `keep`, or
/// -1.
int CloseAllBut(int keep);

void SetUmask(uint32_t mask);

/// The nice value of the calling thread.
int NiceNow();

/// The CPUs that the calling thread may run on. False if unknown.
bool AffinityNow(cpu_set_t* out);

/// Ends the process at once: no atexit handlers, which belong to the host in a forked child.
[[noreturn]] void ExitNow(int status);

}  // namespace holdfast::sys

#endif  // HOLDFAST_RUNTIME_SYS_PROCESS_H_
