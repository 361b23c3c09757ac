#include "runtime/doctor/directory_probe.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cerrno>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "io_uring/queue.h"
#include "runtime/base/status.h"
#include "runtime/directory/entries.h"
#include "runtime/directory/locks.h"
#include "runtime/directory/removal.h"
#include "runtime/format/directory_names.h"
#include "runtime/sys/system.h"

namespace holdfast::doctor {

namespace {

constexpr mode_t kPrivate = 0700;
constexpr uint64_t kReserveBytes = 1u << 20;
constexpr char kDirectFile[] = "file";

absl::Status TryFile(int scratch, ProbeReport* report) {
  io::DirectOpen opened;
  const int failed =
      io::OpenDirect(scratch, kDirectFile, O_CREAT | O_EXCL | O_RDWR, 0600, true, &opened);
  if (failed != 0) return base::ErrnoStatus("make a file in", report->directory, failed);
  const base::UniqueFd fd(opened.fd);
  // Not left to RemoveDirectory, which keeps files on a disk that cannot sync.
  const absl::Cleanup removed = [scratch] { sys::Sys().unlinkat(scratch, kDirectFile, 0); };
  report->direct_io = opened.direct;
  report->memory_alignment = opened.memory_alignment;
  report->offset_alignment = opened.offset_alignment;
  report->reserve = sys::Sys().fallocate(fd.get(), 0, 0, kReserveBytes) == 0;
  if (sys::Sys().fsync(fd.get()) != 0) {
    return base::ErrnoStatus("fsync a file in", report->directory, errno);
  }
  return absl::OkStatus();
}

void TryRenames(int scratch, ProbeReport* report) {
  const sys::SystemCalls& sys = sys::Sys();
  for (const char* name : {"a", "b"}) {
    if (sys.mkdirat(scratch, name, kPrivate) != 0) return;
  }
  // The rename must fail with EEXIST; a file system without the flag returns EINVAL.
  const bool refused =
      sys.renameat2(scratch, "a", scratch, "b", RENAME_NOREPLACE) != 0 && errno == EEXIST;
  report->rename_noreplace =
      refused && sys.renameat2(scratch, "a", scratch, "c", RENAME_NOREPLACE) == 0;
  if (!report->rename_noreplace) sys.renameat2(scratch, "a", scratch, "c", 0);
  struct stat before = {};
  struct stat after = {};
  report->rename_exchange = sys.fstatat(scratch, "b", &before, AT_SYMLINK_NOFOLLOW) == 0 &&
                            sys.renameat2(scratch, "b", scratch, "c", RENAME_EXCHANGE) == 0 &&
                            sys.fstatat(scratch, "c", &after, AT_SYMLINK_NOFOLLOW) == 0 &&
                            before.st_ino == after.st_ino;
  // RemoveDirectory keeps a directory that contains directories.
  for (const char* name : {"a", "b", "c"}) sys.unlinkat(scratch, name, AT_REMOVEDIR);
}

/// Simulates a save and a recovery that meets the save.
void TryLocks(int scratch, ProbeReport* report) {
  const std::string name = format::PartialName("lock", {.high = 1, .low = 1});
  {
    auto save = directory::MakePartialDirectory(scratch, name);
    auto look = directory::OpenDirectory(scratch, name);
    if (save.ok() && look.ok() && save->locked) {
      const directory::OwnerProbe probe(scratch, /*local=*/true);
      const bool seen = probe.Look(look->get()) == directory::Owner::kTrainer;
      *save = directory::PartialDirectory{};
      report->lock = seen && probe.Look(look->get()) == directory::Owner::kNobody;
    }
  }
  sys::Sys().unlinkat(scratch, name.c_str(), AT_REMOVEDIR);
}

}  // namespace

absl::StatusOr<ScratchDirectory> ScratchDirectory::Make(int parent) {
  const std::string name = format::FormatDirectoryName(
      {.checkpoint = "holdfast-probe",
       // A hidden directory without a manifest: recovery removes its files and the directory.
       .kind = format::DirectoryKind::kFenced,
       .attempt = {.high = static_cast<uint64_t>(sys::Sys().getpid()), .low = sys::NowNs()}});
  if (sys::Sys().mkdirat(parent, name.c_str(), kPrivate) != 0) {
    return base::ErrnoStatus("make directory", name, errno);
  }
  auto fd = directory::OpenDirectory(parent, name);
  if (!fd.ok()) return fd.status();
  sys::Sys().flock(fd->get(), LOCK_SH | LOCK_NB);
  return ScratchDirectory(parent, name, *std::move(fd));
}

ScratchDirectory::~ScratchDirectory() {
  // A directory left by a failed removal keeps its hidden name. The next recovery removes the
  // directory.
  if (fd_.valid()) directory::RemoveDirectory(parent_, name_).IgnoreError();
}

absl::Status TryDirectory(int scratch, ProbeReport* report) {
  HOLDFAST_RETURN_IF_ERROR(TryFile(scratch, report));
  TryRenames(scratch, report);
  TryLocks(scratch, report);
  return directory::SyncDirectory(scratch, report->directory);
}

}  // namespace holdfast::doctor
