// Settings of a worker's process or thread, made once, before its first job.
//
// Not in the table of system calls: no failure here needs a reaction of the save. A failed call
// leaves a worker with other priorities or visibility, never wrong bytes. Below the fork line.
#ifndef HOLDFAST_RUNTIME_SYS_PROCESS_H_
#define HOLDFAST_RUNTIME_SYS_PROCESS_H_

#include <sched.h>
#include <signal.h>

#include <cstdint>

namespace holdfast::sys {

/// Leaves the caller's session: signals of a terminal or a job manager to the trainer's process
/// group do not reach this process.
void LeaveSession();

/// Sets the name in `ps` and `top`, cut to 15 bytes.
void SetThreadName(const char* name);

/// Resets every signal to its default, then ignores the signals that would end or stop a save: the
/// process ends with its job or by SIGKILL. Unblocks all signals.
void SettleProcessSignals();

/// For a thread of the host: blocks every signal but the faults of the thread itself. SIGXFSZ and
/// SIGPIPE, sent to the writing thread, then become errnos only.
void BlockThreadSignals(sigset_t* before);
void RestoreThreadSignals(const sigset_t& before);

/// Moves `keep` to fd 3 and closes every other fd. Standard input, output and error become
/// /dev/null, so that pipes of the trainer do not stay open here. Returns the new fd of `keep`, or
/// -1.
int CloseAllBut(int keep);

/// Returns random bits of the kernel. Takes no fd, as std::random_device may.
uint64_t RandomBits();

void SetUmask(uint32_t mask);

/// Returns the nice value of the calling thread.
int NiceNow();

/// Reads the affinity of the calling thread. Returns false if unknown.
bool AffinityNow(cpu_set_t* out);

/// Ends the process at once, without atexit handlers: in a forked child they belong to the host.
[[noreturn]] void ExitNow(int status);

}  // namespace holdfast::sys

#endif  // HOLDFAST_RUNTIME_SYS_PROCESS_H_
