// Saves into a directory that a framework owns: the save's files stand side by side with the files
// of other attempts, and nothing of Holdfast's takes the directory for a checkpoint of its own.
#include <signal.h>
#include <sys/stat.h>

#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "holdfast/load.h"
#include "holdfast/recovery.h"
#include "holdfast/verify.h"
#include "runtime/format/file_names.h"
#include "tests/testing/checkpoint_files.h"
#include "tests/testing/child_process.h"
#include "tests/testing/framed_plan.h"
#include "tests/testing/save_test.h"

namespace holdfast::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

constexpr AttemptId kOlder = {.high = 9, .low = 1};
constexpr AttemptId kNewer = {.high = 2, .low = 2};

class FilesOnly : public LauncherTest {
 protected:
  void SetUp() override {
    LauncherTest::SetUp();
    std::filesystem::create_directory(path());
  }
  /// The framework's directory, below the one that checkpoints are made in.
  std::string path() const { return directory() + "/framework"; }

  struct Rank {
    AttemptId attempt;
    uint32_t rank = 0;
    uint32_t world_size = 1;
    std::string file;
    uint64_t seed = 1;
    uint64_t step = 1;
    bool replace = false;
    uint64_t bytes = 100'000;
    std::string manifest() const { return format::ManifestName(rank, world_size, attempt); }
  };
  TrainingState StateOf(const Rank& rank) const {
    return TrainingState::Uniform(3, rank.bytes, rank.seed);
  }
  absl::Status SaveRank(const Rank& rank) {
    CheckpointerOptions options = Options();
    options.rank = rank.rank;
    options.world_size = rank.world_size;
    const auto checkpointer = Make(options);
    const TrainingState state = StateOf(rank);
    const std::vector<TensorSource> sources = state.Sources();
    const SavePlan plan = FramedPlan(sources, {.file_name = rank.file});
    const auto handle = checkpointer->SaveAsync({.name = "framework",
                                                 .step = rank.step,
                                                 .plan = &plan,
                                                 .replace = rank.replace,
                                                 .attempt = rank.attempt,
                                                 .files_only = true});
    return handle.ok() ? handle->WaitDurable(kLong).status() : handle.status();
  }
  void ExpectVerdict(Verdict verdict, const AttemptId& attempt) const {
    const auto report = Verify(path(), {});
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->verdict, verdict) << report->note;
    EXPECT_EQ(report->attempt, attempt);
  }
  /// Neither a checkpoint nor the ruin of one.
  void ExpectLeftAlone() const {
    const std::vector<std::string> before = Names(path());
    const auto complete = ListCheckpoints(directory());
    ASSERT_TRUE(complete.ok()) << complete.status();
    EXPECT_THAT(*complete, IsEmpty());
    EXPECT_TRUE(absl::IsNotFound(FindNewest(directory()).status()));
    EXPECT_TRUE(absl::IsFailedPrecondition(InspectCheckpoint(path()).status()));
    const auto recovered = Recover(directory(), {.wait_for_orphans = absl::ZeroDuration()});
    ASSERT_TRUE(recovered.ok()) << recovered.status();
    EXPECT_THAT(recovered->complete, IsEmpty());
    EXPECT_THAT(recovered->promoted, IsEmpty());
    EXPECT_THAT(recovered->removed, IsEmpty());
    EXPECT_THAT(recovered->kept_incomplete, IsEmpty());
    EXPECT_EQ(Names(path()), before);
  }
};

INSTANTIATE_TEST_SUITE_P(Launchers, FilesOnly, kEveryLauncher, LauncherName);

TEST_P(FilesOnly, OneAttemptIsReadAsACheckpoint) {
  const Rank first = {.attempt = kOlder, .rank = 0, .world_size = 2, .file = "__0_0", .seed = 1};
  const Rank second = {.attempt = kOlder, .rank = 1, .world_size = 2, .file = "__1_0", .seed = 2};
  EXPECT_EQ(SaveRank(first), absl::OkStatus());
  EXPECT_TRUE(absl::IsFailedPrecondition(CheckpointReader::Open(path()).status()));
  ExpectVerdict(Verdict::kIncomplete, kOlder);
  EXPECT_EQ(SaveRank(second), absl::OkStatus()) << "no rank waits for another";
  EXPECT_THAT(Names(path()),
              UnorderedElementsAre("__0_0", "__1_0", first.manifest(), second.manifest()));
  ExpectVerdict(Verdict::kSound, kOlder);
  for (const Rank& rank : {first, second}) {
    const auto reader = CheckpointReader::Open(path(), rank.rank);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_THAT((*reader)->files(), ElementsAre(rank.file));
    EXPECT_TRUE(CheckpointReader::OpenManifest(path(), rank.manifest()).ok());
  }
  ExpectLeftAlone();
}

TEST_P(FilesOnly, AFileThatAnotherSaveTookOverIsNotGivenItsName) {
  CheckpointerOptions options = Options();
  options.qos.bytes_per_second_max = 8u << 20;
  const auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  const TrainingState state = TrainingState::Uniform(3, 4u << 20, 1);
  const std::vector<TensorSource> sources = state.Sources();
  const SavePlan plan = FramedPlan(sources, {.file_name = "__0_0"});
  const auto handle = checkpointer->SaveAsync(
      {.name = "framework", .step = 1, .plan = &plan, .attempt = kOlder, .files_only = true});
  ASSERT_TRUE(handle.ok()) << handle.status();
  ASSERT_TRUE(WaitFor([&] { return handle->progress().bytes_written > 0; }));
  // As a second save of the same file does, which takes the temporary name for a dead one's.
  std::filesystem::remove(path() + "/__0_0.tmp");
  WriteFileBytes(path() + "/__0_0.tmp", "half written");
  const auto report = handle->WaitDurable(kLong);
  EXPECT_TRUE(absl::IsAborted(report.status())) << report.status();
  EXPECT_THAT(std::string(report.status().message()), HasSubstr("another save"));
  EXPECT_THAT(Names(path()), ElementsAre("__0_0.tmp")) << "the other one's";
}

class FilesOnlyClosed : public FilesOnly {};
INSTANTIATE_TEST_SUITE_P(Launchers, FilesOnlyClosed, kProcessLaunchers, LauncherName);

TEST_P(FilesOnlyClosed, AFileThatWasTakenOverWithItsInodeNumberIsNotGivenItsName) {
  CheckpointerOptions options = Options();
  options.read_back = true;
  const auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  const TrainingState small = TrainingState::Uniform(1, 100'000, 1);
  const TrainingState large = TrainingState::Uniform(1, 100u << 20, 2);
  const std::vector<TensorSource> small_sources = small.Sources();
  const std::vector<TensorSource> large_sources = large.Sources();
  SavePlan plan = FramedPlan(small_sources, {.file_name = "__0_0"});
  const SavePlan second = FramedPlan(large_sources, {.file_name = "__0_1"});
  for (PlannedTensor tensor : second.tensors) {
    tensor.name += ".large";
    tensor.file = 1;
    plan.tensors.push_back(tensor);
  }
  plan.files.push_back(second.files[0]);
  for (Segment& segment : plan.files[1].segments) {
    if (segment.tensor != Segment::kLiteral) segment.tensor += 1;
  }
  const std::string victim = path() + "/__0_0.tmp";
  const auto handle = checkpointer->SaveAsync(
      {.name = "framework", .step = 1, .plan = &plan, .attempt = kOlder, .files_only = true});
  ASSERT_TRUE(handle.ok()) << handle.status();
  ASSERT_TRUE(WaitFor([&] { return handle->progress().phase == "reading back"; }));
  SendSignal(handle->worker_pid(), SIGSTOP);
  struct stat before {};
  struct stat after {};
  ASSERT_EQ(stat(victim.c_str(), &before), 0);
  for (int tries = 0; tries < 100 && after.st_ino != before.st_ino; ++tries) {
    std::filesystem::remove(victim);
    WriteFileBytes(victim, "half written");
    ASSERT_EQ(stat(victim.c_str(), &after), 0);
  }
  SendSignal(handle->worker_pid(), SIGCONT);
  if (after.st_ino != before.st_ino) GTEST_SKIP() << "inode numbers are not given out again here";
  const auto report = handle->WaitDurable(kLong);
  EXPECT_TRUE(absl::IsAborted(report.status())) << report.status();
  EXPECT_THAT(Names(path()), ElementsAre("__0_0.tmp")) << "the other one's";
}

TEST_P(FilesOnly, AnIncompleteAttemptBesideACompleteOneIsLeftOut) {
  const Rank complete = {.attempt = kOlder, .file = "complete", .seed = 1, .step = 1};
  const Rank lonely = {
      .attempt = kNewer, .rank = 1, .world_size = 2, .file = "lonely", .seed = 2, .step = 2};
  EXPECT_EQ(SaveRank(complete), absl::OkStatus());
  EXPECT_EQ(SaveRank(lonely), absl::OkStatus());
  ExpectVerdict(Verdict::kSound, kOlder);
  EXPECT_TRUE(StateOf(complete).CompareWith(path()).ok());
  const auto report = Verify(path(), {});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_THAT(report->note, HasSubstr("lonely"));
  // By name it can be read.
  const auto reader = CheckpointReader::OpenManifest(path(), lonely.manifest());
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ((*reader)->attempt(), kNewer);
  ExpectLeftAlone();
}

TEST_P(FilesOnly, OfTwoCompleteAttemptsBothAreVerifiedAndTheNewerIsOpened) {
  const Rank older = {.attempt = kOlder, .file = "older", .seed = 1, .step = 1};
  const Rank newer = {.attempt = kNewer, .file = "newer", .seed = 2, .step = 2};
  EXPECT_EQ(SaveRank(newer), absl::OkStatus());
  EXPECT_EQ(SaveRank(older), absl::OkStatus());
  EXPECT_TRUE(StateOf(newer).CompareWith(path()).ok()) << StateOf(newer).CompareWith(path());
  ExpectVerdict(Verdict::kSound, kNewer);
  FlipBit(path() + "/older", 10);
  ExpectVerdict(Verdict::kCorrupt, kNewer);
  ExpectLeftAlone();
}

TEST_P(FilesOnly, FilesThatANewerAttemptWroteAnewAreItsOwn) {
  // Of other bytes and of another size.
  for (const uint64_t bytes : {uint64_t{100'000}, uint64_t{120'000}}) {
    const std::string file = absl::StrCat("file-", bytes);
    const Rank older = {.attempt = kOlder, .file = file, .seed = 1};
    const Rank newer = {
        .attempt = kNewer, .file = file, .seed = 2, .replace = true, .bytes = bytes};
    for (const std::string& name : Names(path())) std::filesystem::remove(path() + "/" + name);
    EXPECT_EQ(SaveRank(older), absl::OkStatus());
    Rank refused = newer;
    refused.replace = false;
    EXPECT_TRUE(absl::IsAlreadyExists(SaveRank(refused)));
    ExpectVerdict(Verdict::kSound, kOlder);
    EXPECT_EQ(SaveRank(newer), absl::OkStatus());
    ExpectVerdict(Verdict::kSound, kNewer);
    EXPECT_TRUE(StateOf(newer).CompareWith(path()).ok()) << StateOf(newer).CompareWith(path());
  }
  ExpectLeftAlone();
}

TEST_P(FilesOnly, AFileOfAnotherRankThatIsMissingMakesTheAttemptIncomplete) {
  const Rank first = {.attempt = kOlder, .rank = 0, .world_size = 2, .file = "a", .seed = 1};
  const Rank second = {.attempt = kOlder, .rank = 1, .world_size = 2, .file = "b", .seed = 2};
  EXPECT_EQ(SaveRank(first), absl::OkStatus());
  EXPECT_EQ(SaveRank(second), absl::OkStatus());
  std::filesystem::remove(path() + "/b");
  ExpectVerdict(Verdict::kIncomplete, kOlder);
  EXPECT_TRUE(absl::IsFailedPrecondition(CheckpointReader::Open(path(), 0).status()));
  EXPECT_TRUE(CheckpointReader::OpenManifest(path(), first.manifest()).ok());
  ExpectLeftAlone();
}

}  // namespace
}  // namespace holdfast::testing
