#include "runtime/directory/locks.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "runtime/base/clock.h"
#include "runtime/base/planted_bugs.h"
#include "runtime/base/status.h"
#include "runtime/directory/entries.h"
#include "runtime/directory/file_system.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/retry.h"
#include "runtime/sys/system.h"

namespace holdfast::directory {
namespace {

constexpr absl::Duration kLockPoll = absl::Milliseconds(10);
constexpr absl::Duration kHeldMax = absl::Seconds(30);
constexpr int kRoundsMax = 100;

/// 0, or the errno. EWOULDBLOCK: a conflicting lock is held.
int Flock(int fd, int operation) {
  const int result = sys::Uninterrupted([&] { return sys::Sys().flock(fd, operation | LOCK_NB); });
  return result == 0 ? 0 : errno;
}

/// Bytes of a directory's open file description.
struct Range {
  off_t begin = 0;
  off_t length = 0;  // 0: to the end
};
constexpr Range kAll;
constexpr Range kTrainerByte = {.begin = 0, .length = 1};
constexpr Range kInUseByte = {.begin = 1, .length = 1};

struct flock RecordLock(short type, Range range) {
  struct flock lock = {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = range.begin;
  lock.l_len = range.length;
  return lock;
}

/// 0, or the errno. The lock is a read lock, because a directory cannot be opened for writing. A
/// read lock suffices: recovery only queries.
int LockShared(int fd, Range range) {
  struct flock lock = RecordLock(F_RDLCK, range);
  return sys::Sys().fcntl(fd, F_OFD_SETLK, reinterpret_cast<long>(&lock)) == 0 ? 0 : errno;
}

/// Queries whether a write lock would be refused; a query needs no fd open for writing. Returns 0,
/// EWOULDBLOCK (another open file description holds a lock in the range) or another errno.
int QueryLock(int fd, Range range) {
  struct flock lock = RecordLock(F_WRLCK, range);
  if (sys::Sys().fcntl(fd, F_OFD_GETLK, reinterpret_cast<long>(&lock)) != 0) return errno;
  return lock.l_type == F_UNLCK ? 0 : EWOULDBLOCK;
}

/// True when another open file description holds a trainer's lock. False also when the query fails.
bool TrainerHolds(int fd) { return QueryLock(fd, kAll) == EWOULDBLOCK; }

bool MeansNoLocks(int error_number) {
  return error_number == ENOSYS || error_number == EOPNOTSUPP || error_number == EINVAL ||
         error_number == ENOLCK;
}

}  // namespace

absl::StatusOr<PartialDirectory> MakePartialDirectory(int parent, const std::string& name) {
  HOLDFAST_ASSIGN_OR_RETURN(const FileSystem file_system, IdentifyFileSystem(parent));
  const absl::Time deadline = base::Now() + kHeldMax;
  // Recovery trusts the locks of local file systems, so a missing lock there is an error: the save
  // could be taken for a dead one.
  const auto tolerable = [&file_system](int error_number) {
    return !file_system.local && MeansNoLocks(error_number);
  };
  for (int round = 0; round < kRoundsMax; ++round) {
    auto in_use = MakeDirectory(parent, name);
    if (absl::IsNotFound(in_use.status())) continue;
    if (!in_use.ok()) return in_use.status();
    auto trainer = OpenDirectory(parent, name);
    if (absl::IsNotFound(trainer.status())) continue;
    if (!trainer.ok()) return trainer.status();
    PartialDirectory directory = {.in_use = *std::move(in_use), .trainer = *std::move(trainer)};

    // The trainer's lock first: with the other lock alone, a recovery would take this save for an
    // orphan's.
    const int no_trainer_lock = LockShared(directory.trainer.get(), kAll);
    // EINVAL: this kernel or file system lacks such locks. Recovery gets the same error and then
    // leaves directories in use alone.
    if (no_trainer_lock != 0 && no_trainer_lock != EINVAL && !tolerable(no_trainer_lock)) {
      return base::ErrnoStatus("lock", name, no_trainer_lock);
    }
    int no_lock = Flock(directory.in_use.get(), LOCK_SH);
    while (no_lock == EWOULDBLOCK && base::Now() < deadline) {
      Pause(kLockPoll);
      no_lock = Flock(directory.in_use.get(), LOCK_SH);
    }
    if (no_lock == EWOULDBLOCK) {
      return absl::UnavailableError(absl::StrCat("lock ", name, ": a recovery has held it for ",
                                                 absl::FormatDuration(kHeldMax),
                                                 "; try again when it is done"));
    }
    if (no_lock != 0 && !tolerable(no_lock)) return base::ErrnoStatus("lock", name, no_lock);
    directory.locked = no_lock == 0;

    // A recovery between open and lock has promoted, removed or fenced the directory. The name no
    // longer refers to the locked directory, and this save's lock would have no effect.
    if (NameRefersTo(parent, name, directory.in_use.get()) &&
        NameRefersTo(parent, name, directory.trainer.get())) {
      return directory;
    }
  }
  return absl::UnavailableError(
      absl::StrCat("make directory ", name, ": it was taken away ", kRoundsMax, " times"));
}

absl::StatusOr<PartialDirectory> OpenFrameworkDirectory(int parent, const std::string& name) {
  HOLDFAST_ASSIGN_OR_RETURN(const FileSystem file_system, IdentifyFileSystem(parent));
  PartialDirectory directory;
  for (base::UniqueFd* fd : {&directory.in_use, &directory.trainer}) {
    // A symbolic link in the framework's path is followed, as the framework does.
    *fd =
        base::UniqueFd(sys::OpenOwned(parent, name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0));
    if (!fd->valid()) return base::ErrnoStatus("open directory", name, errno);
  }
  // The trainer's lock first, as above.
  int no_lock = LockShared(directory.trainer.get(), kTrainerByte);
  if (no_lock == 0) no_lock = LockShared(directory.in_use.get(), kInUseByte);
  if (no_lock != 0 && no_lock != EINVAL && (file_system.local || !MeansNoLocks(no_lock))) {
    return base::ErrnoStatus("lock", name, no_lock);
  }
  directory.locked = no_lock == 0;
  return directory;
}

absl::StatusOr<PartialDirectory> LockUnused(int parent, const std::string& name) {
  HOLDFAST_ASSIGN_OR_RETURN(const FileSystem file_system, IdentifyFileSystem(parent));
  if (!file_system.local) {
    return absl::FailedPreconditionError(
        absl::StrCat("lock ", name, ": locks on ", file_system.name, " reach one machine only"));
  }
  // New descriptions: a dead worker's ring shares the description of the save's own lock, and a
  // lock through that description would succeed before the last transfer has landed.
  PartialDirectory directory;
  HOLDFAST_ASSIGN_OR_RETURN(directory.trainer, OpenDirectory(parent, name));
  HOLDFAST_ASSIGN_OR_RETURN(directory.in_use, OpenDirectory(parent, name));
  // The trainer's lock first: with the other lock alone, a recovery would take this process for an
  // orphan.
  int no_lock = LockShared(directory.trainer.get(), kAll);
  if (no_lock == 0) no_lock = Flock(directory.in_use.get(), LOCK_EX);
  if (no_lock == EWOULDBLOCK)
    return absl::UnavailableError(absl::StrCat("lock ", name, ": in use"));
  if (no_lock != 0) return base::ErrnoStatus("lock", name, no_lock);
  // A recovery may have promoted, fenced or removed the directory before the lock.
  if (!NameRefersTo(parent, name, directory.in_use.get()) ||
      !NameRefersTo(parent, name, directory.trainer.get())) {
    return absl::NotFoundError(absl::StrCat("lock ", name, ": it was taken away"));
  }
  directory.locked = true;
  return directory;
}

Owner OwnerOfSaves(int directory, bool local) {
  const int trainer = QueryLock(directory, kTrainerByte);
  if (trainer == EWOULDBLOCK) return Owner::kTrainer;
  const int in_use = QueryLock(directory, kInUseByte);
  if (in_use == EWOULDBLOCK) return local ? Owner::kOrphan : Owner::kTrainer;
  return trainer == 0 && in_use == 0 && local ? Owner::kNobody : Owner::kUnknown;
}

OwnerProbe::OwnerProbe(int parent, bool local)
    : local_(local || base::Planted(base::Bug::kTrustEveryLock)) {
  auto holder = OpenDirectory(parent, ".");
  auto asker = OpenDirectory(parent, ".");
  if (!holder.ok() || !asker.ok()) return;
  sees_trainers_ = LockShared(holder->get(), kAll) == 0 && TrainerHolds(asker->get());
}

Owner OwnerProbe::Look(int directory) const {
  const int held = Flock(directory, LOCK_EX);
  if (base::Planted(base::Bug::kIgnoreLocks)) return Owner::kNobody;
  if (held == 0) return local_ ? Owner::kNobody : Owner::kUnknown;
  if (held != EWOULDBLOCK) return Owner::kUnknown;
  // A process of this machine uses the directory. On a shared file system a rank's trainer may run
  // on another machine: the owner is never called an orphan.
  if (!local_ || !sees_trainers_ || TrainerHolds(directory)) return Owner::kTrainer;
  return Owner::kOrphan;
}

absl::Status TakeTurn(int parent, absl::string_view path, absl::Duration timeout) {
  const absl::Time deadline = base::Now() + timeout;
  while (true) {
    const int held = Flock(parent, LOCK_EX);
    // No locks here: recoveries run concurrently, and their steps tolerate each other.
    if (held != EWOULDBLOCK) return absl::OkStatus();
    if (base::Now() >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("recover ", path, ": another recovery of it was not done within ",
                       absl::FormatDuration(timeout)));
    }
    Pause(kLockPoll);
  }
}

}  // namespace holdfast::directory
