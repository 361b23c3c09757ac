// Processes of a test's own: trainers that are killed, hosts with limits that must die with them.
#ifndef HOLDFAST_TESTS_TESTING_CHILD_PROCESS_H_
#define HOLDFAST_TESTS_TESTING_CHILD_PROCESS_H_

#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>

#include "absl/time/time.h"

namespace holdfast::testing {

/// Messages between a test and a child of its own; made before the fork, used from both sides.
class Mailbox {
 public:
  Mailbox();
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;
  void ToParent(const std::string& message) { Send(1, message); }
  void ToChild(const std::string& message) { Send(0, message); }
  /// Nothing when the time has passed.
  std::optional<std::string> FromChild(absl::Duration timeout) { return Receive(0, timeout); }
  std::optional<std::string> FromParent(absl::Duration timeout) { return Receive(1, timeout); }

 private:
  void Send(int end, const std::string& message);
  std::optional<std::string> Receive(int end, absl::Duration timeout);
  int ends_[2] = {-1, -1};
};

/// A forked child that runs a function. Expectations of gtest may be used in it: what they say is
/// printed, and its exit status is 1 when one has failed.
class ChildProcess {
 public:
  static constexpr int kNotEnded = -1;
  static constexpr int kFailed = 1;
  static constexpr int kSignalBase = 128;  ///< As shells have it: 137 is "killed by SIGKILL".

  explicit ChildProcess(const std::function<void()>& body);
  /// Kills what has not ended, and waits for it.
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  pid_t pid() const { return pid_; }
  void Signal(int signal) const;
  /// The exit status, kSignalBase + signal, or kNotEnded.
  int Wait(absl::Duration timeout);

 private:
  pid_t pid_ = -1;
  int status_ = kNotEnded;
};

/// What became of RunInChild: `skipped` says why nothing was shown.
struct ChildResult {
  int status = ChildProcess::kNotEnded;
  std::string skipped;
};

/// Runs `body` in a child and waits for it. `body` returns an empty string, or why it cannot run
/// here.
ChildResult RunInChild(const std::function<std::string()>& body,
                       absl::Duration timeout = absl::Seconds(120));

/// Runs a program found in PATH, silently. Its exit status; -1 if there is no such program.
int RunProgram(const std::string& command);

/// Whether a process of that id exists, a zombie not counted.
bool IsAlive(pid_t pid);

/// Polls `condition` until it holds. False when the time has passed first.
bool WaitFor(const std::function<bool()>& condition, absl::Duration timeout = absl::Seconds(60));

/// While one lives, processes whose parent dies become children of this process, which can then
/// wait for them.
class Subreaper {
 public:
  Subreaper();
  ~Subreaper();
  Subreaper(const Subreaper&) = delete;
  Subreaper& operator=(const Subreaper&) = delete;
  /// Waits for an orphan. Its status as ChildProcess::Wait has it.
  int Reap(pid_t pid, absl::Duration timeout) const;
};

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_TESTING_CHILD_PROCESS_H_
