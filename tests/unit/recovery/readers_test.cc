// Every reader of a directory agrees on which checkpoints are complete and which is the newest:
// list, find-newest, load, verify, recover and retention, over one table of directories.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "holdfast/load.h"
#include "holdfast/recovery.h"
#include "holdfast/verify.h"
#include "runtime/format/directory_names.h"
#include "tests/testing/small_checkpoint.h"

namespace holdfast::testing {
namespace {

namespace fs = std::filesystem;
using format::DirectoryKind;
using ::testing::UnorderedElementsAreArray;

constexpr AttemptId kA = {.high = 1, .low = 1};
constexpr AttemptId kB = {.high = 2, .low = 2};

/// Checkpoint NAME of two ranks, saved at second `at`.
SmallRank Of(const std::string& name, uint64_t at, const AttemptId& attempt = kA) {
  return {.checkpoint = name,
          .attempt = attempt,
          .world_size = 2,
          .step = 7,
          .saved_at_ns = at * 1'000'000'000,
          .recorded = true};
}

std::string NameOf(DirectoryKind kind, const AttemptId& attempt) {
  return format::FormatDirectoryName({.checkpoint = "step-7", .kind = kind, .attempt = attempt});
}

void Put(const std::string& directory, const SmallRank& rank, bool record = true) {
  WriteSmallCheckpoint(directory, rank, record);
}

/// As an earlier version, without a commit record.
void PutEarlier(const std::string& directory, SmallRank rank) {
  rank.recorded = false;
  WriteSmallCheckpoint(directory, rank);
}

SmallRank Replacing(SmallRank rank, const AttemptId& older) {
  rank.replaces = {older};
  return rank;
}

/// `complete`: as the directory is. `recovered`: after a recovery. The newest is their last.
struct Case {
  const char* name;
  std::function<void(const std::string& directory)> make;
  std::vector<std::string> complete;
  std::vector<std::string> recovered;
};

const Case kCases[] = {
    {"StrayNames",
     [](const std::string& d) {
       Put(d + "/step-7", Of("step-7", 1));
       std::ofstream(d + "/notes.txt") << "x";
       std::ofstream(d + "/step-7/config.json") << "{}";
       fs::create_directory(d + "/logs");
       Put(d + "/other.partial-xyz", Of("other.partial-xyz", 2));
     },
     {"step-7", "other.partial-xyz"},
     {"step-7", "other.partial-xyz"}},
    {"UnreadableOldManifest",
     [](const std::string& d) {
       PutEarlier(d + "/step-1", Of("step-1", 1));
       std::ofstream(d + "/step-1/rank-00000-of-00002.manifest.json") << "{";
       Put(d + "/step-2", Of("step-2", 2));
     },
     {"step-2"},
     {"step-2"}},
    {"TwoRuns",
     [](const std::string& d) {
       Put(d + "/a-9", Of("a-9", 1));
       Put(d + "/b-1", Of("b-1", 2));
       Put(d + "/a-10", Of("a-10", 3));
     },
     {"a-9", "b-1", "a-10"},
     {"a-9", "b-1", "a-10"}},
    {"RollbackAndEqualSteps",
     [](const std::string& d) {
       Put(d + "/step-300", Of("step-300", 1));
       Put(d + "/step-110", Of("step-110", 2));
       PutEarlier(d + "/step-111", Of("step-111", 3));
     },
     {"step-300", "step-110", "step-111"},
     {"step-300", "step-110", "step-111"}},
    {"DirectoryMovedToAnotherName",
     [](const std::string& d) { Put(d + "/kept", Of("step-7", 1)); },
     {"kept"},
     {"kept"}},
    {"CommitWithoutAllVotes",
     [](const std::string& d) {
       Put(d + "/step-6", Of("step-6", 1));
       Of("step-7", 2).Write(d + "/" + NameOf(DirectoryKind::kPartial, kA));
     },
     {"step-6"},
     {"step-6"}},
    {"CommitWithoutItsRecord",
     [](const std::string& d) {
       Put(d + "/step-6", Of("step-6", 1));
       Put(d + "/" + NameOf(DirectoryKind::kPartial, kA), Of("step-7", 2), /*record=*/false);
     },
     {"step-6"},
     {"step-6", "step-7"}},
    {"CommitOfAnEarlierVersion",
     [](const std::string& d) {
       Put(d + "/step-6", Of("step-6", 1));
       PutEarlier(d + "/" + NameOf(DirectoryKind::kPartial, kA), Of("step-7", 2));
     },
     {"step-6"},
     {"step-6", "step-7"}},
    {"RecordIsGone",
     [](const std::string& d) {
       Put(d + "/step-6", Of("step-6", 1));
       Put(d + "/step-7", Of("step-7", 2), /*record=*/false);
     },
     {"step-6"},
     {"step-6"}},
    {"CommitWithoutItsRename",
     [](const std::string& d) {
       Put(d + "/step-6", Of("step-6", 1));
       Put(d + "/" + NameOf(DirectoryKind::kPartial, kA), Of("step-7", 2));
     },
     {"step-6"},
     {"step-6", "step-7"}},
    {"ReplaceWithoutItsExchange",
     [](const std::string& d) {
       Put(d + "/step-6", Of("step-6", 2));
       Put(d + "/step-7", Of("step-7", 1));
       Put(d + "/" + NameOf(DirectoryKind::kPartial, kB), Replacing(Of("step-7", 3, kB), kA));
     },
     {"step-7", "step-6"},
     {"step-6", "step-7"}},
    {"ReplaceBetweenTwoRenames",
     [](const std::string& d) {
       Put(d + "/step-6", Of("step-6", 2));
       Put(d + "/" + NameOf(DirectoryKind::kPartial, {.high = 2, .low = 3}), Of("step-7", 1));
       Put(d + "/" + NameOf(DirectoryKind::kPartial, kB), Replacing(Of("step-7", 3, kB), kA));
     },
     {"step-6"},
     {"step-6", "step-7"}},
    {"ReplaceBehindItsExchange",
     [](const std::string& d) {
       Put(d + "/" + NameOf(DirectoryKind::kPartial, kB), Of("step-7", 9));
       Put(d + "/step-7", Replacing(Of("step-7", 1, kB), kA));
     },
     {"step-7"},
     {"step-7"}},
    {"RetiredAndHidden",
     [](const std::string& d) {
       Put(d + "/" + NameOf(DirectoryKind::kRetired, kA), Of("step-7", 9));
       Put(d + "/" + NameOf(DirectoryKind::kFenced, kA), Of("step-7", 9));
       Put(d + "/step-8", Of("step-8", 1));
     },
     {"step-8"},
     {"step-8"}},
    {"RetiredByAnEarlierVersionAndHalfRemoved",
     [](const std::string& d) {
       const std::string retired = d + "/" + NameOf(DirectoryKind::kRetired, kA).substr(1);
       Put(d + "/step-8", Of("step-8", 1));
       fs::create_directory(retired);
       std::ofstream(retired + "/model-00000-of-00002.safetensors") << "rest";
     },
     {"step-8"},
     {"step-8"}},
};

class Readers : public ::testing::TestWithParam<Case> {
 protected:
  /// Each complete one loads and is sound, everything else does not load and is not sound.
  void ExpectAgreement(const std::vector<std::string>& complete) {
    std::vector<std::string> listed;
    const auto list = ListCheckpoints(directory_.path());
    ASSERT_TRUE(list.ok()) << list.status();
    for (const CheckpointInfo& info : *list) listed.push_back(info.name);
    EXPECT_EQ(listed, complete);
    const auto newest = FindNewest(directory_.path());
    ASSERT_TRUE(newest.ok()) << newest.status();
    EXPECT_EQ(newest->name, complete.back());
    std::vector<std::string> opened;
    std::vector<std::string> sound;
    for (const auto& entry : fs::directory_iterator(directory_.path())) {
      if (!entry.is_directory() || fs::is_empty(entry)) continue;
      const std::string name = entry.path().filename();
      const std::string path = directory_ / name;
      if (InspectCheckpoint(path).ok() && CheckpointReader::Open(path, {}).ok())
        opened.push_back(name);
      const auto report = Verify(path, {});
      if (report.ok() && report->verdict == Verdict::kSound) sound.push_back(name);
    }
    EXPECT_THAT(opened, UnorderedElementsAreArray(complete));
    EXPECT_THAT(sound, UnorderedElementsAreArray(complete));
    // Retention keeps the newest of its series, and names nothing that is not complete.
    for (const std::string& name : SelectForRemoval(*list, {.keep_last = 1}, newest->name)) {
      EXPECT_NE(name, newest->name);
      EXPECT_TRUE(std::count(complete.begin(), complete.end(), name) == 1) << name;
    }
  }

  TemporaryDirectory directory_;
};

TEST_P(Readers, AgreeOnWhatIsCompleteAndOnTheNewest) {
  GetParam().make(directory_.path());
  ExpectAgreement(GetParam().complete);
  const auto report = Recover(directory_.path(), {.wait_for_orphans = absl::ZeroDuration()});
  ASSERT_TRUE(report.ok()) << report.status();
  std::vector<std::string> reported;
  for (const CheckpointInfo& info : report->complete) reported.push_back(info.name);
  EXPECT_EQ(reported, GetParam().recovered);
  ExpectAgreement(GetParam().recovered);
}

INSTANTIATE_TEST_SUITE_P(Directories, Readers, ::testing::ValuesIn(kCases),
                         [](const auto& tested) { return std::string(tested.param.name); });

}  // namespace
}  // namespace holdfast::testing
