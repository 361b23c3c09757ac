// A failed fsync: its error, and the report of a second attempt.
// tests/unit/worker/second_attempt_test.cc tests the worker's steps.
#include <cerrno>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "runtime/sys/system.h"
#include "tests/testing/checkpoint_files.h"
#include "tests/testing/child_process.h"
#include "tests/testing/path_of.h"
#include "tests/testing/save_test.h"
#include "tests/testing/slow_device.h"

namespace holdfast::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// For files of tensors, in this process and in later forked children.
int g_failures_left = 0;

int FailingFsync(int fd) {
  if (g_failures_left == 0 || !PathOf(fd).ends_with(".safetensors.tmp"))
    return sys::kKernel.fsync(fd);
  --g_failures_left;
  errno = EIO;
  return -1;
}

class FailedFsync : public LauncherTest {
 protected:
  void SetUp() override {
    LauncherTest::SetUp();
    SavePrevious(directory());
  }
  void TearDown() override {
    sys::g_system = sys::kKernel;
    LauncherTest::TearDown();
  }
  absl::StatusOr<SaveReport> SaveWith(Checkpointer* checkpointer, int failures, uint32_t tensors) {
    g_failures_left = failures;
    sys::g_system.fsync = FailingFsync;
    auto report = Save(checkpointer, "step-1", TrainingState::Uniform(tensors, 4u << 20, 1));
    sys::g_system = sys::kKernel;
    return report;
  }
};
// Launchers whose workers inherit this process's table of system calls.
INSTANTIATE_TEST_SUITE_P(All, FailedFsync, ::testing::Values(Launcher::kFork, Launcher::kThread),
                         LauncherName);

TEST_P(FailedFsync, IsMadeGoodByASecondAttempt) {
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  const auto report = SaveWith(checkpointer.get(), 1, 2);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->write_attempts, 2u);
  ExpectSound(report->path);
  const auto next = Save(checkpointer.get(), "step-2", TrainingState::Uniform(2, 4u << 20, 2));
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(next->write_attempts, 1u);
  ExpectPreviousAnd(directory(), {"step-1", "step-2"});
}

TEST_P(FailedFsync, TwiceEndsTheSaveAndTheNextSaveWorks) {
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  const auto report = SaveWith(checkpointer.get(), 2, 2);
  EXPECT_TRUE(absl::IsDataLoss(report.status())) << report.status();
  EXPECT_THAT(Text(report.status()),
              AllOf(HasSubstr("fsync"), HasSubstr("step-1"), HasSubstr(".safetensors"),
                    HasSubstr("Input/output error"), HasSubstr("second attempt")));
  ExpectMemoryBack(checkpointer.get());
  ExpectRecovered(checkpointer.get());
}

TEST_P(FailedFsync, OfAStreamingSaveIsAnErrorWithTheReason) {
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  const auto report = SaveWith(checkpointer.get(), 1, 12);  // 48 MiB through 32
  EXPECT_TRUE(absl::IsDataLoss(report.status())) << report.status();
  EXPECT_THAT(Text(report.status()), AllOf(HasSubstr("Input/output error"),
                                           HasSubstr("no second attempt"), HasSubstr("streamed")));
  ExpectMemoryBack(checkpointer.get());
  ExpectRecovered(checkpointer.get());
}

/// A save with enough room at its start that must stream: copies that never end hold a part of the
/// memory.
class LateStream : public FailedFsync {
 protected:
  absl::StatusOr<SaveReport> SaveBesideAHungDevice(Checkpointer* checkpointer, int failures) {
    std::vector<TensorSource> sources;
    for (const char* const name : {"a", "b", "c"}) {
      constexpr uint64_t kBytes = 4u << 20;
      sources.push_back({.name = name,
                         .dtype = "U8",
                         .shape = {kBytes},
                         .data = hung_.Allocate(kBytes),
                         .bytes = kBytes,
                         .device = &hung_});
    }
    const auto stuck = checkpointer->SaveAsync({.name = "hung", .step = 1, .tensors = sources});
    EXPECT_TRUE(stuck.ok()) << stuck.status();
    EXPECT_FALSE(stuck->WaitDurable(kLong).ok());
    EXPECT_GT(checkpointer->staging().bytes_quarantined, 0u);
    auto report = SaveWith(checkpointer, failures, 7);  // 28 MiB, and 20 of 32 are free
    hung_.CompleteAll();
    EXPECT_TRUE(WaitFor([&] { return checkpointer->staging().bytes_held == 0; }));
    return report;
  }
  CheckpointerOptions Impatient() const {
    CheckpointerOptions options = Options();
    options.time_stalled_max = absl::Milliseconds(1500);
    return options;
  }

 private:
  SlowDevice hung_{"hung:0"};  // Must outlive the Checkpointer.
};
INSTANTIATE_TEST_SUITE_P(All, LateStream, ::testing::Values(Launcher::kThread), LauncherName);

TEST_P(LateStream, IsReportedAndStandsInTheManifest) {
  const auto checkpointer = Make(Impatient());
  ASSERT_NE(checkpointer, nullptr);
  const auto report = SaveBesideAHungDevice(checkpointer.get(), 0);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(report->streamed);
  ExpectSound(report->path);
  EXPECT_THAT(ReadFileBytes(report->path + "/rank-00000-of-00001.manifest.json"),
              HasSubstr("\"streamed\":true"));
}

TEST_P(LateStream, IsNotWrittenAgainAfterAFailedFsync) {
  const auto checkpointer = Make(Impatient());
  ASSERT_NE(checkpointer, nullptr);
  const auto report = SaveBesideAHungDevice(checkpointer.get(), 1);
  EXPECT_TRUE(absl::IsDataLoss(report.status())) << report.status();
  EXPECT_THAT(Text(report.status()), HasSubstr("no second attempt: the save streamed"));
  ExpectRecovered(checkpointer.get());
}

}  // namespace
}  // namespace holdfast::testing
