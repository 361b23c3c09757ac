// Sources: memfd_create(2), fcntl(2) on file seals, tmpfs(5), the kernel's
// admin-guide/mm/transhuge.rst on shared memory.
#include "runtime/staging/page_source.h"

#include <fcntl.h>
#include <linux/mount.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "absl/strings/str_cat.h"
#include "holdfast/pod.h"
#include "runtime/base/memfd.h"
#include "runtime/base/status.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"

#ifndef MFD_HUGE_2MB
#define MFD_HUGE_2MB (21U << 26)
#endif

namespace holdfast::staging {
namespace {

constexpr uint64_t kTwoMiB = uint64_t{2} << 20;

absl::StatusOr<base::UniqueFd> OpenMemfd(unsigned flags) {
  return base::CreateMemfd("holdfast-staging", kArenaObject, flags);
}

absl::StatusOr<base::UniqueFd> OpenHugetlb() {
  // 2 MiB by name: the default size may be 1 GiB, or 512 MiB on machines with 64 KiB pages.
  absl::StatusOr<base::UniqueFd> fd = OpenMemfd(MFD_HUGETLB | MFD_HUGE_2MB);
  return fd.ok() ? std::move(fd) : OpenMemfd(MFD_HUGETLB);
}

absl::Status Configure(int fd, unsigned command, const char* key, const char* value) {
  if (sys::Sys().fsconfig(fd, command, key, value, 0) == 0) return absl::OkStatus();
  return base::ErrnoStatus(absl::StrCat("fsconfig ", key == nullptr ? "create" : key), "tmpfs",
                           errno);
}

// A private tmpfs without a mount point: invisible to other processes and gone with the last fd.
absl::StatusOr<base::UniqueFd> OpenDetachedTmpfs(uint64_t bytes) {
  const base::UniqueFd fs(sys::FsOpenOwned("tmpfs", FSOPEN_CLOEXEC));
  if (!fs.valid()) return base::ErrnoStatus("fsopen", "tmpfs", errno);
  // The default, half of the machine's memory, may be less than `bytes`.
  const std::string size = absl::StrCat(bytes);
  HOLDFAST_RETURN_IF_ERROR(Configure(fs.get(), FSCONFIG_SET_STRING, "huge", "always"));
  HOLDFAST_RETURN_IF_ERROR(Configure(fs.get(), FSCONFIG_SET_STRING, "size", size.c_str()));
  HOLDFAST_RETURN_IF_ERROR(Configure(fs.get(), FSCONFIG_CMD_CREATE, nullptr, nullptr));
  const base::UniqueFd mount(sys::FsMountOwned(
      fs.get(), FSMOUNT_CLOEXEC, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC));
  if (!mount.valid()) return base::ErrnoStatus("fsmount", "tmpfs", errno);
  const int fd = sys::OpenOwned(mount.get(), ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) return base::ErrnoStatus("open O_TMPFILE", "tmpfs", errno);
  return base::UniqueFd(fd);
}

absl::StatusOr<base::UniqueFd> OpenFile(PageRung rung, uint64_t bytes) {
  switch (rung) {
    case PageRung::kHugetlb:
      return OpenHugetlb();
    case PageRung::kTmpfsHuge:
      return OpenDetachedTmpfs(AlignUp(bytes, kTwoMiB));
    default:
      return OpenMemfd(0);
  }
}

absl::StatusOr<uint64_t> PageBytes(PageRung rung, int fd) {
  switch (rung) {
    case PageRung::kHugetlb: {
      struct stat info = {};
      if (sys::Sys().fstat(fd, &info) != 0) return base::ErrnoStatus("fstat", kArenaObject, errno);
      return static_cast<uint64_t>(info.st_blksize);  // hugetlbfs reports its page size there
    }
    case PageRung::kTmpfsHuge:
    case PageRung::kMadviseHuge:
      return kTwoMiB;
    default:
      return static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  }
}

// ftruncate beyond RLIMIT_FSIZE sends SIGXFSZ, which ends the process.
absl::Status CheckFileSizeLimit(uint64_t bytes) {
  struct rlimit limit = {};
  if (sys::Sys().getrlimit(RLIMIT_FSIZE, &limit) != 0)
    return base::ErrnoStatus("getrlimit", "RLIMIT_FSIZE", errno);
  if (limit.rlim_cur == RLIM_INFINITY || bytes <= limit.rlim_cur) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("size ", kArenaObject, ": ", bytes,
                                                   " bytes are above the file size limit of ",
                                                   limit.rlim_cur, "; raise it (ulimit -f)"));
}

}  // namespace

const char* NameOf(PageRung rung) {
  switch (rung) {
    case PageRung::kAuto:
      return "auto";
    case PageRung::kHugetlb:
      return "memfd hugetlb";
    case PageRung::kTmpfsHuge:
      return "tmpfs huge=always";
    case PageRung::kMadviseHuge:
      return "memfd madvise";
    case PageRung::kSmall:
      return "memfd small pages";
  }
  return "unknown";
}

absl::StatusOr<PageSource> OpenPages(PageRung rung, uint64_t bytes) {
  PageSource source;
  HOLDFAST_ASSIGN_OR_RETURN(source.fd, OpenFile(rung, bytes));
  HOLDFAST_ASSIGN_OR_RETURN(source.page_bytes, PageBytes(rung, source.fd.get()));
  source.bytes = AlignUp(bytes, source.page_bytes);
  HOLDFAST_RETURN_IF_ERROR(CheckFileSizeLimit(source.bytes));
  if (sys::Sys().ftruncate(source.fd.get(), static_cast<off_t>(source.bytes)) != 0)
    return base::ErrnoStatus("ftruncate", kArenaObject, errno);
  if (rung == PageRung::kTmpfsHuge) return source;  // tmpfs files have no seals
  // Unsealed, another holder of the fd could shrink the file and turn an access into a SIGBUS.
  if (sys::Sys().fcntl(source.fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) !=
      0) {
    return base::ErrnoStatus("seal", kArenaObject, errno);
  }
  return source;
}

}  // namespace holdfast::staging
