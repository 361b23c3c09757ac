// The file by which a framework commits: without it, or with a foreign file, manifests prove
// nothing.
#include "holdfast/commit_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <string>

#include "holdfast/verify.h"
#include "runtime/base/planted_bugs.h"
#include "runtime/base/status.h"
#include "runtime/format/commit_record.h"
#include "runtime/format/file_names.h"
#include "runtime/sys/system.h"
#include "tests/testing/checkpoint_files.h"
#include "tests/testing/small_checkpoint.h"

namespace holdfast {
namespace {

using testing::FlipBit;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::ReadFileBytes;
using ::testing::SizeIs;
using testing::SmallRank;
using testing::TemporaryDirectory;
using testing::WriteFileBytes;
using testing::WriteSmallCheckpoint;

constexpr AttemptId kParent = {.high = 3, .low = 4};

class CommitFileTest : public ::testing::Test {
 protected:
  void TearDown() override {
    base::g_bug = base::Bug::kNone;
    sys::g_system = sys::kKernel;
  }

  /// A save of two ranks into the directory, its `generation`-th.
  static SmallRank Save(uint32_t generation) {
    return {.checkpoint = "run",
            .attempt = {.high = 5, .low = 100 - generation},
            .world_size = 2,
            .step = generation,
            .saved_at_ns = uint64_t{1'700'000'000'000'000'000} + generation,
            .dcp_generation = generation,
            .recorded = true};
  }
  /// As an earlier version, which made no commit record.
  static SmallRank EarlierSave(uint32_t generation) {
    SmallRank save = Save(generation);
    save.recorded = false;
    return save;
  }
  static std::string MetadataOf(const SmallRank& save) {
    return absl::StrCat("metadata of generation ", *save.dcp_generation, " and save ",
                        base::Hex(save.attempt));
  }
  void WriteData(const SmallRank& save) { WriteSmallCheckpoint(path(), save); }
  void Record(const SmallRank& save) {
    const std::string contents = MetadataOf(save);
    const auto record = MakeCommitRecord(
        path(), {.attempt = save.attempt, .parent = kParent, .world_size = save.world_size},
        {.name = ".metadata", .contents = contents});
    ASSERT_TRUE(record.ok()) << record.status();
    WriteFileBytes(path(record->name), record->text);
  }
  void Commit(const SmallRank& save) { WriteFileBytes(path(".metadata"), MetadataOf(save)); }
  void WriteAll(const SmallRank& save) {
    WriteData(save);
    Record(save);
    Commit(save);
  }

  std::string path(const std::string& name = "") const {
    return (directory_ / "run") + (name.empty() ? "" : "/" + name);
  }
  /// Verifies the directory, or one file in it.
  VerifyReport Verified(const std::string& name = "") const {
    auto report = Verify(path(name), {});
    EXPECT_TRUE(report.ok()) << report.status();
    return report.ok() ? *std::move(report) : VerifyReport{};
  }
  void ExpectFault(Verdict verdict, const std::string& reason) const {
    const VerifyReport report = Verified();
    EXPECT_EQ(report.verdict, verdict);
    ASSERT_THAT(report.faults, Not(IsEmpty()));
    EXPECT_EQ(report.faults[0].file, ".metadata");
    EXPECT_EQ(report.faults[0].reason, reason);
  }
  void ExpectSound(const SmallRank& save) const {
    const VerifyReport report = Verified();
    EXPECT_EQ(report.verdict, Verdict::kSound) << report.note;
    EXPECT_EQ(report.attempt, save.attempt);
    EXPECT_EQ(report.files, save.world_size);
  }

  const TemporaryDirectory directory_;
};

TEST_F(CommitFileTest, IsProvenWithTheRest) {
  WriteAll(Save(1));
  ExpectSound(Save(1));
  EXPECT_THAT(Verified().note, IsEmpty());
  FlipBit(path("__1_1.distcp"), 77);
  EXPECT_EQ(Verified().verdict, Verdict::kCorrupt);
}

TEST_F(CommitFileTest, IsMissedInASaveThatNeverCommitted) {
  WriteData(Save(1));
  ExpectFault(Verdict::kIncomplete, "missing");
  Record(Save(1));
  ExpectFault(Verdict::kIncomplete, "missing");
}

TEST_F(CommitFileTest, IsDamagedByOneBitOneByteOrAnotherFileInItsPlace) {
  WriteAll(Save(1));
  const std::string contents = ReadFileBytes(path(".metadata"));
  for (uint64_t byte = 0; byte < contents.size(); ++byte) {
    FlipBit(path(".metadata"), byte);
    ExpectFault(Verdict::kCorrupt, "digest");
    FlipBit(path(".metadata"), byte);
  }
  ExpectSound(Save(1));
  for (const std::string& other : {contents.substr(1), contents + "x", std::string()}) {
    WriteFileBytes(path(".metadata"), other);
    ExpectFault(Verdict::kCorrupt, "size");
  }
  Commit(Save(2));
  ExpectFault(Verdict::kCorrupt, "digest");
  std::filesystem::remove(path(".metadata"));
  WriteFileBytes(path("elsewhere"), contents);
  std::filesystem::create_symlink("elsewhere", path(".metadata"));
  ExpectFault(Verdict::kCorrupt, "structure");
}

std::atomic<uint64_t> g_far_reads;

TEST_F(CommitFileTest, IsNotReadWhereItHasAnotherLength) {
  WriteAll(Save(1));
  std::filesystem::resize_file(path(".metadata"), uint64_t{1} << 40);
  g_far_reads = 0;
  sys::g_system.pread = [](int fd, void* buffer, size_t bytes, off_t offset) -> ssize_t {
    constexpr off_t kFar = off_t{64} << 20;
    if (offset < kFar) return sys::kKernel.pread(fd, buffer, bytes, offset);
    ++g_far_reads;
    errno = EIO;
    return -1;
  };
  ExpectFault(Verdict::kCorrupt, "size");
  EXPECT_EQ(g_far_reads, 0u);
}

TEST_F(CommitFileTest, SaysWhichOfTwoSavesIsCommitted) {
  WriteAll(Save(1));
  WriteData(Save(2));
  ExpectSound(Save(1));
  Record(Save(2));
  ExpectSound(Save(1));
  Commit(Save(2));
  ExpectSound(Save(2));
  FlipBit(path(".metadata"), 0);
  ExpectFault(Verdict::kCorrupt, "digest");
  std::filesystem::remove(path(".metadata"));
  ExpectFault(Verdict::kIncomplete, "missing");
}

TEST_F(CommitFileTest, SaysSoThoughTheOtherSavesRecordIsDamaged) {
  WriteAll(Save(1));
  WriteData(Save(2));
  Record(Save(2));
  FlipBit(path(format::CommitRecordName(Save(2).attempt)), 99);
  ExpectSound(Save(1));
  FlipBit(path(format::CommitRecordName(Save(1).attempt)), 99);
  EXPECT_EQ(Verified().verdict, Verdict::kCorrupt);
}

TEST_F(CommitFileTest, IsOnlyLookedForWhereNoRecordWasMade) {
  WriteData(EarlierSave(1));
  Commit(Save(1));
  ExpectSound(Save(1));
  EXPECT_THAT(Verified().note, HasSubstr("Not proven"));
  // The next save's record must not make the older checkpoint corrupt before it has committed.
  WriteData(Save(2));
  Record(Save(2));
  ExpectSound(Save(1));
  Commit(Save(2));
  ExpectSound(Save(2));
  EXPECT_THAT(Verified().note, Not(HasSubstr("Not proven")));
}

TEST_F(CommitFileTest, MissesTheRecordOfTheSaveThatItCommits) {
  WriteAll(Save(1));
  const std::string record = path(format::CommitRecordName(Save(1).attempt));
  std::filesystem::remove(record);
  const VerifyReport report = Verified();
  EXPECT_EQ(report.verdict, Verdict::kCorrupt);
  ASSERT_THAT(report.faults, Not(IsEmpty()));
  EXPECT_EQ(report.faults[0].file, format::CommitRecordName(Save(1).attempt));
  EXPECT_EQ(report.faults[0].reason, "missing");
  const std::string contents = MetadataOf(Save(1));
  const auto checked =
      CheckCommitFile(path(), Save(1).attempt, {.name = ".metadata", .contents = contents});
  EXPECT_EQ(checked.status().code(), absl::StatusCode::kDataLoss) << checked.status();
  EXPECT_THAT(std::string(checked.status().message()), HasSubstr("missing: the commit record"));
  // A save without a record has not committed beside a committed save.
  Record(Save(1));
  WriteData(Save(2));
  ExpectSound(Save(1));
}

TEST_F(CommitFileTest, OfAnotherProgramMakesManifestsWithoutARecordStale) {
  WriteData(Save(1));  // died before its record
  WriteFileBytes(path(".metadata"), "\x80 torch.distributed.checkpoint.metadata .");
  EXPECT_THAT(Verified().note, HasSubstr("No manifest"));
  EXPECT_THAT(Verified("__0_1.distcp").note, HasSubstr("No manifest"));
}

TEST_F(CommitFileTest, DecidesWhichSaveMayProveOneFile) {
  WriteAll(Save(1));
  WriteData(Save(2));
  EXPECT_EQ(Verified("__0_1.distcp").verdict, Verdict::kSound);
  EXPECT_NE(Verified("__0_2.distcp").verdict, Verdict::kSound);
}

TEST_F(CommitFileTest, MayBeOfEachRankAlone) {
  for (uint32_t rank : {0u, 1u}) {
    SmallRank alone = Save(rank);
    alone.world_size = 1;
    alone.dcp_generation = 10 + rank;  // a file name of its own
    WriteSmallCheckpoint(path(), alone);
    const std::string name = absl::StrCat("__", rank, ".metadata");
    const auto record =
        MakeCommitRecord(path(), {.attempt = alone.attempt}, {.name = name, .contents = "own"});
    ASSERT_TRUE(record.ok()) << record.status();
    WriteFileBytes(path(record->name), record->text);
    WriteFileBytes(path(name), "own");
  }
  EXPECT_EQ(Verified().verdict, Verdict::kSound);
  EXPECT_EQ(Verified().files, 2u);
  WriteFileBytes(path("__1.metadata"), "odd");
  EXPECT_EQ(Verified().verdict, Verdict::kCorrupt);
}

TEST_F(CommitFileTest, ProvesTheManifestsToo) {
  WriteAll(Save(1));
  // Sound by itself, and not the one of the save.
  SmallRank other = Save(1);
  other.rank = 1;
  other.bytes = 4000;
  other.Write(path());
  EXPECT_EQ(Verified().verdict, Verdict::kCorrupt);
  other.bytes = 5000;
  other.Write(path());
  ExpectSound(Save(1));
  for (uint32_t rank : {0u, 1u}) {
    other.rank = rank;
    std::filesystem::remove(path(other.manifest_name()));
    EXPECT_EQ(Verified().verdict, Verdict::kIncomplete);
  }
}

TEST_F(CommitFileTest, IsRecordedWithTheParentOfItsSave) {
  WriteAll(Save(1));
  const auto record =
      format::ParseCommitRecord(ReadFileBytes(path(format::CommitRecordName(Save(1).attempt))));
  ASSERT_TRUE(record.ok()) << record.status();
  EXPECT_EQ(record->parent, kParent);
}

TEST_F(CommitFileTest, IsNotRecordedWithoutAllManifests) {
  WriteData(Save(1));
  SmallRank second = Save(1);
  second.rank = 1;
  std::filesystem::remove(path(second.manifest_name()));
  EXPECT_EQ(
      MakeCommitRecord(path(), {.attempt = second.attempt, .world_size = 2}, {.name = ".metadata"})
          .status()
          .code(),
      absl::StatusCode::kNotFound);
}

TEST_F(CommitFileTest, IsComparedWithTheRecordOfItsSave) {
  WriteAll(Save(1));
  const std::string contents = MetadataOf(Save(1));
  const CommitFile file = {.name = ".metadata", .contents = contents};
  const auto manifests = CheckCommitFile(path(), Save(1).attempt, file);
  ASSERT_TRUE(manifests.ok()) << manifests.status();
  ASSERT_TRUE(manifests->has_value());
  EXPECT_THAT(**manifests, SizeIs(2));
  WriteData(EarlierSave(2));
  const auto unrecorded = CheckCommitFile(path(), Save(2).attempt, file);
  ASSERT_TRUE(unrecorded.ok()) << unrecorded.status();
  EXPECT_FALSE(unrecorded->has_value());
  for (const CommitFile& other : {CommitFile{".metadata", "another"}, CommitFile{"x", contents}}) {
    EXPECT_EQ(CheckCommitFile(path(), Save(1).attempt, other).status().code(),
              absl::StatusCode::kDataLoss);
  }
}

TEST_F(CommitFileTest, IsReadOnceHoweverManySavesItMayBeOf) {
  WriteAll(Save(1));
  WriteData(Save(2));
  Record(Save(2));
  // The second save commits between two looks at the file.
  static int opened;
  static std::string metadata;
  opened = 0;
  metadata = path(".metadata");
  sys::g_system.openat = [](int directory, const char* name, int flags, mode_t mode) {
    const int fd = sys::kKernel.openat(directory, name, flags, mode);
    if (std::string(name) == ".metadata" && ++opened == 1) {
      std::filesystem::remove(metadata);
      WriteFileBytes(metadata, MetadataOf(Save(2)));
    }
    return fd;
  };
  EXPECT_EQ(Verified().verdict, Verdict::kSound);
  EXPECT_EQ(opened, 1);
}

// Mistakes on purpose: the tests above would not pass with them.

TEST_F(CommitFileTest, APlantedBugThatIgnoresItIsSeen) {
  base::g_bug = base::Bug::kIgnoreCommitFile;
  WriteData(Save(1));
  ExpectSound(Save(1));
  Record(Save(1));
  ExpectSound(Save(1));
  Commit(Save(2));
  ExpectSound(Save(1));
}

}  // namespace
}  // namespace holdfast
