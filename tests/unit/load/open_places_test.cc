// Reading what is less than a whole checkpoint: one manifest of a directory, files without any
// manifest, and parts of tensors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "holdfast/load.h"
#include "tests/testing/checkpoint_files.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/slow_device.h"
#include "tests/testing/training_state.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using testing::FlipBit;
using ::testing::HasSubstr;
using testing::RankFiles;
using testing::ScratchDirectory;
using testing::SlowDevice;
using testing::TensorOf;
using testing::TrainingState;
using testing::WriteFileBytes;
using testing::WriteRank;

class PartialReads : public ::testing::Test {
 protected:
  SavePlan Write(const RankFiles& rank = {}) {
    plan_ = WriteRank(scratch_.path(), rank, state_.Sources());
    return plan_;
  }
  std::unique_ptr<CheckpointReader> Opened() {
    Write();
    auto reader = CheckpointReader::Open(scratch_.path());
    EXPECT_TRUE(reader.ok()) << reader.status();
    return reader.ok() ? *std::move(reader) : nullptr;
  }
  /// The same files and places, as if there were no manifest.
  std::unique_ptr<CheckpointReader> OpenedPlaces() {
    Write();
    std::filesystem::remove(Path(RankFiles{}.manifest_name()));
    auto reader =
        CheckpointReader::OpenPlaces(scratch_.path(), {RankFiles{}.model_name()}, plan_.tensors);
    EXPECT_TRUE(reader.ok()) << reader.status();
    return reader.ok() ? *std::move(reader) : nullptr;
  }
  std::string Path(const std::string& name) const { return scratch_.path() + "/" + name; }
  std::string BytesOf(const std::string& name) const {
    for (const TrainingState::Tensor& tensor : state_.tensors()) {
      if (tensor.name == name) return {tensor.bytes.data(), tensor.bytes.size()};
    }
    ADD_FAILURE() << "no tensor " << name;
    return "";
  }

  struct Part {
    std::string name;
    uint64_t begin = 0;
    uint64_t bytes = 0;
  };
  /// Loads the parts and expects the right bytes in all of them.
  absl::StatusOr<LoadReport> LoadParts(const CheckpointReader& reader,
                                       const std::vector<Part>& parts, LoadOptions options = {}) {
    std::vector<std::string> out;
    for (const Part& part : parts) out.emplace_back(part.bytes, '\x55');
    std::vector<TensorTarget> targets;
    for (size_t i = 0; i < parts.size(); ++i) {
      targets.push_back({.name = parts[i].name,
                         .data = out[i].data(),
                         .bytes = parts[i].bytes,
                         .begin = parts[i].begin});
    }
    options.buffer_bytes = 8u << 20;
    const auto report = reader.Load(targets, options);
    if (!report.ok()) return report;
    for (size_t i = 0; i < parts.size(); ++i) {
      EXPECT_TRUE(out[i] == BytesOf(parts[i].name).substr(parts[i].begin, parts[i].bytes))
          << parts[i].name << " [" << parts[i].begin << ", +" << parts[i].bytes << ")";
    }
    return report;
  }

  ScratchDirectory scratch_;
  // Tensors of three and a half chunks, and small ones between.
  const TrainingState state_ = TrainingState::Uniform(3, 3 * uint64_t{kChunkBytes} + 2'000'000, 1);
  const std::string big_ = state_.tensors()[1].name;
  const uint64_t bytes_ = state_.tensors()[1].bytes.size();
  SavePlan plan_;
};

// ---- Parts of tensors.

TEST_F(PartialReads, PartsAreTheBytesThatWereAskedForVerifiedOrNot) {
  const auto reader = Opened();
  ASSERT_NE(reader, nullptr);
  std::mt19937_64 random(11);
  for (const bool verify : {true, false}) {
    for (int round = 0; round < (testing::kThreadSanitizer ? 1 : 20); ++round) {
      std::vector<Part> parts;
      for (const TrainingState::Tensor& tensor : state_.tensors()) {
        const uint64_t begin = random() % tensor.bytes.size();
        parts.push_back({tensor.name, begin, random() % (tensor.bytes.size() - begin + 1)});
      }
      const auto report = LoadParts(*reader, parts, {.verify = verify});
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_EQ(report->verified, verify);
      EXPECT_EQ(report->bytes, parts[0].bytes + parts[1].bytes + parts[2].bytes);
    }
  }
}

TEST_F(PartialReads, PartsOfOneTensorMayOverlapAndRepeat) {
  const auto reader = Opened();
  ASSERT_NE(reader, nullptr);
  const std::vector<Part> parts = {{big_, 0, bytes_},
                                   {big_, 100, 50},
                                   {big_, 100, 50},
                                   {big_, 120, 3 * uint64_t{kChunkBytes}},
                                   {big_, bytes_ - 1, 1},
                                   {big_, 0, 1},
                                   {big_, 2'000'000, 1'000'000},
                                   {big_, 2'000'001, 10}};
  for (const bool verify : {true, false}) {
    const auto report = LoadParts(*reader, parts, {.verify = verify});
    EXPECT_TRUE(report.ok()) << report.status();
  }
}

TEST_F(PartialReads, PartsOfNoBytesAndWholeTensorsAreParts) {
  const auto reader = Opened();
  ASSERT_NE(reader, nullptr);
  EXPECT_TRUE(LoadParts(*reader, {{big_, 0, 0}, {big_, bytes_, 0}, {big_, 7, 0}}).ok());
  EXPECT_TRUE(LoadParts(*reader, {{big_, 0, bytes_}}).ok());
  const TensorTarget nowhere = {.name = big_, .data = nullptr, .bytes = 0, .begin = 5};
  EXPECT_TRUE(reader->Load({&nowhere, 1}, {}).ok());
}

TEST_F(PartialReads, ASmallPartReadsWhatItsDigestCoversAndWithoutOneLittleMoreThanItself) {
  const auto reader = Opened();
  ASSERT_NE(reader, nullptr);
  const auto verified = LoadParts(*reader, {{big_, 1'000'000, 10}});
  ASSERT_TRUE(verified.ok()) << verified.status();
  EXPECT_LE(verified->bytes_read, kChunkBytes);
  const auto plain = LoadParts(*reader, {{big_, 1'000'000, 10}}, {.verify = false});
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_LE(plain->bytes_read, 2 * uint64_t{kIoAlignment});
}

TEST_F(PartialReads, DamageBesideThePartIsFoundWhereItsDigestCoversIt) {
  const auto reader = Opened();
  ASSERT_NE(reader, nullptr);
  // In the chunk in which the tensor ends.
  const PlannedTensor& tensor = TensorOf(plan_, big_);
  FlipBit(Path(RankFiles{}.model_name()), tensor.end - 1);
  EXPECT_TRUE(LoadParts(*reader, {{big_, 0, 1000}}).ok()) << "another chunk";
  const uint64_t in_last = (tensor.end - 1) / kChunkBytes * kChunkBytes - tensor.begin;
  const auto report = LoadParts(*reader, {{big_, in_last, 1}});
  EXPECT_TRUE(absl::IsDataLoss(report.status())) << report.status();
  EXPECT_THAT(std::string(report.status().message()), HasSubstr(big_));
  EXPECT_TRUE(LoadParts(*reader, {{big_, in_last, 1}}, {.verify = false}).ok());
}

TEST_F(PartialReads, PartsOutOfRangeAreRefusedBeforeAnythingIsRead) {
  const auto reader = Opened();
  ASSERT_NE(reader, nullptr);
  std::string room(bytes_ + 1, '\x55');
  const auto status = [&](uint64_t begin, uint64_t bytes) {
    const TensorTarget target = {.name = big_, .data = room.data(), .bytes = bytes, .begin = begin};
    return reader->Load({&target, 1}, {}).status();
  };
  for (const auto& [begin, bytes] : std::vector<std::pair<uint64_t, uint64_t>>{
           {0, bytes_ + 1}, {1, bytes_}, {bytes_, 1}, {bytes_ + 1, 0}, {~uint64_t{0}, 2}}) {
    const absl::Status refused = status(begin, bytes);
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()),
                HasSubstr(absl::StrCat("of the tensor's ", bytes_)));
  }
  EXPECT_EQ(room, std::string(bytes_ + 1, '\x55'));
  const TensorTarget null = {.name = big_, .data = nullptr, .bytes = 1, .begin = 0};
  EXPECT_TRUE(absl::IsInvalidArgument(reader->Load({&null, 1}, {}).status()));
  const TensorTarget other = {.name = "other", .data = room.data(), .bytes = 1, .begin = 0};
  EXPECT_TRUE(absl::IsNotFound(reader->Load({&other, 1}, {}).status()));
}

TEST_F(PartialReads, AWholeTensorIsStillAskedForOnce) {
  const auto reader = Opened();
  ASSERT_NE(reader, nullptr);
  std::string room(bytes_, '\0');
  const TensorTarget whole = {.name = big_, .data = room.data(), .bytes = bytes_};
  EXPECT_TRUE(
      absl::IsInvalidArgument(reader->Load(std::vector<TensorTarget>{whole, whole}, {}).status()));
  TensorTarget part = whole;
  part.begin = 10;
  part.bytes = 20;
  std::string other(20, '\0');
  part.data = other.data();
  EXPECT_TRUE(reader->Load(std::vector<TensorTarget>{whole, part}, {}).ok());
  EXPECT_TRUE(other == BytesOf(big_).substr(10, 20));
}

TEST_F(PartialReads, PartsGoToDevices) {
  const auto reader = Opened();
  ASSERT_NE(reader, nullptr);
  SlowDevice device;
  device.CompleteAtOnce(true);
  const uint64_t begin = kChunkBytes - 1000;
  char* memory = device.Allocate(5000);
  const TensorTarget target = {
      .name = big_, .data = memory, .bytes = 5000, .device = &device, .begin = begin};
  const auto report = reader->Load({&target, 1}, {});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(std::string(memory, 5000) == BytesOf(big_).substr(begin, 5000));
}

// ---- Files without a manifest.

TEST_F(PartialReads, PlacesAreReadWithoutProof) {
  const auto reader = OpenedPlaces();
  ASSERT_NE(reader, nullptr);
  EXPECT_EQ(reader->tensors().size(), 3u);
  EXPECT_THAT(reader->files(), ElementsAre(RankFiles{}.model_name()));
  EXPECT_EQ(reader->world_size(), 1u);
  EXPECT_EQ(reader->attempt(), AttemptId());
  const auto report = LoadParts(*reader, {{big_, 0, bytes_}, {big_, 5, 10}});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_FALSE(report->verified);
}

TEST_F(PartialReads, PlacesLieInSeveralFilesOfADirectory) {
  WriteFileBytes(Path("one"), "0123456789");
  WriteFileBytes(Path("two"), "abcdefghij");
  std::filesystem::create_symlink("two", Path("link"));
  const auto reader =
      CheckpointReader::OpenPlaces(scratch_.path(), {"one", "link"},
                                   {{.name = "a", .file = 1, .begin = 2, .end = 5},
                                    {.name = "b", .file = 0, .begin = 9, .end = 10}});
  ASSERT_TRUE(reader.ok()) << reader.status();
  std::string a(3, '?');
  std::string b(1, '?');
  const auto report =
      (*reader)->Load(std::vector<TensorTarget>{{.name = "a", .data = a.data(), .bytes = 3},
                                                {.name = "b", .data = b.data(), .bytes = 1}},
                      {});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(a, "cde");
  EXPECT_EQ(b, "9");
}

TEST_F(PartialReads, PlacesThatAreWrongAreRefused) {
  WriteFileBytes(Path("file"), "0123456789");
  const auto status = [this](const std::string& file, std::vector<PlannedTensor> tensors) {
    return CheckpointReader::OpenPlaces(scratch_.path(), {file}, std::move(tensors)).status();
  };
  EXPECT_TRUE(absl::IsInvalidArgument(status("../file", {})));
  EXPECT_TRUE(absl::IsInvalidArgument(status("", {})));
  EXPECT_TRUE(absl::IsInvalidArgument(status("file", {{.name = "t", .file = 1}})));
  EXPECT_TRUE(absl::IsInvalidArgument(status("file", {{.name = "t", .begin = 2, .end = 1}})));
  const absl::Status twice = status("file", {{.name = "t"}, {.name = "t"}});
  EXPECT_TRUE(absl::IsInvalidArgument(twice));
  EXPECT_THAT(std::string(twice.message()), HasSubstr("twice"));
}

TEST_F(PartialReads, PlacesBeyondTheFileAndFilesThatAreNotThereFailTheLoad) {
  WriteFileBytes(Path("file"), "0123456789");
  std::string room(11, '?');
  const TensorTarget target = {.name = "t", .data = room.data(), .bytes = 11};
  const auto beyond = CheckpointReader::OpenPlaces(scratch_.path(), {"file"},
                                                   {{.name = "t", .begin = 0, .end = 11}});
  ASSERT_TRUE(beyond.ok()) << beyond.status();
  const absl::Status short_file = (*beyond)->Load({&target, 1}, {}).status();
  EXPECT_TRUE(absl::IsDataLoss(short_file)) << short_file;
  const auto missing = CheckpointReader::OpenPlaces(scratch_.path(), {"none"},
                                                    {{.name = "t", .begin = 0, .end = 11}});
  ASSERT_TRUE(missing.ok()) << missing.status();
  EXPECT_TRUE(absl::IsNotFound((*missing)->Load({&target, 1}, {}).status()));
}

// ---- One manifest of a directory.

TEST_F(PartialReads, OneManifestIsOpenedWhateverBecameOfTheOtherRanks) {
  const RankFiles rank = {.rank = 1, .world_size = 3};
  Write(rank);
  EXPECT_TRUE(absl::IsFailedPrecondition(CheckpointReader::Open(scratch_.path(), 1).status()));
  const auto reader = CheckpointReader::OpenManifest(scratch_.path(), rank.manifest_name());
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ((*reader)->world_size(), 3u);
  EXPECT_EQ((*reader)->step(), 7u);
  EXPECT_EQ((*reader)->attempt(), rank.attempt);
  EXPECT_THAT((*reader)->files(), ElementsAre(rank.model_name()));
  const auto report = LoadParts(**reader, {{big_, 0, bytes_}});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(report->verified);
}

TEST_F(PartialReads, AManifestIsRefusedWithoutItsFilesOrWhenItIsDamaged) {
  Write();
  const std::string name = RankFiles{}.manifest_name();
  const auto status = [&] {
    return CheckpointReader::OpenManifest(scratch_.path(), name).status();
  };
  const std::string model = Path(RankFiles{}.model_name());
  std::filesystem::resize_file(model, std::filesystem::file_size(model) - 1);
  EXPECT_TRUE(absl::IsDataLoss(status())) << status();
  std::filesystem::remove(model);
  EXPECT_FALSE(status().ok());
  EXPECT_THAT(std::string(status().message()), HasSubstr(RankFiles{}.model_name()));
  Write();
  FlipBit(Path(name), 300);
  EXPECT_TRUE(absl::IsDataLoss(status())) << status();
  EXPECT_THAT(std::string(status().message()), HasSubstr(name));
  std::filesystem::remove(Path(name));
  EXPECT_TRUE(absl::IsNotFound(status())) << status();
  EXPECT_TRUE(absl::IsNotFound(CheckpointReader::OpenManifest(Path("nowhere"), name).status()));
}

}  // namespace
}  // namespace holdfast
