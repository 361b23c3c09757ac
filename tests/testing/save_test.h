// The fixture of tests that break saves: no resource is left behind, earlier checkpoints are
// unchanged, and the next save works.
#ifndef HOLDFAST_TESTS_TESTING_SAVE_TEST_H_
#define HOLDFAST_TESTS_TESTING_SAVE_TEST_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "tests/testing/holdings.h"
#include "tests/testing/settings.h"
#include "tests/testing/training_state.h"

namespace holdfast::testing {

inline constexpr absl::Duration kLong = absl::Seconds(120);

inline std::string Text(const absl::Status& status) { return std::string(status.message()); }

/// Sets RLIMIT_FSIZE of this process and of its children (a kept worker).
void LimitFileSize(uint64_t bytes);

/// TearDown expects no fd, shared mapping or child beyond those at SetUp: every Checkpointer of the
/// test must be destroyed by then.
class SaveTest : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  /// Directory of the checkpoints, unless a test uses its own file system.
  const std::string& directory() const { return scratch_->path(); }
  static std::unique_ptr<Checkpointer> Make(const CheckpointerOptions& options);
  /// SaveAsync and WaitDurable.
  static absl::StatusOr<SaveReport> Save(Checkpointer* checkpointer, const std::string& name,
                                         const TrainingState& state, uint64_t step = 1);
  static absl::StatusOr<SaveHandle> Begin(Checkpointer* checkpointer, const std::string& name,
                                          const TrainingState& state, uint64_t step = 1);

  /// Saves a checkpoint "previous" that no later step may touch.
  void SavePrevious(const std::string& directory);
  /// Expects a whole "previous", and no entry in the directory but "previous" and `others`.
  void ExpectPreviousAnd(const std::string& directory, const std::vector<std::string>& others);
  static void ExpectSound(const std::string& path);
  /// Expects no held staging memory after the end of every save.
  static void ExpectMemoryBack(Checkpointer* checkpointer);
  /// Makes these checks after a failed save into `directory`: no files are left, and a small save
  /// works.
  void ExpectRecovered(Checkpointer* checkpointer);

  static std::vector<std::string> Names(const std::string& directory);

 private:
  std::unique_ptr<ScratchDirectory> scratch_;
  Holdings before_;
};

/// The same fixture for each launcher.
class LauncherTest : public SaveTest, public ::testing::WithParamInterface<Launcher> {
 protected:
  CheckpointerOptions Options() const { return Options(directory()); }
  CheckpointerOptions Options(const std::string& where) const {
    CheckpointerOptions options = SmallOptions(where);
    options.staging.arena_bytes = 32u << 20;
    options.launcher = GetParam();
    return options;
  }
  bool IsThread() const { return GetParam() == Launcher::kThread; }
};

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_TESTING_SAVE_TEST_H_
