// Saves of the runtime itself, in this process: trainers and workers are threads of it, and make
// their calls through the table of system calls.
#ifndef HOLDFAST_TESTS_CRASH_REAL_WRITER_H_
#define HOLDFAST_TESTS_CRASH_REAL_WRITER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "holdfast/checkpointer.h"
#include "tests/testing/small_checkpoint.h"

namespace holdfast::testing {

/// While it lives, directories cannot be exchanged, as on some file systems.
class WithoutExchange {
 public:
  explicit WithoutExchange(bool active);
  ~WithoutExchange();
  WithoutExchange(const WithoutExchange&) = delete;
  WithoutExchange& operator=(const WithoutExchange&) = delete;

 private:
  const bool active_;
  int (*const outer_)(int, const char*, int, const char*, unsigned);
};

/// One rank that saves what a `SmallRank` has.
class RealRank {
 public:
  /// Begins the save of rank `rank` of `like` in `directory`.
  RealRank(const std::string& directory, const SmallRank& like, uint32_t rank, bool replace,
           absl::Duration time_liveness_max = absl::Seconds(30));

  /// Waits for the end of the save; returns whether it is durable.
  bool Wait();
  /// Waits until nothing is removed in the background any more.
  void Flush();

 private:
  std::unique_ptr<Checkpointer> checkpointer_;
  absl::StatusOr<SaveHandle> save_;
};

struct RealSave {
  std::string directory;
  SmallRank like;  ///< Name, attempt, world size, step; every rank is saved.
  bool replace = false;
  bool exchange = true;  ///< False: the file system cannot exchange two directories.
  absl::Duration time_liveness_max = absl::Seconds(30);
  std::function<void()> acknowledge;  ///< Called when rank 0's save is durable.
};

/// Saves all ranks, side by side.
void SaveRanks(const RealSave& save);

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_CRASH_REAL_WRITER_H_
