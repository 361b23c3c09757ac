// What counts as a complete checkpoint, and what is said about everything else.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <tuple>
#include <utility>
#include <vector>

#include "holdfast/recovery.h"
#include "holdfast/verify.h"
#include "runtime/directory/completeness.h"
#include "runtime/directory/entries.h"
#include "runtime/format/directory_names.h"
#include "runtime/sys/system.h"
#include "tests/testing/checkpoint_files.h"
#include "tests/testing/small_checkpoint.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;
using testing::SmallRank;
using testing::TemporaryDirectory;
using testing::WriteSmallCheckpoint;

constexpr AttemptId kAttempt = {.high = 1, .low = 2};

void RewriteAsVersionOne(const std::string& manifest) {
  std::string text = testing::ReadFileBytes(manifest);
  for (const auto& [from, to] : {std::pair("\"version\":2", "\"version\":1"),
                                 std::pair(",\"saved_at_ns\":0,\"files_bytes\":5000", "")}) {
    text.replace(text.find(from), strlen(from), to);
  }
  testing::WriteFileBytes(manifest, testing::Resealed(std::move(text)));
}

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
  EXPECT_THAT(std::string(StatusOf(path_).message()), HasSubstr("manifest of rank 1"));
}

TEST_F(InspectCheckpointTest, MissesAFile) {
  WriteSmallCheckpoint(path_, Two());
  unlink((path_ + "/model-00001-of-00002.safetensors").c_str());
  EXPECT_TRUE(absl::IsFailedPrecondition(StatusOf(path_)));
  EXPECT_THAT(std::string(StatusOf(path_).message()), HasSubstr("model-00001"));
}

TEST_F(InspectCheckpointTest, MissesTheRecordThatTheManifestsSpeakOf) {
  SmallRank rank = Two();
  rank.recorded = true;
  WriteSmallCheckpoint(path_, rank);
  EXPECT_TRUE(StatusOf(path_).ok()) << StatusOf(path_);
  EXPECT_EQ(Verify(path_, {})->verdict, Verdict::kSound);
  unlink((path_ + "/holdfast.commit.json").c_str());
  EXPECT_TRUE(absl::IsDataLoss(StatusOf(path_))) << StatusOf(path_);
  EXPECT_THAT(std::string(StatusOf(path_).message()),
              HasSubstr("holdfast.commit.json: missing: expected the commit record"));
  EXPECT_EQ(Verify(path_, {})->verdict, Verdict::kCorrupt);
}

TEST_F(InspectCheckpointTest, SeesAFileOneByteShortOrLong) {
  for (uint64_t bytes : {4999u, 5001u}) {
    WriteSmallCheckpoint(path_, Two());
    std::filesystem::resize_file(path_ + "/model-00000-of-00002.safetensors", bytes);
    EXPECT_TRUE(absl::IsDataLoss(StatusOf(path_))) << bytes;
  }
}

TEST_F(InspectCheckpointTest, SaysOfEveryDirectoryWhatVerifySays) {
  const auto damage = [this](const std::string& how) {
    std::filesystem::remove_all(path_);
    WriteSmallCheckpoint(path_, Two());
    const std::string file = path_ + "/model-00001-of-00002.safetensors";
    const std::string manifest = path_ + "/rank-00001-of-00002.manifest.json";
    if (how == "a stray manifest") std::ofstream(path_ + "/rank-notes.manifest.json") << "notes";
    if (how == "a short file") std::filesystem::resize_file(file, 17);
    if (how == "no file") unlink(file.c_str());
    if (how == "no manifest") unlink(manifest.c_str());
    if (how == "a torn manifest") std::filesystem::resize_file(manifest, 100);
    if (how == "another world") {
      SmallRank other = Two();
      other.world_size = 3;
      other.Write(path_);
    }
    if (how == "another step") {
      SmallRank other = Two();
      other.rank = 1;
      other.step = 8;
      other.Write(path_);
    }
    if (how == "a directory in place of a file") {
      unlink(file.c_str());
      std::filesystem::create_directory(file);
    }
  };
  for (const auto& [how, verdict] :
       {std::pair("", Verdict::kSound), std::pair("a stray manifest", Verdict::kSound),
        std::pair("a short file", Verdict::kCorrupt), std::pair("no file", Verdict::kIncomplete),
        std::pair("no manifest", Verdict::kIncomplete),
        std::pair("a torn manifest", Verdict::kCorrupt),
        std::pair("another world", Verdict::kIncomplete),
        std::pair("another step", Verdict::kCorrupt),
        std::pair("a directory in place of a file", Verdict::kCorrupt)}) {
    damage(how);
    const auto verified = Verify(path_, {});
    ASSERT_TRUE(verified.ok()) << verified.status();
    EXPECT_EQ(verified->verdict, verdict) << how;
    const auto opened = directory::OpenDirectory(path_);
    ASSERT_TRUE(opened.ok());
    EXPECT_EQ(directory::Inspect(opened->get()).state, verdict) << how;
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
  EXPECT_THAT(std::string(StatusOf(path_).message()), HasSubstr("attempt: expected"));
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
  sys::g_system.pread = [](int, void*, size_t, off_t) -> ssize_t {
    errno = EIO;
    return -1;
  };
  const int fd = open(path_.c_str(), O_RDONLY | O_DIRECTORY);
  const directory::Inspection inspection = directory::Inspect(fd);
  close(fd);
  EXPECT_EQ(inspection.state, Verdict::kUnreadable);
}

TEST_F(InspectCheckpointTest, ListsByTimeAndSkipsEverythingElse) {
  uint64_t saved_at_ns = 1'700'000'000'000'000'000;
  for (uint64_t step : {300u, 20u, 1000u}) {
    const std::string name = absl::StrCat("step-", step);
    WriteSmallCheckpoint(directory_ / name, {.checkpoint = name,
                                             .attempt = {.high = 0, .low = step},
                                             .step = step,
                                             .saved_at_ns = saved_at_ns++});
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
  EXPECT_EQ((*complete)[0].name, "step-300");
  EXPECT_EQ((*complete)[1].name, "step-20");
  EXPECT_EQ((*complete)[2].name, "step-1000");
  const auto newest = FindNewest(directory_.path());
  ASSERT_TRUE(newest.ok());
  EXPECT_EQ(newest->path, directory_ / "step-1000");
}

TEST_F(InspectCheckpointTest, TakesTheManifestsTimeWhereNoneIsRecorded) {
  WriteSmallCheckpoint(
      directory_ / "new",
      {.checkpoint = "new", .attempt = kAttempt, .saved_at_ns = 1'700'000'000'000'000'000});
  for (const int64_t second : {1'600'000'000, 1'800'000'000}) {
    WriteSmallCheckpoint(path_, Two());
    for (const char* rank : {"/rank-00000-of-00002", "/rank-00001-of-00002"}) {
      const std::string manifest = absl::StrCat(path_, rank, ".manifest.json");
      RewriteAsVersionOne(manifest);
      const timespec times[2] = {{.tv_sec = second, .tv_nsec = 0},
                                 {.tv_sec = second, .tv_nsec = 0}};
      ASSERT_EQ(utimensat(AT_FDCWD, manifest.c_str(), times, 0), 0);
    }
    const auto info = InspectCheckpoint(path_);
    ASSERT_TRUE(info.ok()) << info.status();
    EXPECT_EQ(info->saved_at, absl::FromUnixSeconds(second));
    EXPECT_EQ(FindNewest(directory_.path())->name, second < 1'700'000'000 ? "new" : "step-7");
  }
}

TEST_F(InspectCheckpointTest, FindsNoNewestWhereThereIsNone) {
  EXPECT_TRUE(absl::IsNotFound(FindNewest(directory_.path()).status()));
  EXPECT_TRUE(absl::IsNotFound(FindNewest(directory_ / "missing").status()));
}

TEST_F(InspectCheckpointTest, SaysWhatItPassedOver) {
  WriteSmallCheckpoint(path_, Two());
  SmallRank half = Two();
  half.checkpoint = "step-8";
  half.Write(directory_ / "step-8");
  std::vector<std::string> passed_over;
  const auto newest = FindNewest(directory_.path(), &passed_over);
  ASSERT_TRUE(newest.ok()) << newest.status();
  EXPECT_EQ(newest->name, "step-7");
  EXPECT_THAT(passed_over, ::testing::ElementsAre(AllOf(::testing::StartsWith("step-8: "),
                                                        HasSubstr("manifest of rank 1"))));
}

TEST_F(InspectCheckpointTest, ListingFailsWithoutADescriptorRatherThanHideACheckpoint) {
  WriteSmallCheckpoint(path_, Two());
  WriteSmallCheckpoint(directory_ / "step-8", {.checkpoint = "step-8", .attempt = kAttempt});
  sys::g_system.openat = [](int directory, const char* path, int flags, mode_t mode) {
    if (std::string(path) != "step-8") return sys::kKernel.openat(directory, path, flags, mode);
    errno = EMFILE;
    return -1;
  };
  EXPECT_FALSE(ListCheckpoints(directory_.path()).ok());
}

TEST_F(InspectCheckpointTest, ListingFailsRatherThanHideACheckpointThatCannotBeRead) {
  WriteSmallCheckpoint(path_, Two());
  sys::g_system.pread = [](int, void*, size_t, off_t) -> ssize_t {
    errno = EIO;
    return -1;
  };
  EXPECT_FALSE(ListCheckpoints(directory_.path()).ok());
}

}  // namespace
}  // namespace holdfast
