#include "tests/testing/holdings.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace holdfast::testing {
namespace {

namespace fs = std::filesystem;

std::map<int, std::string> OpenFds(const std::string& process) {
  std::map<int, std::string> fds;
  std::error_code error;
  const std::string directory = process + "/fd";
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    const std::string target = fs::read_symlink(entry.path(), error).string();
    // The fd of this listing.
    if (error || absl::EndsWith(target, "/fd")) continue;
    fds[std::atoi(entry.path().filename().c_str())] = target;
  }
  return fds;
}

// The parent's pid is the second field behind the name, which may hold any character.
pid_t ParentOf(const fs::path& process) {
  std::ifstream stat(process / "stat");
  std::string line;
  if (!std::getline(stat, line)) return -1;
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return -1;
  const std::vector<std::string> fields = absl::StrSplit(line.substr(name_end + 2), ' ');
  return fields.size() > 1 ? static_cast<pid_t>(std::atoi(fields[1].c_str())) : -1;
}

std::vector<pid_t> ChildrenOf(pid_t parent) {
  std::vector<pid_t> children;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator("/proc", error)) {
    int pid = 0;
    if (absl::SimpleAtoi(entry.path().filename().string(), &pid) &&
        ParentOf(entry.path()) == parent)
      children.push_back(static_cast<pid_t>(pid));
  }
  return children;
}

}  // namespace

Holdings Holdings::OfSelf() { return Of(getpid()); }

Holdings Holdings::Of(pid_t pid) {
  const std::string process = absl::StrCat("/proc/", pid);
  Holdings now;
  now.fds = OpenFds(process);
  std::string line;
  std::ifstream maps(process + "/maps");
  while (std::getline(maps, line)) {
    ++now.mappings;
    const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(' ', 2));
    if (fields.size() > 1 && fields[1].size() == 4 && fields[1][3] == 's')
      now.shared_mappings.push_back(line);
  }
  std::ifstream status(process + "/status");
  while (std::getline(status, line)) {
    constexpr uint64_t kKiB = 1024;
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const uint64_t bytes = std::strtoull(line.c_str() + colon + 1, nullptr, 10) * kKiB;
    if (absl::StartsWith(line, "RssAnon:")) now.resident_private_bytes = bytes;
    if (absl::StartsWith(line, "RssShmem:")) now.resident_shared_bytes = bytes;
  }
  now.children = ChildrenOf(pid);
  return now;
}

std::vector<std::string> Holdings::Beyond(const Holdings& before) const {
  std::vector<std::string> more;
  for (const auto& [fd, target] : fds) {
    const auto was = before.fds.find(fd);
    if (was == before.fds.end() || was->second != target)
      more.push_back(absl::StrCat("fd ", fd, " on ", target));
  }
  for (const std::string& mapping : shared_mappings) {
    if (std::count(before.shared_mappings.begin(), before.shared_mappings.end(), mapping) == 0)
      more.push_back(absl::StrCat("mapping ", mapping));
  }
  for (const pid_t child : children) {
    if (std::count(before.children.begin(), before.children.end(), child) == 0)
      more.push_back(absl::StrCat("child process ", child));
  }
  return more;
}

}  // namespace holdfast::testing
