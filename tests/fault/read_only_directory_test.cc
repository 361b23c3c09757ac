// A directory without write permission. Root may write anywhere, so the tests drop root.
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "holdfast/errors.h"
#include "holdfast/recovery.h"
#include "tests/testing/child_process.h"
#include "tests/testing/save_test.h"

namespace holdfast::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

constexpr uid_t kNobody = 65534;
constexpr mode_t kReadOnly = 0555;
constexpr mode_t kWritable = 0755;

class ReadOnlyDirectory : public LauncherTest {
 protected:
  /// In a child without root that owns the directory and so can change the mode.
  void RunAsNobody(const std::function<void()>& body) {
    const ChildResult result = RunInChild([&]() -> std::string {
      if (geteuid() != 0) {
        body();
        return "";
      }
      if (chown(directory().c_str(), kNobody, kNobody) != 0 || setegid(kNobody) != 0 ||
          seteuid(kNobody) != 0) {
        return "root cannot be given up";
      }
      const char* program = getenv("HOLDFAST_WORKER");
      if (program == nullptr || access(program, X_OK) != 0) return "nobody cannot run the worker";
      body();
      return "";
    });
    if (!result.skipped.empty()) GTEST_SKIP() << result.skipped;
    EXPECT_EQ(result.status, 0);
  }
};
INSTANTIATE_TEST_SUITE_P(All, ReadOnlyDirectory, kEveryLauncher, LauncherName);

TEST_P(ReadOnlyDirectory, BetweenSavesIsAnErrorUntilWritable) {
  RunAsNobody([this] {
    SavePrevious(directory());
    const auto checkpointer = Make(Options());
    ASSERT_NE(checkpointer, nullptr);
    ASSERT_EQ(chmod(directory().c_str(), kReadOnly), 0);
    const auto report = Save(checkpointer.get(), "step-1", TrainingState::Uniform(2, 100'000, 1));
    EXPECT_TRUE(absl::IsPermissionDenied(report.status())) << report.status();
    EXPECT_EQ(ErrnoOf(report.status()), EACCES);
    EXPECT_THAT(std::string(report.status().message()),
                AllOf(HasSubstr("step-1"), HasSubstr("Permission denied")));
    ASSERT_EQ(chmod(directory().c_str(), kWritable), 0);
    ExpectRecovered(checkpointer.get());
  });
}

TEST_P(ReadOnlyDirectory, DuringASaveIsAnErrorAndLeavesAnEmptyDirectoryToRecovery) {
  RunAsNobody([this] {
    SavePrevious(directory());
    CheckpointerOptions options = Options();
    options.qos.bytes_per_second_max = 4u << 20;  // its second chunk comes a second later
    const auto checkpointer = Make(options);
    ASSERT_NE(checkpointer, nullptr);
    const auto handle = Begin(checkpointer.get(), "step-1", TrainingState::Uniform(4, 2u << 20, 1));
    ASSERT_TRUE(handle.ok()) << handle.status();
    ASSERT_TRUE(WaitFor([&] { return handle->progress().bytes_written > 0; }));
    // Its own directory stays writable: the last rename is refused.
    ASSERT_EQ(chmod(directory().c_str(), kReadOnly), 0);
    const auto report = handle->WaitDurable(kLong);
    EXPECT_TRUE(absl::IsPermissionDenied(report.status())) << report.status();
    EXPECT_EQ(ErrnoOf(report.status()), EACCES);
    ExpectMemoryBack(checkpointer.get());
    const std::vector<std::string> names = Names(directory());
    ASSERT_THAT(names, ElementsAre("previous", StartsWith("step-1.partial-")));
    EXPECT_THAT(Names(absl::StrCat(directory(), "/", names[1])), IsEmpty());
    ASSERT_EQ(chmod(directory().c_str(), kWritable), 0);
    const auto recovered = Recover(directory(), RecoveryOptions());
    ASSERT_TRUE(recovered.ok()) << recovered.status();
    EXPECT_THAT(recovered->removed, ElementsAre(names[1]));
    ExpectRecovered(checkpointer.get());
  });
}

}  // namespace
}  // namespace holdfast::testing
