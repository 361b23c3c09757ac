// What one directory can do, found by trying in a directory of its own below it.
#ifndef HOLDFAST_RUNTIME_CHECKPOINTER_DIRECTORY_PROBE_H_
#define HOLDFAST_RUNTIME_CHECKPOINTER_DIRECTORY_PROBE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "holdfast/probe.h"
#include "runtime/base/unique_fd.h"

namespace holdfast::checkpointer {

/// A directory to try things in, removed at the end with all that is in it. Its name is one that
/// Recover removes, should this process be killed; its lock keeps a recovery away until then.
class ScratchDirectory {
 public:
  static absl::StatusOr<ScratchDirectory> Make(int parent);
  ~ScratchDirectory();
  ScratchDirectory(ScratchDirectory&&) = default;
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(ScratchDirectory&&) = delete;
  int fd() const { return fd_.get(); }

 private:
  ScratchDirectory(int parent, std::string name, base::UniqueFd fd)
      : parent_(parent), name_(std::move(name)), fd_(std::move(fd)) {}
  int parent_;
  std::string name_;
  base::UniqueFd fd_;
};

/// Fills direct_io, the alignments, reserve, rename_noreplace, rename_exchange and lock.
/// \error when a file cannot be made or a directory cannot be synced there: nothing works then.
absl::Status TryDirectory(int scratch, ProbeReport* report);

}  // namespace holdfast::checkpointer

#endif  // HOLDFAST_RUNTIME_CHECKPOINTER_DIRECTORY_PROBE_H_
