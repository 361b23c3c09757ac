// Ends a process by SIGKILL at a chosen system call.
#ifndef HOLDFAST_TESTS_CRASH_KILL_SWITCH_H_
#define HOLDFAST_TESTS_CRASH_KILL_SWITCH_H_

namespace holdfast::testing {

/// Makes the process count the calls that change state or take a lock, and die right before the
/// `call`th, counting from 1. For a forked child: replaces the table of system calls.
void ArmKillSwitch(int call);

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_CRASH_KILL_SWITCH_H_
