// Who is at work in a partial directory: the locks that a save holds on it, and how recovery reads
// them.
//
// Two locks of different kinds lie on the partial directory itself, so that there is no file to
// forget:
//  - *in use*: flock(LOCK_SH), on an open file description that trainer and worker share (the fd
//    travels with the job). Held until both are gone, for every rank.
//  - *trainer lives*: an open-file-description read lock (F_OFD_SETLK, fcntl(2)), on a description
//    that never leaves the trainer. Held until the trainer is gone.
// In use, but no trainer lives: what works there is an orphan. A process's death releases both
// kinds, however it died. README.md tells why these two.
#ifndef HOLDFAST_RUNTIME_DIRECTORY_LOCKS_H_
#define HOLDFAST_RUNTIME_DIRECTORY_LOCKS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "runtime/base/unique_fd.h"

namespace holdfast::directory {

/// A partial directory that this process's trainer owns a share of.
struct PartialDirectory {
  base::UniqueFd in_use;   ///< Goes to the worker; keep it until the worker was joined.
  base::UniqueFd trainer;  ///< Stays here, as long as `in_use`. A forked worker closes its copy.
  bool locked = false;     ///< False where the file system has no such locks: see Recover.
};

/// Makes `name` below `parent`, or opens it if another rank has made it, and locks it. When it
/// returns, the name refers to what was locked: a recovery that takes the directory away first is
/// answered by making it anew.
/// \error kUnavailable when a recovery keeps holding it for 30 seconds; errors of mkdir, open and
/// locks.
absl::StatusOr<PartialDirectory> MakePartialDirectory(int parent, const std::string& name);

/// Who is at work in a directory.
enum class Owner {
  kNobody,   ///< And nobody can come in while the `exclusive` lock is held.
  kTrainer,  ///< A trainer of some rank lives: a running save.
  kOrphan,   ///< Workers only; all their trainers are dead.
  kUnknown,  ///< The locks of this file system do not tell.
};

/// Looks at the locks of directories of one parent.
class OwnerProbe {
 public:
  /// `local`: see FileSystem. Tries out on `parent` whether the trainers' kind of lock can be seen.
  OwnerProbe(int parent, bool local);

  /// For kNobody, `directory` (opened by this process alone) holds LOCK_EX afterwards, until it is
  /// closed. kUnknown on a file system that is not local: nobody holds it on this machine.
  Owner Look(int directory) const;

 private:
  bool local_;
  bool sees_trainers_ = false;
};

/// Serializes recoveries of one parent directory, by flock(LOCK_EX) on it. Where there is no such
/// lock it does nothing. \error kDeadlineExceeded
absl::Status TakeTurn(int parent, absl::string_view path, absl::Duration timeout);

}  // namespace holdfast::directory

#endif  // HOLDFAST_RUNTIME_DIRECTORY_LOCKS_H_
