// Which checkpoints go, and how they go.
#include "runtime/checkpointer/retention.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <vector>

#include "runtime/checkpointer/directory_access.h"
#include "runtime/format/directory_names.h"
#include "runtime/sys/system.h"
#include "tests/testing/small_checkpoint.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::SmallRank;
using testing::TemporaryDirectory;
using testing::WriteSmallCheckpoint;

std::vector<CheckpointInfo> Steps(const std::vector<uint64_t>& steps) {
  std::vector<CheckpointInfo> complete;
  for (uint64_t step : steps) {
    CheckpointInfo info;
    info.name = std::to_string(step);
    info.step = step;
    complete.push_back(info);
  }
  return complete;
}

TEST(SelectForRemoval, KeepsEverythingByDefault) {
  EXPECT_THAT(SelectForRemoval(Steps({1, 2, 3}), {}), IsEmpty());
  EXPECT_THAT(SelectForRemoval(Steps({1, 2, 3}), {.keep_last = 0, .keep_every = 2}), IsEmpty());
}

TEST(SelectForRemoval, LetsTheOldestGoFirst) {
  EXPECT_THAT(SelectForRemoval(Steps({1, 2, 3, 4}), {.keep_last = 2}), ElementsAre("1", "2"));
}

TEST(SelectForRemoval, OrdersByStepWhateverTheOrderGiven) {
  EXPECT_THAT(SelectForRemoval(Steps({4, 1, 3, 2}), {.keep_last = 2}), ElementsAre("1", "2"));
}

TEST(SelectForRemoval, KeepsMultiplesBesides) {
  EXPECT_THAT(
      SelectForRemoval(Steps({0, 50, 100, 150, 200, 250}), {.keep_last = 1, .keep_every = 100}),
      ElementsAre("50", "150"));
}

TEST(SelectForRemoval, NeverLetsTheNewestGo) {
  for (uint32_t keep = 1; keep < 5; ++keep) {
    for (const std::string& name : SelectForRemoval(Steps({1, 2, 3}), {.keep_last = keep})) {
      EXPECT_NE(name, "3");
    }
  }
  EXPECT_THAT(SelectForRemoval(Steps({5}), {.keep_last = 1}), IsEmpty());
  EXPECT_THAT(SelectForRemoval({}, {.keep_last = 1}), IsEmpty());
}

class RemovalTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto opened = checkpointer::OpenDirectory(AT_FDCWD, directory_.path());
    ASSERT_TRUE(opened.ok());
    parent_ = *std::move(opened);
    WriteSmallCheckpoint(directory_ / "step-7", rank_);
  }
  void TearDown() override { sys::g_system = sys::kKernel; }

  TemporaryDirectory directory_;
  const SmallRank rank_ = {
      .checkpoint = "step-7", .attempt = {.high = 3, .low = 4}, .world_size = 2, .step = 7};
  base::UniqueFd parent_;
};

// Calls in the order that they were made, for the hooks, which are plain functions.
std::vector<std::string>* g_calls = nullptr;

TEST_F(RemovalTest, RemovesManifestsDurablyBeforeAnythingElse) {
  std::vector<std::string> calls;
  g_calls = &calls;
  sys::g_system.unlinkat = [](int directory, const char* name, int flags) {
    g_calls->push_back(name);
    return sys::kKernel.unlinkat(directory, name, flags);
  };
  sys::g_system.fsync = [](int fd) {
    g_calls->push_back("fsync");
    return sys::kKernel.fsync(fd);
  };
  ASSERT_TRUE(checkpointer::RemoveDirectory(parent_.get(), "step-7").ok());
  EXPECT_THAT(calls,
              ElementsAre("rank-00000-of-00002.manifest.json", "rank-00001-of-00002.manifest.json",
                          "fsync", "model-00000-of-00002.safetensors",
                          "model-00001-of-00002.safetensors", "step-7", "fsync"));
  EXPECT_FALSE(std::filesystem::exists(directory_ / "step-7"));
}

TEST_F(RemovalTest, CanBeRepeated) {
  ASSERT_TRUE(checkpointer::RemoveDirectory(parent_.get(), "step-7").ok());
  EXPECT_TRUE(checkpointer::RemoveDirectory(parent_.get(), "step-7").ok());
}

TEST_F(RemovalTest, LeavesADirectoryWithAForeignDirectoryInsideWhole) {
  std::filesystem::create_directory(directory_ / "step-7/mine");
  EXPECT_TRUE(absl::IsFailedPrecondition(checkpointer::RemoveDirectory(parent_.get(), "step-7")));
  EXPECT_TRUE(InspectCheckpoint(directory_ / "step-7").ok());
}

TEST_F(RemovalTest, TouchesNoDataFileWhenTheManifestsRemovalIsNotDurable) {
  sys::g_system.fsync = [](int) {
    errno = EIO;
    return -1;
  };
  EXPECT_TRUE(absl::IsDataLoss(checkpointer::RemoveDirectory(parent_.get(), "step-7")));
  EXPECT_TRUE(std::filesystem::exists(directory_ / "step-7/model-00000-of-00002.safetensors"));
}

TEST_F(RemovalTest, RemovesLinksAndNotWhatTheyPointTo) {
  WriteSmallCheckpoint(directory_ / "other", rank_);
  std::filesystem::create_symlink("../other", directory_ / "step-7/link");
  ASSERT_TRUE(checkpointer::RemoveDirectory(parent_.get(), "step-7").ok());
  EXPECT_TRUE(std::filesystem::exists(directory_ / "other/model-00000-of-00002.safetensors"));
}

TEST_F(RemovalTest, RetiresUnderANameThatRecoveryRemovesWhenNobodyIsAtWork) {
  const auto info = InspectCheckpoint(directory_ / "step-7");
  ASSERT_TRUE(info.ok());
  {
    const auto retired = checkpointer::RetireCheckpoint(parent_.get(), *info);
    ASSERT_TRUE(retired.ok()) << retired.status();
    EXPECT_EQ(format::ParseDirectoryName(retired->name).kind, format::DirectoryKind::kRetired);
    EXPECT_FALSE(std::filesystem::exists(directory_ / "step-7"));
    // Its lock makes a second removal keep away.
    const int fd = open((directory_ / retired->name).c_str(), O_RDONLY);
    EXPECT_NE(flock(fd, LOCK_EX | LOCK_NB), 0);
    close(fd);
  }
  const auto report = Recover(directory_.path(), {});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->removed.size(), 1u);
  EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
}

TEST_F(RemovalTest, DoesNotRetireWhatHasReplacedItMeanwhile) {
  const auto info = InspectCheckpoint(directory_ / "step-7");
  ASSERT_TRUE(info.ok());
  std::filesystem::remove_all(directory_ / "step-7");
  SmallRank successor = rank_;
  successor.attempt = {.high = 77, .low = 77};
  WriteSmallCheckpoint(directory_ / "step-7", successor);
  EXPECT_TRUE(absl::IsAborted(checkpointer::RetireCheckpoint(parent_.get(), *info).status()));
  EXPECT_TRUE(InspectCheckpoint(directory_ / "step-7").ok());
}

TEST_F(RemovalTest, GivesTheNameBackToWhatReplacedItAtTheLastMoment) {
  const auto info = InspectCheckpoint(directory_ / "step-7");
  ASSERT_TRUE(info.ok());
  static std::string path;
  path = directory_.path();
  static SmallRank successor;
  successor = rank_;
  successor.attempt = {.high = 77, .low = 77};
  sys::g_system.renameat2 = [](int a, const char* from, int b, const char* to, unsigned flags) {
    sys::g_system.renameat2 = sys::kKernel.renameat2;
    std::filesystem::rename(path + "/step-7", path + "/old");
    WriteSmallCheckpoint(path + "/step-7", successor);
    return sys::kKernel.renameat2(a, from, b, to, flags);
  };
  EXPECT_TRUE(absl::IsAborted(checkpointer::RetireCheckpoint(parent_.get(), *info).status()));
  const auto still = InspectCheckpoint(directory_ / "step-7");
  ASSERT_TRUE(still.ok()) << still.status();
  EXPECT_TRUE(still->attempt == successor.attempt);
}

TEST_F(RemovalTest, RetiresTheSameAttemptTwice) {
  const auto info = InspectCheckpoint(directory_ / "step-7");
  ASSERT_TRUE(info.ok());
  const auto first = checkpointer::RetireCheckpoint(parent_.get(), *info);
  WriteSmallCheckpoint(directory_ / "step-7", rank_);
  const auto second = checkpointer::RetireCheckpoint(parent_.get(), *info);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_NE(first->name, second->name);
}

}  // namespace
}  // namespace holdfast
