// Child processes of a test: trainers to be killed, and hosts with limits that must end with the
// host.
#ifndef HOLDFAST_TESTS_TESTING_CHILD_PROCESS_H_
#define HOLDFAST_TESTS_TESTING_CHILD_PROCESS_H_

#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>

#include "absl/time/time.h"

namespace holdfast::testing {

/// Messages between a test and its child; made before the fork, used from both sides.
class Mailbox {
 public:
  Mailbox();
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;
  void ToParent(const std::string& message) { Send(1, message); }
  void ToChild(const std::string& message) { Send(0, message); }
  /// Returns nothing when the time has passed.
  std::optional<std::string> FromChild(absl::Duration timeout) { return Receive(0, timeout); }
  std::optional<std::string> FromParent(absl::Duration timeout) { return Receive(1, timeout); }

 private:
  void Send(int end, const std::string& message);
  std::optional<std::string> Receive(int end, absl::Duration timeout);
  int ends_[2] = {-1, -1};
};

/// A forked child that runs a function. gtest expectations may be used in the child: failures are
/// printed, and the exit status is then 1.
class ChildProcess {
 public:
  static constexpr int kNotEnded = -1;
  static constexpr int kFailed = 1;
  static constexpr int kSignalBase = 128;  ///< As in shells: 137 is "killed by SIGKILL".

  explicit ChildProcess(const std::function<void()>& body);
  /// Kills the child if still running, and waits for it.
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  pid_t pid() const { return pid_; }
  void Signal(int signal) const;
  /// Returns the exit status, kSignalBase + signal, or kNotEnded.
  int Wait(absl::Duration timeout);

 private:
  pid_t pid_ = -1;
  int status_ = kNotEnded;
};

/// Result of RunInChild; `skipped` is the reason for a missing result.
struct ChildResult {
  int status = ChildProcess::kNotEnded;
  std::string skipped;
};

/// Runs `body` in a child and waits for its end. `body` returns an empty string, or the reason for
/// a skip.
ChildResult RunInChild(const std::function<std::string()>& body,
                       absl::Duration timeout = absl::Seconds(120));

/// Runs a program found in PATH, silently. Returns its exit status, or -1 without such a program.
int RunProgram(const std::string& command);

/// Returns true if a process of that id exists and is no zombie.
bool IsAlive(pid_t pid);

/// Sends a signal to one process. Returns false if the call fails, and sends nothing for ids that
/// name groups: the id of a worker that has ended is 0, which is the test's own group.
bool SendSignal(pid_t pid, int signal);

/// Polls `condition` until true. Returns false when the time has passed first.
bool WaitFor(const std::function<bool()>& condition, absl::Duration timeout = absl::Seconds(60));

/// Adopts orphans during its lifetime: a process whose parent dies becomes a child of this process,
/// which can wait for its end.
class Subreaper {
 public:
  Subreaper();
  ~Subreaper();
  Subreaper(const Subreaper&) = delete;
  Subreaper& operator=(const Subreaper&) = delete;
  /// Waits for an orphan. Returns its status as ChildProcess::Wait.
  int Reap(pid_t pid, absl::Duration timeout) const;
};

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_TESTING_CHILD_PROCESS_H_
