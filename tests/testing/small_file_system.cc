#include "tests/testing/small_file_system.h"

#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statfs.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "runtime/base/status.h"
#include "tests/testing/child_process.h"

namespace holdfast::testing {

SmallFileSystem::SmallFileSystem() : path_(absl::StrCat(scratch_.path(), "/mounted")) {
  (void)mkdir(path_.c_str(), 0755);  // a failure shows up in mount
}

SmallFileSystem::~SmallFileSystem() {
  // Lazily: a process with an open file must not keep the directory.
  if (mounted_ && umount2(path_.c_str(), 0) != 0) (void)umount2(path_.c_str(), MNT_DETACH);
}

absl::StatusOr<std::unique_ptr<SmallFileSystem>> SmallFileSystem::Tmpfs(uint64_t bytes) {
  std::unique_ptr<SmallFileSystem> made(new SmallFileSystem());
  made->type_ = "tmpfs";
  if (mount("tmpfs", made->path_.c_str(), "tmpfs", 0, absl::StrCat("size=", bytes).c_str()) != 0)
    return base::ErrnoStatus("mount tmpfs at", made->path_, errno);
  made->mounted_ = true;
  return made;
}

absl::Status SmallFileSystem::MountBy(const std::string& command) {
  if (RunProgram(command) != 0)
    return absl::UnavailableError(absl::StrCat("no such mount here: ", command));
  mounted_ = true;
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<SmallFileSystem>> SmallFileSystem::Loop(const std::string& make,
                                                                       const std::string& type,
                                                                       uint64_t bytes,
                                                                       const std::string& options) {
  std::unique_ptr<SmallFileSystem> made(new SmallFileSystem());
  made->type_ = type;
  const std::string image = absl::StrCat(made->scratch_.path(), "/image");
  // mkfs.btrfs fails while another program unmounts a loop device. Below 0: no such program.
  int formatted = -1;
  const auto format = [&] { return (formatted = RunProgram(absl::StrCat(make, " ", image))) <= 0; };
  if (RunProgram(absl::StrCat("truncate -s ", bytes, " ", image)) != 0 ||
      !WaitFor(format, absl::Seconds(2)) || formatted != 0) {
    return absl::UnavailableError(absl::StrCat(make, " cannot be run here"));
  }
  const absl::Status mounted =
      made->MountBy(absl::StrCat("mount -o loop", options.empty() ? "" : ",", options, " -t ", type,
                                 " ", image, " ", made->path_));
  if (!mounted.ok()) return mounted;
  return made;
}

absl::StatusOr<std::unique_ptr<SmallFileSystem>> SmallFileSystem::Fuse(const std::string& options,
                                                                       std::string below) {
  std::unique_ptr<SmallFileSystem> made(new SmallFileSystem());
  made->type_ = "fuse";
  if (below.empty()) {
    below = absl::StrCat(made->scratch_.path(), "/below");
    (void)mkdir(below.c_str(), 0755);
  }
  const absl::Status mounted =
      made->MountBy(absl::StrCat("bindfs ", options, " ", below, " ", made->path_));
  if (!mounted.ok()) return mounted;
  return made;
}

absl::StatusOr<std::unique_ptr<SmallFileSystem>> SmallFileSystem::Overlay() {
  std::unique_ptr<SmallFileSystem> made(new SmallFileSystem());
  made->type_ = "overlay";
  const std::string& root = made->scratch_.path();
  for (const char* name : {"lower", "upper", "work"})
    (void)mkdir(absl::StrCat(root, "/", name).c_str(), 0755);
  const absl::Status mounted =
      made->MountBy(absl::StrCat("mount -t overlay -o lowerdir=", root, "/lower,upperdir=", root,
                                 "/upper,workdir=", root, "/work none ", made->path_));
  if (!mounted.ok()) return mounted;
  return made;
}

absl::Status SmallFileSystem::SetReadOnly(bool on) {
  const unsigned long read_only = MS_RDONLY;
  const unsigned long flags = MS_REMOUNT | (on ? read_only : 0);
  if (mount(nullptr, path_.c_str(), nullptr, flags, nullptr) != 0)
    return base::ErrnoStatus("remount", path_, errno);
  return absl::OkStatus();
}

uint64_t SmallFileSystem::FreeBytes() const {
  struct statfs info {};
  if (statfs(path_.c_str(), &info) != 0) return 0;
  return static_cast<uint64_t>(info.f_bavail) * static_cast<uint64_t>(info.f_bsize);
}

}  // namespace holdfast::testing
