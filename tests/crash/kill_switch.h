// Ends a process by SIGKILL at a chosen system call.
#ifndef HOLDFAST_TESTS_CRASH_KILL_SWITCH_H_
#define HOLDFAST_TESTS_CRASH_KILL_SWITCH_H_

#include <string>

namespace holdfast::testing {

/// Directory of the campaigns, in memory if possible. The campaigns kill processes and model power
/// cuts; a real disk would only cost minutes.
std::string Scratch();

/// Makes the process count the calls that change state or take a lock, and die right before the
/// `call`th, counting from 1. For a forked child: replaces the table of system calls.
void ArmKillSwitch(int call);

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_CRASH_KILL_SWITCH_H_
