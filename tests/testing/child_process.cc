#include "tests/testing/child_process.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "runtime/base/check.h"

namespace holdfast::testing {
namespace {

constexpr int kSkipped = 77;
constexpr size_t kMessageMax = 4096;
constexpr absl::Duration kPollStep = absl::Milliseconds(2);

int StatusOf(int wait_status) {
  return WIFEXITED(wait_status) ? WEXITSTATUS(wait_status)
                                : ChildProcess::kSignalBase + WTERMSIG(wait_status);
}

int WaitForPid(pid_t pid, absl::Duration timeout) {
  int status = ChildProcess::kNotEnded;
  const bool ended = WaitFor(
      [&] {
        int wait_status = 0;
        const pid_t got = waitpid(pid, &wait_status, WNOHANG);
        if (got == pid) status = StatusOf(wait_status);
        return got == pid || (got < 0 && errno != EINTR);
      },
      timeout);
  return ended ? status : ChildProcess::kNotEnded;
}

}  // namespace

Mailbox::Mailbox() {
  HOLDFAST_CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends_) == 0,
                 "tests need a socket to talk to their children");
}

Mailbox::~Mailbox() {
  close(ends_[0]);
  close(ends_[1]);
}

void Mailbox::Send(int end, const std::string& message) {
  HOLDFAST_CHECK(send(ends_[end], message.data(), message.size(), MSG_NOSIGNAL) ==
                     static_cast<ssize_t>(message.size()),
                 "the other end of a mailbox is always open");
}

std::optional<std::string> Mailbox::Receive(int end, absl::Duration timeout) {
  pollfd entry{.fd = ends_[end], .events = POLLIN, .revents = 0};
  if (poll(&entry, 1, static_cast<int>(absl::ToInt64Milliseconds(timeout))) <= 0)
    return std::nullopt;
  std::string message(kMessageMax, '\0');
  const ssize_t got = recv(ends_[end], message.data(), message.size(), 0);
  if (got < 0) return std::nullopt;
  message.resize(static_cast<size_t>(got));
  return message;
}

ChildProcess::ChildProcess(const std::function<void()>& body) {
  std::fflush(nullptr);  // otherwise the child prints the parent's lines again
  pid_ = fork();
  HOLDFAST_CHECK(pid_ >= 0, "tests need a child process");
  if (pid_ == 0) {
    body();
    std::fflush(nullptr);
    _exit(::testing::Test::HasFailure() ? kFailed : 0);
  }
}

ChildProcess::~ChildProcess() {
  if (status_ != kNotEnded) return;
  Signal(SIGKILL);
  (void)Wait(absl::Seconds(60));
}

void ChildProcess::Signal(int signal) const {
  if (status_ == kNotEnded) SendSignal(pid_, signal);
}

int ChildProcess::Wait(absl::Duration timeout) {
  if (status_ == kNotEnded) status_ = WaitForPid(pid_, timeout);
  return status_;
}

bool SendSignal(pid_t pid, int signal) { return pid > 0 && kill(pid, signal) == 0; }

ChildResult RunInChild(const std::function<std::string()>& body, absl::Duration timeout) {
  Mailbox mailbox;
  ChildProcess child([&] {
    const std::string skipped = body();
    if (skipped.empty() || ::testing::Test::HasFailure()) return;
    mailbox.ToParent(skipped);
    std::fflush(nullptr);
    _exit(kSkipped);
  });
  ChildResult result;
  result.status = child.Wait(timeout);
  if (result.status == kSkipped)
    result.skipped = mailbox.FromChild(absl::ZeroDuration()).value_or("skipped");
  return result;
}

int RunProgram(const std::string& command) {
  const int status = std::system(absl::StrCat(command, " >/dev/null 2>&1").c_str());
  constexpr int kNoSuchProgram = 127;
  if (status == -1 || !WIFEXITED(status) || WEXITSTATUS(status) == kNoSuchProgram) return -1;
  return WEXITSTATUS(status);
}

bool IsAlive(pid_t pid) {
  std::ifstream stat(absl::StrCat("/proc/", pid, "/stat"));
  std::string line;
  if (!std::getline(stat, line)) return false;
  const size_t name_end = line.rfind(')');
  return name_end != std::string::npos && name_end + 2 < line.size() && line[name_end + 2] != 'Z' &&
         line[name_end + 2] != 'X';
}

bool WaitFor(const std::function<bool()>& condition, absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  while (!condition()) {
    if (absl::Now() >= deadline) return false;
    absl::SleepFor(kPollStep);
  }
  return true;
}

Subreaper::Subreaper() { prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); }
Subreaper::~Subreaper() { prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0); }

int Subreaper::Reap(pid_t pid, absl::Duration timeout) const { return WaitForPid(pid, timeout); }

}  // namespace holdfast::testing
