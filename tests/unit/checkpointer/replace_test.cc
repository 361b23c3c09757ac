// Replacing a checkpoint: the new one is reported, and the next save begins, while the old one is
// still being removed.
#include <signal.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "holdfast/errors.h"
#include "holdfast/recovery.h"
#include "runtime/directory/completeness.h"
#include "runtime/directory/entries.h"
#include "runtime/sys/system.h"
#include "tests/testing/child_process.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/save_test.h"

namespace holdfast::testing {
namespace {

using ::testing::AnyOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::StartsWith;

std::atomic<bool> g_held{false};
std::atomic<int> g_waiting{0};
std::atomic<bool> g_failing{false};

/// Every removal waits while `g_held`, and fails while `g_failing`.
int GatedUnlink(int directory, const char* name, int flags) {
  ++g_waiting;
  while (g_held) absl::SleepFor(absl::Milliseconds(1));
  --g_waiting;
  if (g_failing && flags == 0) {
    errno = EIO;
    return -1;
  }
  return sys::kKernel.unlinkat(directory, name, flags);
}

class Replace : public SaveTest {
 protected:
  void SetUp() override {
    SaveTest::SetUp();
    CheckpointerOptions options = SmallOptions(directory());
    // A worker whose system calls the test can hold.
    options.launcher = Launcher::kThread;
    checkpointer_ = Make(options);
    ASSERT_NE(checkpointer_, nullptr);
    ASSERT_TRUE(Save(checkpointer_.get(), "last", TrainingState::Uniform(2, 300'000, 1)).ok());
    sys::g_system.unlinkat = GatedUnlink;
  }
  void TearDown() override {
    g_held = g_failing = false;
    checkpointer_.reset();
    sys::g_system = sys::kKernel;
    SaveTest::TearDown();
  }
  absl::Status ReplaceBy(const TrainingState& state, uint64_t step) {
    const std::vector<TensorSource> sources = state.Sources();
    const auto handle = checkpointer_->SaveAsync(
        {.name = "last", .step = step, .tensors = sources, .replace = true});
    return handle.ok() ? handle->WaitDurable(kLong).status() : handle.status();
  }
  std::unique_ptr<Checkpointer> checkpointer_;
};

TEST_F(Replace, AStalledRemovalIsAnErrorAndNoTimeOut) {
  CheckpointerOptions options = checkpointer_->options();
  options.time_stalled_max = absl::Seconds(1);
  options.launcher = Launcher::kFork;  // A worker that can be killed.
  checkpointer_ = Make(options);
  g_held = true;
  EXPECT_EQ(ReplaceBy(TrainingState::Uniform(2, 400'000, 2), 2), absl::OkStatus());
  const absl::Status early = checkpointer_->Flush(absl::Milliseconds(1));
  EXPECT_TRUE(IsTimeOut(early)) << early;
  const absl::Status stalled = checkpointer_->Flush(kLong);
  EXPECT_TRUE(absl::IsDeadlineExceeded(stalled)) << stalled;
  EXPECT_FALSE(IsTimeOut(stalled)) << stalled;
  EXPECT_THAT(std::string(stalled.message()), HasSubstr("no progress"));
  g_held = false;
  EXPECT_EQ(checkpointer_->Flush(kLong), absl::OkStatus());
}

TEST_F(Replace, NeitherTheReportNorTheNextSaveWaitsForTheRemoval) {
  g_held = true;
  const TrainingState second = TrainingState::Uniform(2, 400'000, 2);
  const TrainingState third = TrainingState::Uniform(2, 500'000, 3);
  EXPECT_EQ(ReplaceBy(second, 2), absl::OkStatus());
  EXPECT_TRUE(second.CompareWith(directory() + "/last").ok());
  ASSERT_TRUE(WaitFor([] { return g_waiting > 0; })) << "it is being removed in the background";
  EXPECT_EQ(ReplaceBy(third, 3), absl::OkStatus());
  EXPECT_TRUE(third.CompareWith(directory() + "/last").ok());
  EXPECT_THAT(Names(directory()), SizeIs(3)) << "both that were replaced are still there";
  EXPECT_THAT(Names(directory()), Each(AnyOf("last", StartsWith(".last.retired-"))))
      << "hidden from whoever lists the directory";
  EXPECT_TRUE(absl::IsDeadlineExceeded(checkpointer_->Flush(absl::Milliseconds(1))));
  g_held = false;
  EXPECT_EQ(checkpointer_->Flush(kLong), absl::OkStatus());
  EXPECT_THAT(Names(directory()), ElementsAre("last"));
  ExpectSound(directory() + "/last");
}

TEST_F(Replace, TheManifestSaysWhatTheSaveMayReplace) {
  const auto first = InspectCheckpoint(directory() + "/last");
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(ReplaceBy(TrainingState::Uniform(2, 400'000, 2), 2), absl::OkStatus());
  const auto last = directory::OpenDirectory(directory() + "/last");
  ASSERT_TRUE(last.ok()) << last.status();
  EXPECT_THAT(directory::Inspect(last->get()).replaces, ElementsAre(first->attempt));
}

TEST_F(Replace, AForeignFileCalledLikeAManifestIsNotReplaced) {
  const std::string notes = directory() + "/last/rank-notes.manifest.json";
  std::ofstream(notes) << "mine";
  const absl::Status refused = ReplaceBy(TrainingState::Uniform(2, 400'000, 2), 2);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("rank-notes.manifest.json"));
  EXPECT_TRUE(std::filesystem::exists(notes));
  ExpectSound(directory() + "/last");
}

TEST_F(Replace, TheDestructorFinishesTheRemoval) {
  EXPECT_EQ(ReplaceBy(TrainingState::Uniform(2, 400'000, 2), 2), absl::OkStatus());
  checkpointer_.reset();
  EXPECT_THAT(Names(directory()), ElementsAre("last"));
}

TEST_F(Replace, ARemovalThatFailsIsToldByFlushAndDoneByRecovery) {
  g_failing = true;
  EXPECT_EQ(ReplaceBy(TrainingState::Uniform(2, 400'000, 2), 2), absl::OkStatus());
  const absl::Status told = checkpointer_->Flush(kLong);
  EXPECT_FALSE(told.ok());
  EXPECT_THAT(std::string(told.message()), HasSubstr("/.last.retired-"));
  g_failing = false;
  EXPECT_THAT(Names(directory()), SizeIs(2));
  const auto recovered = Recover(directory(), {});
  ASSERT_TRUE(recovered.ok()) << recovered.status();
  EXPECT_THAT(Names(directory()), ElementsAre("last"));
}

/// A second save that takes the name "last" during a look, and removes the files of the directory
/// under look.
struct Overtaker {
  std::string directory;
  bool at_open = false;  // or at the first look at a manifest
  bool whole = false;    // or the files that prove a checkpoint alone
  int calls_left = 0;    // until it strikes; below zero it has struck

  void Count() {
    if (calls_left-- != 0) return;
    namespace fs = std::filesystem;
    fs::rename(directory + "/last", directory + "/moved");
    fs::rename(directory + "/other", directory + "/last");
    std::vector<fs::path> files;
    for (const auto& entry : fs::directory_iterator(directory + "/moved"))
      if (whole || entry.path().extension() == ".json") files.push_back(entry.path());
    for (const fs::path& file : files) fs::remove(file);
  }
};
Overtaker g_overtaker;

int OvertakenOpen(int parent, const char* name, int flags, mode_t mode) {
  const int opened = sys::kKernel.openat(parent, name, flags, mode);
  if (g_overtaker.at_open && std::string(name) == "last") g_overtaker.Count();
  return opened;
}

int OvertakenStat(int parent, const char* name, struct stat* found, int flags) {
  if (!g_overtaker.at_open && std::string(name) == "rank-00000-of-00001.manifest.json")
    g_overtaker.Count();
  return sys::kKernel.fstatat(parent, name, found, flags);
}

TEST_F(Replace, ADirectoryThatIsReplacedDuringALookIsLookedAtAgain) {
  if (kThreadSanitizer)
    GTEST_SKIP() << "it changes the table of system calls under running threads";
  sys::g_system = sys::kKernel;
  int struck = 0;
  for (const bool at_open : {false, true}) {
    for (const bool whole : {false, true}) {
      for (int calls = 0;; ++calls) {
        ASSERT_TRUE(Save(checkpointer_.get(), "other", TrainingState::Uniform(2, 300'000, 3)).ok());
        g_overtaker = {
            .directory = directory(), .at_open = at_open, .whole = whole, .calls_left = calls};
        sys::g_system.openat = OvertakenOpen;
        sys::g_system.fstatat = OvertakenStat;
        const absl::Status told = ReplaceBy(TrainingState::Uniform(2, 400'000, 2), 2);
        EXPECT_EQ(checkpointer_->Flush(kLong), absl::OkStatus());
        sys::g_system = sys::kKernel;
        // The second save may be the later save.
        EXPECT_TRUE(told.ok() || absl::IsAborted(told)) << told << " at call " << calls;
        ExpectSound(directory() + "/last");
        std::filesystem::remove_all(directory() + "/moved");
        std::filesystem::remove_all(directory() + "/other");
        if (g_overtaker.calls_left >= 0) break;
        ++struck;
      }
    }
  }
  EXPECT_GT(struck, 8) << "three looks, at two moments, with two ends";
}

/// As a file system that cannot exchange, whose machine kills the worker between its two renames.
int KilledBetweenRenames(int a, const char* from, int b, const char* to, unsigned flags) {
  if (flags != 0) {
    errno = EINVAL;
    return -1;
  }
  static bool moved_aside = false;
  if (moved_aside) raise(SIGKILL);
  moved_aside = std::string(from) == "last";
  return sys::kKernel.renameat2(a, from, b, to, 0);
}

TEST_F(Replace, AWorkerKilledBetweenTwoRenamesLeavesTheNewOneToRecovery) {
  if (kThreadSanitizer)
    GTEST_SKIP() << "it changes the table of system calls under running threads";
  sys::g_system = sys::kKernel;
  CheckpointerOptions options = SmallOptions(directory());
  options.launcher = Launcher::kFork;  // the child inherits the table, and can be killed
  checkpointer_ = Make(options);
  ASSERT_NE(checkpointer_, nullptr);
  sys::g_system.renameat2 = KilledBetweenRenames;
  const TrainingState second = TrainingState::Uniform(2, 400'000, 2);
  const absl::Status told = ReplaceBy(second, 2);
  sys::g_system = sys::kKernel;
  EXPECT_TRUE(absl::IsAborted(told)) << told;
  EXPECT_EQ(checkpointer_->Flush(kLong), absl::OkStatus());
  EXPECT_FALSE(std::filesystem::exists(directory() + "/last"));
  checkpointer_.reset();
  const auto recovered = Recover(directory(), {});
  ASSERT_TRUE(recovered.ok()) << recovered.status();
  EXPECT_THAT(recovered->promoted, ElementsAre("last"));
  EXPECT_TRUE(second.CompareWith(directory() + "/last").ok());
}

}  // namespace
}  // namespace holdfast::testing
