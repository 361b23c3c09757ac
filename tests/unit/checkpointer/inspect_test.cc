// What counts as a complete checkpoint, and what is said about everything else.
#include "runtime/checkpointer/inspect.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>

#include "holdfast/recovery.h"
#include "runtime/format/directory_names.h"
#include "runtime/sys/system.h"
#include "tests/testing/small_checkpoint.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;
using testing::SmallRank;
using testing::TemporaryDirectory;
using testing::WriteSmallCheckpoint;

constexpr AttemptId kAttempt = {.high = 1, .low = 2};

class InspectCheckpointTest : public ::testing::Test {
 protected:
  void TearDown() override { sys::g_system = sys::kKernel; }
  SmallRank Two() const {
    return {.checkpoint = "step-7", .attempt = kAttempt, .world_size = 2, .step = 7};
  }
  absl::Status StatusOf(const std::string& path) { return InspectCheckpoint(path).status(); }

  TemporaryDirectory directory_;
  const std::string path_ = directory_ / "step-7";
};

TEST_F(InspectCheckpointTest, TellsStepAttemptRanksAndBytes) {
  WriteSmallCheckpoint(path_, Two());
  const auto info = InspectCheckpoint(path_ + "/");
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->name, "step-7");
  EXPECT_EQ(info->step, 7u);
  EXPECT_EQ(info->attempt, kAttempt);
  EXPECT_EQ(info->world_size, 2u);
  EXPECT_EQ(info->bytes, 10000u);
}

TEST_F(InspectCheckpointTest, FollowsASymbolicLink) {
  WriteSmallCheckpoint(path_, Two());
  std::filesystem::create_symlink("step-7", directory_ / "latest");
  EXPECT_TRUE(InspectCheckpoint(directory_ / "latest").ok());
}

TEST_F(InspectCheckpointTest, SaysNotFoundForNothing) {
  EXPECT_TRUE(absl::IsNotFound(StatusOf(path_)));
}

TEST_F(InspectCheckpointTest, RefusesAFile) {
  std::ofstream(path_) << "x";
  EXPECT_TRUE(absl::IsFailedPrecondition(StatusOf(path_))) << StatusOf(path_);
}

TEST_F(InspectCheckpointTest, RefusesAnEmptyDirectory) {
  std::filesystem::create_directory(path_);
  EXPECT_TRUE(absl::IsFailedPrecondition(StatusOf(path_)));
}

TEST_F(InspectCheckpointTest, RefusesACompleteDirectoryUnderAPartialName) {
  const std::string partial = directory_ / format::PartialName("step-7", kAttempt);
  WriteSmallCheckpoint(partial, Two());
  EXPECT_TRUE(absl::IsFailedPrecondition(StatusOf(partial)));
}

TEST_F(InspectCheckpointTest, MissesARank) {
  WriteSmallCheckpoint(path_, Two());
  unlink((path_ + "/rank-00001-of-00002.manifest.json").c_str());
  EXPECT_TRUE(absl::IsFailedPrecondition(StatusOf(path_)));
  EXPECT_THAT(std::string(StatusOf(path_).message()), HasSubstr("1 of 2 ranks"));
}

TEST_F(InspectCheckpointTest, MissesAFile) {
  WriteSmallCheckpoint(path_, Two());
  unlink((path_ + "/model-00001-of-00002.safetensors").c_str());
  EXPECT_TRUE(absl::IsFailedPrecondition(StatusOf(path_)));
  EXPECT_THAT(std::string(StatusOf(path_).message()), HasSubstr("model-00001"));
}

TEST_F(InspectCheckpointTest, SeesAFileOneByteShortOrLong) {
  for (uint64_t bytes : {4999u, 5001u}) {
    WriteSmallCheckpoint(path_, Two());
    std::filesystem::resize_file(path_ + "/model-00000-of-00002.safetensors", bytes);
    EXPECT_TRUE(absl::IsFailedPrecondition(StatusOf(path_))) << bytes;
  }
}

TEST_F(InspectCheckpointTest, RefusesALinkInPlaceOfAFile) {
  WriteSmallCheckpoint(path_, Two());
  const std::string file = path_ + "/model-00000-of-00002.safetensors";
  std::filesystem::rename(file, directory_ / "elsewhere");
  std::filesystem::create_symlink("../elsewhere", file);
  EXPECT_TRUE(absl::IsDataLoss(StatusOf(path_)));
}

TEST_F(InspectCheckpointTest, CallsADamagedManifestDataLoss) {
  WriteSmallCheckpoint(path_, Two());
  const std::string manifest = path_ + "/rank-00000-of-00002.manifest.json";
  std::fstream file(manifest, std::ios::in | std::ios::out);
  file.seekp(40);
  file.put('#');
  file.close();
  EXPECT_TRUE(absl::IsDataLoss(StatusOf(path_))) << StatusOf(path_);
}

TEST_F(InspectCheckpointTest, RefusesRanksOfDifferentAttempts) {
  WriteSmallCheckpoint(path_, Two());
  SmallRank other = Two();
  other.attempt.low = 99;
  other.rank = 1;
  other.Write(path_);
  EXPECT_TRUE(absl::IsFailedPrecondition(StatusOf(path_)));
  EXPECT_THAT(std::string(StatusOf(path_).message()), HasSubstr("another attempt"));
}

TEST_F(InspectCheckpointTest, RefusesAManifestUnderAnotherRanksName) {
  WriteSmallCheckpoint(path_, Two());
  std::filesystem::copy_file(path_ + "/rank-00000-of-00002.manifest.json",
                             path_ + "/rank-00001-of-00002.manifest.json",
                             std::filesystem::copy_options::overwrite_existing);
  EXPECT_TRUE(absl::IsDataLoss(StatusOf(path_)));
}

TEST_F(InspectCheckpointTest, NeverTakesAnErrorOfTheMachineForAVerdict) {
  WriteSmallCheckpoint(path_, Two());
  sys::g_system.read = [](int, void*, size_t) -> ssize_t {
    errno = EIO;
    return -1;
  };
  const int fd = open(path_.c_str(), O_RDONLY | O_DIRECTORY);
  const checkpointer::Inspection inspection = checkpointer::Inspect(fd);
  close(fd);
  EXPECT_EQ(inspection.state, checkpointer::Inspection::State::kUnreadable);
}

TEST_F(InspectCheckpointTest, ListsByStepAndSkipsEverythingElse) {
  for (uint64_t step : {300u, 20u, 1000u}) {
    const std::string name = absl::StrCat("step-", step);
    WriteSmallCheckpoint(directory_ / name,
                         {.checkpoint = name, .attempt = {.high = 0, .low = step}, .step = step});
  }
  WriteSmallCheckpoint(directory_ / format::PartialName("step-7", kAttempt), Two());
  SmallRank half = Two();
  half.Write(directory_ / "step-2000");
  std::filesystem::create_directory(directory_ / "logs");
  std::ofstream(directory_ / "notes.txt") << "x";
  std::filesystem::create_symlink("step-1000", directory_ / "latest");
  const auto complete = ListCheckpoints(directory_.path());
  ASSERT_TRUE(complete.ok()) << complete.status();
  ASSERT_EQ(complete->size(), 3u);
  EXPECT_EQ((*complete)[0].name, "step-20");
  EXPECT_EQ((*complete)[1].name, "step-300");
  EXPECT_EQ((*complete)[2].name, "step-1000");
  const auto newest = FindNewest(directory_.path());
  ASSERT_TRUE(newest.ok());
  EXPECT_EQ(newest->path, directory_ / "step-1000");
}

TEST_F(InspectCheckpointTest, FindsNoNewestWhereThereIsNone) {
  EXPECT_TRUE(absl::IsNotFound(FindNewest(directory_.path()).status()));
  EXPECT_TRUE(absl::IsNotFound(FindNewest(directory_ / "missing").status()));
}

TEST_F(InspectCheckpointTest, ListingFailsRatherThanHideACheckpointThatCannotBeRead) {
  WriteSmallCheckpoint(path_, Two());
  sys::g_system.read = [](int, void*, size_t) -> ssize_t {
    errno = EIO;
    return -1;
  };
  EXPECT_FALSE(ListCheckpoints(directory_.path()).ok());
}

}  // namespace
}  // namespace holdfast
