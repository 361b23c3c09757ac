// Tests of a directory's features, in a scratch directory below it.
#ifndef HOLDFAST_RUNTIME_DOCTOR_DIRECTORY_PROBE_H_
#define HOLDFAST_RUNTIME_DOCTOR_DIRECTORY_PROBE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "holdfast/probe.h"
#include "runtime/base/unique_fd.h"

namespace holdfast::doctor {

/// A scratch directory, removed with its content at the end. Recover removes the directory after a
/// kill of the process. Until then the directory's lock keeps a recovery away.
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
/// \error when a file cannot be made or a directory cannot be synced: saves cannot work there.
absl::Status TryDirectory(int scratch, ProbeReport* report);

}  // namespace holdfast::doctor

#endif  // HOLDFAST_RUNTIME_DOCTOR_DIRECTORY_PROBE_H_
