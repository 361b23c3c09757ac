// The locks that a save holds on its partial directory, and how recovery reads them.
//
// The partial directory itself carries two locks of different kinds, so no lock file can be left
// over:
// - *in use*: flock(LOCK_SH), on an open file description that trainer and worker share (the fd
//   travels with the job). Held until both processes have ended, for every rank.
// - *trainer lives*: an open-file-description read lock (F_OFD_SETLK, fcntl(2)), on a description
//   that never leaves the trainer. Held until the trainer has ended.
//
// A directory in use without a living trainer belongs to an orphan worker. The death of a process
// releases its locks of both kinds. README.md gives the reasons for these two kinds.
//
// A framework's own directory has both as open-file-description read locks: the byte kTrainerByte
// says *trainer lives*, kInUseByte *in use*. flock(2) on that directory is the framework's turn to
// commit.
#ifndef HOLDFAST_RUNTIME_DIRECTORY_LOCKS_H_
#define HOLDFAST_RUNTIME_DIRECTORY_LOCKS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "runtime/base/unique_fd.h"

namespace holdfast::directory {

/// A partial directory with this trainer's locks.
struct PartialDirectory {
  base::UniqueFd in_use;  ///< Passed to the worker; kept until the worker was joined.
  /// Kept by the trainer as long as `in_use`. A forked worker closes its copy.
  base::UniqueFd trainer;
  bool locked = false;  ///< False where the file system lacks such locks: see Recover.
};

/// Makes `name` below `parent`, or opens the directory that another rank made, and locks it. On
/// return the name refers to the locked directory. A directory that a recovery took away before the
/// lock is made anew.
/// \error kUnavailable when a recovery keeps holding it for 30 seconds; errors of mkdir, open and
/// locks.
absl::StatusOr<PartialDirectory> MakePartialDirectory(int parent, const std::string& name);

/// Opens a framework's directory for a save's files, with this trainer's locks.
/// \error errors of open and locks.
absl::StatusOr<PartialDirectory> OpenFrameworkDirectory(int parent, const std::string& name);

/// Locks the partial directory `name` below `parent` for its removal, against ranks and recoveries.
/// Only for a save whose ranks have all failed: a rank that has yet to begin holds no lock.
/// \error kUnavailable while a trainer, a worker, the ring of a dead worker or a recovery holds a
/// lock; kNotFound; kFailedPrecondition where locks do not reach every possible writer; errors of
/// open and locks.
absl::StatusOr<PartialDirectory> LockUnused(int parent, const std::string& name);

/// The owner of a directory at work.
enum class Owner {
  kNobody,   ///< No process. In a partial directory the `exclusive` lock keeps it so.
  kTrainer,  ///< A trainer of any rank lives: a running save.
  kOrphan,   ///< Only workers; all their trainers have ended.
  kUnknown,  ///< The file system's locks give no answer.
};

/// Reads the locks of directories of one parent.
class OwnerProbe {
 public:
  /// `local`: see FileSystem. Tests on `parent` whether trainers' locks are visible.
  OwnerProbe(int parent, bool local);

  /// Returns the owner. For kNobody, `directory` (opened by this process alone) holds LOCK_EX until
  /// closed. Returns kUnknown on a file system that is not local when no process of this machine
  /// holds a lock.
  Owner Look(int directory) const;

 private:
  bool local_;
  bool sees_trainers_ = false;
};

/// Returns the owner of the saves into a framework's directory. Takes no lock.
Owner OwnerOfSaves(int directory, bool local);

/// Serializes recoveries of one parent directory, by flock(LOCK_EX) on the parent. Does nothing
/// where the file system lacks such a lock.
/// \error kDeadlineExceeded
absl::Status TakeTurn(int parent, absl::string_view path, absl::Duration timeout);

}  // namespace holdfast::directory

#endif  // HOLDFAST_RUNTIME_DIRECTORY_LOCKS_H_
