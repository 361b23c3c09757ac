// holdfast-trainer: saves through the C++ interface as integrity-fuzz says, one task per line.
#include <fcntl.h>
#include <malloc.h>
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <exception>
#include <iostream>
#include <string>

#include "absl/status/status.h"
#include "tools/trainer/life.h"

namespace holdfast::trainer {
namespace {

constexpr int kFirstFreeFd = 10;
constexpr int kKeptBytes = 64 << 20;

/// Sends standard output and standard error to a file.
bool PrintTo(const char* path) {
  const int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (file < 0) return false;
  dup2(file, STDOUT_FILENO);
  dup2(file, STDERR_FILENO);
  close(file);
  return true;
}

/// As `processes.see`: puts a directory in the place of another for this process alone, which has
/// one thread, and for what it starts.
absl::Status See(const std::string& source, const std::string& target) {
  if (source.empty()) return absl::OkStatus();
  if (unshare(CLONE_NEWNS) != 0 || mount(nullptr, "/", nullptr, MS_REC | MS_SLAVE, nullptr) != 0 ||
      mount(source.c_str(), target.c_str(), nullptr, MS_BIND, nullptr) != 0) {
    return absl::ErrnoToStatus(errno, "a mount of its own");
  }
  return absl::OkStatus();
}

int Main() {
  // One state is made after the other: memory that is released is kept for the next one, which
  // needs no new pages. The half is the most that glibc takes for the threshold.
  mallopt(M_MMAP_THRESHOLD, kKeptBytes / 2);
  mallopt(M_TRIM_THRESHOLD, kKeptBytes);
  // The driver's pipe is this process's alone: workers and programs would hold it open.
  const int out = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, kFirstFreeFd);
  if (out < 0 || !PrintTo("/dev/null")) return 1;
  signal(SIGXFSZ, SIG_IGN);  // a limit of the size of files is an error, also of a worker thread
  Teller teller(out);
  teller.Tell("rest");
  for (std::string line; std::getline(std::cin, line);) {
    const Task task = ParseTask(line);
    if (!PrintTo(task.log.c_str())) return 1;
    if (const absl::Status seen = See(task.second, task.mount); !seen.ok()) {
      teller.SetWho(task.options.rank, task.job);
      teller.TellFailure("unable", 0, seen);
      return 1;
    }
    Live(task, &teller);
    if (!PrintTo("/dev/null")) return 1;
    teller.Tell("rest");
  }
  return 0;
}

}  // namespace
}  // namespace holdfast::trainer

int main() {
  try {
    return holdfast::trainer::Main();
  } catch (const std::exception& error) {
    fprintf(stderr, "holdfast-trainer: %s\n", error.what());
    return 1;
  }
}
