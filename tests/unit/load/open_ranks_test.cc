// Opening a checkpoint of many ranks: what is read, what is proven, and two ranks as one rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "holdfast/load.h"
#include "runtime/layout/job.h"
#include "runtime/sys/system.h"
#include "tests/testing/checkpoint_files.h"
#include "tests/testing/small_checkpoint.h"
#include "tests/testing/training_state.h"

namespace holdfast {
namespace {

using testing::FlipBit;
using ::testing::HasSubstr;
using testing::RankFiles;
using testing::SmallRank;
using testing::TemporaryDirectory;
using testing::TrainingState;
using testing::WriteFileBytes;
using testing::WriteRank;
using testing::WriteSmallCheckpoint;

constexpr uint32_t kRanks = 64;

std::multiset<std::string>& OpenedManifests() {
  static auto* const names = new std::multiset<std::string>;
  return *names;
}

class OpenRanks : public ::testing::Test {
 protected:
  void SetUp() override {
    OpenedManifests().clear();
    sys::g_system.openat = [](int directory, const char* path, int flags, mode_t mode) {
      if (absl::EndsWith(path, ".manifest.json")) OpenedManifests().insert(path);
      return sys::kKernel.openat(directory, path, flags, mode);
    };
  }
  void TearDown() override { sys::g_system = sys::kKernel; }

  static SmallRank Rank(uint32_t rank) {
    return {.checkpoint = "step-7",
            .attempt = {.high = 3, .low = 4},
            .rank = rank,
            .world_size = kRanks,
            .step = 7,
            .bytes = 100};
  }
  void WriteAll(bool record) {
    WriteSmallCheckpoint(path(), Rank(0));
    if (record) WriteFileBytes(path(layout::kCommitRecordName), Rank(0).record_text());
  }
  std::string path(const std::string& name = "") const {
    return (directory_ / "step-7") + (name.empty() ? "" : "/" + name);
  }
  /// What a loading rank reads: rank 0's manifest, and the rank's own.
  absl::Status OpenAs(uint32_t rank) const {
    auto reader = CheckpointReader::Open(path(), 0);
    if (!reader.ok()) return reader.status();
    return rank == 0 ? absl::OkStatus() : (*reader)->Add(rank);
  }

  const TemporaryDirectory directory_;
};

TEST_F(OpenRanks, EachRankReadsItsOwnManifestAndThatOfRankZero) {
  WriteAll(/*record=*/true);
  for (const uint32_t rank : {0u, 1u, kRanks - 1}) {
    OpenedManifests().clear();
    const absl::Status opened = OpenAs(rank);
    ASSERT_TRUE(opened.ok()) << opened;
    std::multiset<std::string> expected = {Rank(0).manifest_name()};
    if (rank != 0) expected.insert(Rank(rank).manifest_name());
    EXPECT_EQ(OpenedManifests(), expected);
  }
}

TEST_F(OpenRanks, WithoutARecordAllManifestsAreReadOnce) {
  WriteAll(/*record=*/false);
  const absl::Status opened = OpenAs(5);
  ASSERT_TRUE(opened.ok()) << opened;
  EXPECT_EQ(OpenedManifests().size(), kRanks + 1);
}

TEST_F(OpenRanks, ADamagedRecordIsDamage) {
  WriteAll(/*record=*/true);
  FlipBit(path(layout::kCommitRecordName), 100);
  EXPECT_TRUE(absl::IsDataLoss(OpenAs(0))) << OpenAs(0);
}

TEST_F(OpenRanks, AManifestThatIsGoneIsMissedByAllRanks) {
  WriteAll(/*record=*/true);
  std::filesystem::remove(path(Rank(9).manifest_name()));
  for (const uint32_t rank : {0u, 5u, 9u}) {
    EXPECT_TRUE(absl::IsFailedPrecondition(OpenAs(rank))) << OpenAs(rank);
    EXPECT_THAT(std::string(OpenAs(rank).message()), HasSubstr(Rank(9).manifest_name()));
  }
}

TEST_F(OpenRanks, AManifestThatIsNotTheRecordsIsRefusedByTheRankThatReadsIt) {
  WriteAll(/*record=*/true);
  SmallRank other = Rank(9);
  other.bytes = 99;
  other.Write(path());  // sound by itself
  EXPECT_TRUE(absl::IsDataLoss(OpenAs(9))) << OpenAs(9);
  EXPECT_THAT(std::string(OpenAs(9).message()), HasSubstr("commit record"));
  EXPECT_TRUE(OpenAs(5).ok()) << OpenAs(5);
  EXPECT_TRUE(absl::IsDataLoss(CheckpointReader::Open(path(), 9).status()));
}

TEST_F(OpenRanks, AFileOfAnotherSizeIsRefusedByTheRankThatReadsIt) {
  WriteAll(/*record=*/true);
  std::filesystem::resize_file(path(Rank(9).file_name()), 99);
  EXPECT_TRUE(absl::IsDataLoss(OpenAs(9))) << OpenAs(9);
  EXPECT_TRUE(OpenAs(5).ok()) << OpenAs(5);
  std::filesystem::remove(path(Rank(9).file_name()));
  EXPECT_TRUE(absl::IsFailedPrecondition(OpenAs(9))) << OpenAs(9);
}

TEST_F(OpenRanks, ARankThatIsNotThereIsNotFound) {
  for (const bool record : {true, false}) {
    WriteAll(record);
    EXPECT_TRUE(absl::IsNotFound(OpenAs(kRanks))) << OpenAs(kRanks);
    EXPECT_TRUE(absl::IsNotFound(CheckpointReader::Open(path(), kRanks).status()));
  }
}

TEST_F(OpenRanks, TensorsOfTwoRanksAreReadAsOneAndTheAddedOneCounts) {
  std::filesystem::create_directories(path());
  const TrainingState zero = TrainingState::Uniform(5, 1'000'000, 1);
  const TrainingState one = TrainingState::Uniform(3, 2'000'000, 2);
  WriteRank(path(), {.rank = 0, .world_size = 2}, zero.Sources());
  const SavePlan plan = WriteRank(path(), {.rank = 1, .world_size = 2}, one.Sources());
  auto reader = CheckpointReader::Open(path(), 0);
  ASSERT_TRUE(reader.ok()) << reader.status();
  ASSERT_TRUE((*reader)->Add(1).ok());
  ASSERT_EQ((*reader)->tensors().size(), 5u);
  ASSERT_EQ((*reader)->files().size(), 2u);
  std::vector<std::string> bytes;
  std::vector<TensorTarget> targets;
  for (const PlannedTensor& tensor : (*reader)->tensors())
    bytes.emplace_back(tensor.end - tensor.begin, 0);
  for (size_t i = 0; i < bytes.size(); ++i) {
    targets.push_back(
        {.name = (*reader)->tensors()[i].name, .data = bytes[i].data(), .bytes = bytes[i].size()});
  }
  const auto report = (*reader)->Load(targets, {});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(report->verified);
  for (size_t i = 0; i < bytes.size(); ++i) {
    const auto& expected = i < 3 ? one.tensors()[i] : zero.tensors()[i];
    EXPECT_EQ(targets[i].name, expected.name);
    EXPECT_TRUE(bytes[i] == std::string(expected.bytes.data(), expected.bytes.size())) << i;
  }
  // Each is compared with its own rank's digests.
  FlipBit(path(RankFiles{.rank = 1, .world_size = 2}.model_name()), plan.tensors[1].begin);
  const auto damaged = (*reader)->Load(targets, {});
  EXPECT_TRUE(absl::IsDataLoss(damaged.status())) << damaged.status();
  EXPECT_THAT(std::string(damaged.status().message()), HasSubstr(plan.tensors[1].name));
}

TEST_F(OpenRanks, ARankOfAnotherSaveIsNotAdded) {
  WriteAll(/*record=*/false);
  auto reader = CheckpointReader::Open(path(), 0);
  ASSERT_TRUE(reader.ok()) << reader.status();
  SmallRank other = Rank(9);
  other.attempt = {.high = 8, .low = 8};
  other.Write(path());
  EXPECT_TRUE(absl::IsFailedPrecondition((*reader)->Add(9)));
  std::filesystem::copy_file(path(Rank(8).manifest_name()), path(Rank(9).manifest_name()),
                             std::filesystem::copy_options::overwrite_existing);
  EXPECT_TRUE(absl::IsDataLoss((*reader)->Add(9)));
  EXPECT_EQ((*reader)->files().size(), 1u);
}

}  // namespace
}  // namespace holdfast
