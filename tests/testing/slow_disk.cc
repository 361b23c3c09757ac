#include "tests/testing/slow_disk.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "runtime/base/status.h"
#include "tests/testing/child_process.h"

namespace holdfast::testing {
namespace {

namespace fs = std::filesystem;

// Root of the groups: the block controller's tree (version 1) or the unified tree (version 2).
constexpr char kVersion1[] = "/sys/fs/cgroup/blkio";
constexpr char kVersion2[] = "/sys/fs/cgroup";

constexpr uint64_t kBytes = 128u << 20;  // of the file system

bool Write(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text << std::flush;
  return file.good();
}

// The group of this process in the tree of `controller` ("" for version 2), from its root.
std::string OwnGroup(const std::string& controller) {
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() == 3 && parts[1] == controller) return parts[2];
  }
  return "/";
}

}  // namespace

absl::StatusOr<std::unique_ptr<SlowDisk>> SlowDisk::Mount(uint64_t bytes_per_second) {
  std::unique_ptr<SlowDisk> made(new SlowDisk());
  auto mounted = SmallFileSystem::Loop("mkfs.ext4 -q -F", "ext4", kBytes);
  if (!mounted.ok()) return mounted.status();
  made->file_system_ = *std::move(mounted);
  made->path_ = made->file_system_->path() + "/run";
  struct stat found {};
  if (mkdir(made->path_.c_str(), 0755) != 0 || stat(made->path_.c_str(), &found) != 0)
    return base::ErrnoStatus("mkdir", made->path_, errno);
  const std::string disk = absl::StrCat(major(found.st_dev), ":", minor(found.st_dev));
  const bool version1 = fs::exists(kVersion1);
  const std::string root = version1 ? kVersion1 : kVersion2;
  made->before_ = root + OwnGroup(version1 ? "blkio" : "");
  made->group_ = absl::StrCat(root, "/holdfast-test-", getpid());
  std::error_code error;
  fs::create_directory(made->group_, error);
  bool limited = !error;
  if (version1) {
    limited = limited && Write(made->group_ + "/blkio.throttle.write_bps_device",
                               absl::StrCat(disk, " ", bytes_per_second));
  } else {
    limited = limited && Write(root + "/cgroup.subtree_control", "+io") &&
              Write(made->group_ + "/io.max", absl::StrCat(disk, " wbps=", bytes_per_second));
  }
  if (!limited || !Write(made->group_ + "/cgroup.procs", "0")) {
    return absl::UnavailableError("no control group with an I/O limit can be made here");
  }
  return made;
}

SlowDisk::~SlowDisk() {
  (void)Write(before_ + "/cgroup.procs", "0");
  // A group can be removed after its last process was reaped.
  WaitFor([this] { return rmdir(group_.c_str()) == 0 || errno == ENOENT; }, absl::Seconds(10));
}

}  // namespace holdfast::testing
