// A save of a single file over an older one, killed before every call that changes the directory:
// the old file or the new one stands there, whole and proven, and nothing stays behind.
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "holdfast/recovery.h"
#include "holdfast/verify.h"
#include "runtime/directory/single_files.h"
#include "tests/crash/kill_switch.h"
#include "tests/testing/checkpoint_files.h"
#include "tests/testing/save_test.h"
#include "tests/testing/single_file.h"

namespace holdfast::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AnyOf;
using ::testing::IsEmpty;

constexpr AttemptId kOld = {.high = 1, .low = 9};
constexpr AttemptId kNew = {.high = 2, .low = 8};
constexpr char kFile[] = "last.pt";
constexpr int kCallsMax = 2000;

std::string Archive(const AttemptId& attempt) {
  return SingleFileArchive(attempt, std::string(30'000, attempt == kOld ? 'o' : 'n'));
}

absl::Status SaveFile(const std::string& directory, const AttemptId& attempt) {
  CheckpointerOptions options;
  options.directory = directory;
  options.staging.arena_bytes = 16u << 20;
  options.launcher = Launcher::kThread;
  options.engine = EngineRung::kPwrite;
  const auto checkpointer = Checkpointer::Create(options);
  if (!checkpointer.ok()) return checkpointer.status();
  const std::string contents = Archive(attempt);
  const SavePlan plan = SingleFilePlan(kFile, contents);
  const auto handle = (*checkpointer)
                          ->SaveAsync({.name = kFile,
                                       .step = 1,
                                       .plan = &plan,
                                       .replace = true,
                                       .attempt = attempt,
                                       .single_file = true});
  return handle.ok() ? handle->WaitDurable(kLong).status() : handle.status();
}

class SingleFileCrash : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::remove_all(root_);
    fs::create_directories(root_ + "/template");
    // In a child: a process with threads of its own forks none of the children below.
    ASSERT_FALSE(Killed([&] { return SaveFile(root_ + "/template", kOld).ok(); }));
  }
  void TearDown() override { fs::remove_all(root_); }

  /// Runs `body` in a child; returns whether a signal has ended the child.
  static bool Killed(const std::function<bool()>& body) {
    const pid_t child = fork();
    if (child == 0) _exit(body() ? 0 : 1);
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
    return WIFSIGNALED(status);
  }
  std::string Fresh() const {
    const std::string directory = root_ + "/run";
    fs::remove_all(directory);
    fs::copy(root_ + "/template", directory);
    return directory;
  }
  static AttemptId ExpectSound(const std::string& directory) {
    const auto report = Verify(directory + "/" + kFile, {});
    EXPECT_TRUE(report.ok()) << report.status();
    if (!report.ok()) return {};
    EXPECT_EQ(report->verdict, Verdict::kSound) << report->note;
    EXPECT_EQ(report->checked, "XXH3-128 digests of the seal");
    EXPECT_THAT(report->attempt, AnyOf(kOld, kNew));
    // EXPECT_EQ would print both files.
    EXPECT_TRUE(ReadFileBytes(directory + "/" + kFile) == Archive(report->attempt));
    return report->attempt;
  }
  static size_t Entries(const std::string& directory) {
    return static_cast<size_t>(
        std::distance(fs::directory_iterator(directory), fs::directory_iterator()));
  }

  const std::string root_ = absl::StrCat(Scratch(), "/single-file-", getpid());
};

TEST_F(SingleFileCrash, AtEveryCallOneWholeFileIsProvenAndARecoveryLeavesNothingElse) {
  int old_files = 0;
  int new_files = 0;
  int promoted = 0;
  for (int call = 1;; ++call) {
    ASSERT_LT(call, kCallsMax);
    SCOPED_TRACE(absl::StrCat("killed before call ", call));
    const std::string directory = Fresh();
    const bool killed = Killed([&] {
      ArmKillSwitch(call);
      return SaveFile(directory, kNew).ok();
    });
    const AttemptId before = ExpectSound(directory);
    ++(before == kOld ? old_files : new_files);
    const auto recovered = Recover(directory, {.wait_for_orphans = absl::ZeroDuration()});
    ASSERT_TRUE(recovered.ok()) << recovered.status();
    EXPECT_THAT(recovered->kept_incomplete, IsEmpty());
    promoted += static_cast<int>(recovered->promoted.size());
    const AttemptId after = ExpectSound(directory);
    EXPECT_TRUE(after == before || !recovered->promoted.empty());
    EXPECT_EQ(Entries(directory), 2u);
    if (HasFailure() || !killed) break;
  }
  EXPECT_GT(old_files, 5);
  EXPECT_GT(new_files, 1);
  EXPECT_GT(promoted, 0);
}

}  // namespace
}  // namespace holdfast::testing
