#include "tools/demo/worker_process.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include "absl/strings/str_cat.h"

// glibc 2.36 forgot to say so itself.
extern "C" {
#include <sys/pidfd.h>
}

namespace holdfast::demo {
namespace {

/// The parent of a process; 0 if it is gone.
pid_t ParentOf(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  std::string text;
  std::getline(file, text);
  // "pid (name) state parent ...": the name may hold anything, so count from its end.
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos || name_end + 4 >= text.size()) return 0;
  return static_cast<pid_t>(std::atol(text.c_str() + name_end + 4));
}

/// The only child, or 0 if there is none or more than one.
pid_t OnlyChild() {
  pid_t found = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const std::string name = entry.path().filename();
    if (!std::all_of(name.begin(), name.end(), [](unsigned char c) { return std::isdigit(c); })) {
      continue;
    }
    if (ParentOf(name) != getpid()) continue;
    if (found != 0) return 0;
    found = static_cast<pid_t>(std::atol(name.c_str()));
  }
  return found;
}

}  // namespace

WorkerProcess::WorkerProcess() : pid_(OnlyChild()) {
  if (pid_ != 0) pidfd_ = pidfd_open(pid_, 0);
}

WorkerProcess::~WorkerProcess() {
  if (pidfd_ >= 0) close(pidfd_);
}

void WorkerProcess::Stop() const { pidfd_send_signal(pidfd_, SIGSTOP, nullptr, 0); }

void WorkerProcess::Continue() const { pidfd_send_signal(pidfd_, SIGCONT, nullptr, 0); }

uint64_t WorkerProcess::BytesSubmitted() const {
  std::ifstream file(absl::StrCat("/proc/", pid_, "/io"));
  std::string key;
  uint64_t value = 0;
  uint64_t submitted = 0;
  // Direct writes count as write_bytes when they are submitted, buffered ones by their system call.
  while (file >> key >> value) {
    if (key == "write_bytes:" || key == "wchar:") submitted = std::max(submitted, value);
  }
  return submitted;
}

}  // namespace holdfast::demo
