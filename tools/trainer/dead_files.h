// Files of saves whose worker has died: no byte in them is one that their save did not have.
#ifndef HOLDFAST_TOOLS_TRAINER_DEAD_FILES_H_
#define HOLDFAST_TOOLS_TRAINER_DEAD_FILES_H_

#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tools/trainer/events.h"
#include "tools/trainer/task.h"

namespace holdfast::trainer {

/// Holds descriptors of data files: their directory is removed, and a ring's transfers may outlive
/// their process. Bytes that such a transfer reads too late are in the file.
///
/// \threadsafety All methods may be called from any thread.
class DeadFiles {
 public:
  DeadFiles(const Task& task, Teller* teller) : task_(task), teller_(teller) {}
  ~DeadFiles();
  DeadFiles(const DeadFiles&) = delete;
  DeadFiles& operator=(const DeadFiles&) = delete;

  /// Opens the files that the save `number` of this process has made so far. Call it before the
  /// end of its worker.
  void Hold(uint64_t number);

  /// For tests of the look: writes foreign bytes into each held file.
  void Spoil();

  /// Waits for transfers into each held file and tells its content: bytes of pages that are not all
  /// zero, and bytes that are neither zero nor the save's. Closes the files.
  void Look(const std::vector<uint64_t>& pool);

  /// The same for a file that the driver holds. \error errors of open.
  absl::Status LookAt(const DeadFile& file, const std::vector<uint64_t>& pool);

 private:
  struct Held {
    int fd = -1;
    DeadFile file;
  };

  void Tell(int fd, const DeadFile& file, const std::vector<uint64_t>& pool);

  const Task& task_;
  Teller* const teller_;
  std::mutex mutex_;
  std::vector<Held> held_;
};

}  // namespace holdfast::trainer

#endif  // HOLDFAST_TOOLS_TRAINER_DEAD_FILES_H_
