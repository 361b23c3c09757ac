#include "runtime/directory/file_system.h"

#include <sys/stat.h>
#include <sys/vfs.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "runtime/base/clock.h"
#include "runtime/base/status.h"
#include "runtime/sys/retry.h"
#include "runtime/sys/system.h"

namespace holdfast::directory {
namespace {

struct Known {
  uint32_t magic;
  const char* name;
  bool local;
};

constexpr uint32_t kFuseMagic = 0x65735546;
// Inode numbers are drawn anew whenever an entry is read from the disk.
constexpr uint32_t kExfatMagic = 0x2011bab0;
constexpr uint32_t kVfatMagic = 0x00004d44;

// statfs(2) and linux/magic.h. Locality is a promise about locks, so only certain file systems get
// it. FUSE and virtiofs share one magic number, and file locks reach the server only on its
// request.
constexpr Known kKnown[] = {
    {0x0000ef53, "ext4", true},  // ext2 and ext3 have the same number
    {0x58465342, "xfs", true},       {0x9123683e, "btrfs", true},   {0x01021994, "tmpfs", true},
    {0x858458f6, "ramfs", true},     {0xf2f52010, "f2fs", true},    {0x2fc12fc1, "zfs", true},
    {0xca451a4e, "bcachefs", true},  {0x794c7630, "overlay", true}, {0x3153464a, "jfs", true},
    {0x52654973, "reiserfs", true},  {kExfatMagic, "exfat", true},  {kVfatMagic, "vfat", true},
    {0x00006969, "nfs", false},      {0xff534d42, "cifs", false},   {0xfe534d42, "smb2", false},
    {kFuseMagic, "fuse", false},     {0x01021997, "9p", false},     {0x00c36400, "ceph", false},
    {0x0bd00bd0, "lustre", false},   {0x47504653, "gpfs", false},   {0x19830326, "beegfs", false},
    {0x01161970, "gfs2", false},     {0x7461636f, "ocfs2", false},  {0x5346414f, "afs", false},
    {0x6b414653, "afs", false},      {0x73757245, "coda", false},   {0xaad7aaea, "panfs", false},
    {0x20030528, "orangefs", false},
};

}  // namespace

absl::StatusOr<FileSystem> IdentifyFileSystem(int fd) {
  struct statfs found = {};
  const int result = sys::Uninterrupted([&] { return sys::Sys().fstatfs(fd, &found); });
  if (result != 0) return base::ErrnoStatus("statfs", "directory", errno);
  FileSystem file_system;
  file_system.free_bytes =
      static_cast<uint64_t>(found.f_bavail) *
      static_cast<uint64_t>(found.f_frsize != 0 ? found.f_frsize : found.f_bsize);
  // f_type is a signed word on some machines: compare the 32 bits that magic numbers have.
  const uint32_t magic = static_cast<uint32_t>(found.f_type);
  for (const Known& known : kKnown) {
    if (known.magic != magic) continue;
    file_system.name = known.name;
    file_system.local = known.local;
    file_system.stable_inodes = known.local && magic != kExfatMagic && magic != kVfatMagic;
    // FUSE waits for the answer to a request that the server has read, even for a dying process
    // (fs/fuse/dev.c, request_wait_answer).
    file_system.writes_end_with_process = known.local || magic == kFuseMagic;
    return file_system;
  }
  file_system.name = absl::StrCat("0x", absl::Hex(magic));
  return file_system;
}

absl::Time TimeOnFileSystem(int directory) {
  struct stat found = {};
  if (sys::Sys().futimens(directory, nullptr) != 0 || sys::Sys().fstat(directory, &found) != 0) {
    return base::WallTime();
  }
  return absl::TimeFromTimespec(found.st_mtim);
}

}  // namespace holdfast::directory
