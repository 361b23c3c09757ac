// Replicated files: rank 0 writes what all ranks have alike, and the save fails where it is not
// alike.
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "holdfast/load.h"
#include "holdfast/plan.h"
#include "holdfast/recovery.h"
#include "holdfast/verify.h"
#include "runtime/sys/system.h"
#include "runtime/worker/planted_bugs.h"
#include "tests/testing/save_test.h"

namespace holdfast::testing {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kRanks = 3;
constexpr char kReplicas[] = "model-replicas.safetensors";

/// Renames the tensors, so that two states may stand in one plan.
TrainingState Named(TrainingState state, const std::string& prefix) {
  for (TrainingState::Tensor& tensor : state.tensors()) tensor.name = prefix + tensor.name;
  return state;
}

class Replicas : public LauncherTest {
 protected:
  void TearDown() override {
    worker::testing::g_never_compare_replicas = false;
    LauncherTest::TearDown();
  }
  struct Rank {
    TrainingState replicas;
    TrainingState own;
    bool has_replicas = true;
    absl::Status status;
    SaveReport report;
  };
  static std::vector<Rank> Equal() {
    std::vector<Rank> ranks;
    for (uint32_t i = 0; i < kRanks; ++i) {
      ranks.push_back({.replicas = Named(TrainingState::Uniform(8, 3u << 20, 7), "same."),
                       .own = Named(TrainingState::Uniform(2, 100'000, i), "own.")});
    }
    return ranks;
  }
  void Append(const std::string& file, const TrainingState& state, bool replicated,
              SavePlan* plan) const {
    SavePlan one = *PlanSafetensors(file, state.Sources(), {.attempt = attempt_});
    const auto tensors = static_cast<uint32_t>(plan->tensors.size());
    for (PlannedTensor& tensor : one.tensors) {
      tensor.file = static_cast<uint32_t>(plan->files.size());
      plan->tensors.push_back(tensor);
    }
    for (Segment& segment : one.files[0].segments) {
      if (segment.tensor != Segment::kLiteral) segment.tensor += tensors;
    }
    one.files[0].replicated = replicated;
    plan->files.push_back(one.files[0]);
  }
  /// Saves all ranks at the same time and fills in their results.
  void SaveAll(std::vector<Rank>* ranks, uint64_t arena_bytes = 32u << 20) {
    std::vector<std::unique_ptr<Checkpointer>> checkpointers;
    std::vector<SaveHandle> saves;
    for (uint32_t i = 0; i < ranks->size(); ++i) {
      Rank& rank = (*ranks)[i];
      CheckpointerOptions options = Options();
      options.staging.arena_bytes = arena_bytes;
      options.rank = i;
      options.world_size = static_cast<uint32_t>(ranks->size());
      options.read_back = i == 1;
      checkpointers.push_back(Make(options));
      ASSERT_NE(checkpointers.back(), nullptr);
      SavePlan plan;
      Append(absl::StrCat("own-", i), rank.own, false, &plan);
      if (rank.has_replicas) Append(kReplicas, rank.replicas, true, &plan);
      auto begun = checkpointers.back()->SaveAsync(
          {.name = "step-1", .step = 1, .plan = &plan, .attempt = attempt_});
      rank.status = begun.status();  // Another rank may have failed before this rank's call.
      saves.push_back(begun.ok() ? *std::move(begun) : SaveHandle());
    }
    for (uint32_t i = 0; i < ranks->size(); ++i) {
      if (!(*ranks)[i].status.ok()) continue;
      const auto report = saves[i].WaitDurable(kLong);
      (*ranks)[i].status = report.status();
      if (report.ok()) (*ranks)[i].report = *report;
    }
    for (const auto& checkpointer : checkpointers) ExpectMemoryBack(checkpointer.get());
  }
  std::string path() const { return absl::StrCat(directory(), "/step-1"); }
  void ExpectAllFailed(const std::vector<Rank>& ranks, const std::string& what) {
    for (const Rank& rank : ranks) {
      EXPECT_TRUE(absl::IsFailedPrecondition(rank.status)) << rank.status;
      EXPECT_THAT(Text(rank.status), HasSubstr(what));
    }
    EXPECT_THAT(Names(directory()), ::testing::IsEmpty());
  }
  /// The whole state as `rank` had it.
  void ExpectLoads(uint32_t rank, const Rank& saved) {
    const auto reader = CheckpointReader::Open(path(), rank);
    ASSERT_TRUE(reader.ok()) << reader.status();
    for (const TrainingState* state : {&saved.replicas, &saved.own}) {
      for (const TrainingState::Tensor& tensor : state->tensors()) {
        std::vector<char> bytes(tensor.bytes.size());
        const TensorTarget target = {
            .name = tensor.name, .data = bytes.data(), .bytes = bytes.size()};
        const auto loaded = (*reader)->Load({&target, 1}, {});
        ASSERT_TRUE(loaded.ok()) << loaded.status();
        EXPECT_TRUE(loaded->verified);
        EXPECT_EQ(bytes, tensor.bytes) << tensor.name;
      }
    }
  }
  Verdict VerdictOf(const std::string& what) {
    const auto verified = Verify(what, {});
    EXPECT_TRUE(verified.ok()) << verified.status();
    return verified.ok() ? verified->verdict : Verdict::kUnreadable;
  }
  AttemptId attempt_ = NewAttemptId();
};
INSTANTIATE_TEST_SUITE_P(All, Replicas, kEveryLauncher, LauncherName);

TEST_P(Replicas, AreWrittenOnceAndLoadedByAllRanks) {
  std::vector<Rank> ranks = Equal();
  SaveAll(&ranks);
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < kRanks; ++i) {
    ASSERT_TRUE(ranks[i].status.ok()) << ranks[i].status;
    EXPECT_EQ(ranks[i].report.files, 2u);
    bytes += ranks[i].report.bytes_written;
    EXPECT_EQ(ranks[i].report.bytes_written < ranks[i].replicas.bytes(), i != 0);
    ExpectLoads(i, ranks[i]);
    EXPECT_EQ(VerdictOf(absl::StrCat(path(), "/rank-0000", i, "-of-00003.manifest.json")),
              Verdict::kSound);
  }
  const auto verified = Verify(path(), {});
  ASSERT_TRUE(verified.ok()) << verified.status();
  EXPECT_EQ(verified->verdict, Verdict::kSound) << verified->note;
  EXPECT_EQ(verified->files, 1 + kRanks);
  EXPECT_EQ(verified->bytes, bytes);
  const auto info = InspectCheckpoint(path());
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->bytes, bytes);
  // A single finding, and not a finding for each manifest that names the file.
  std::filesystem::resize_file(absl::StrCat(path(), "/", kReplicas), 5000);
  EXPECT_THAT(Text(InspectCheckpoint(path()).status()), ::testing::Not(HasSubstr("more")));
}

TEST_P(Replicas, StreamThroughASmallArena) {
  std::vector<Rank> ranks = Equal();
  SaveAll(&ranks, 16u << 20);
  for (uint32_t i = 0; i < kRanks; ++i) {
    ASSERT_TRUE(ranks[i].status.ok()) << ranks[i].status;
    EXPECT_TRUE(ranks[i].report.streamed);
    ExpectLoads(i, ranks[i]);
  }
}

TEST_P(Replicas, ADifferentByteFailsAllRanksWithItsTensor) {
  std::vector<Rank> ranks = Equal();
  ranks[2].replicas.tensors()[3].bytes[1000] ^= 1;
  SaveAll(&ranks);
  ExpectAllFailed(ranks, absl::StrCat("rank 2 and rank 0 differ in tensor \"",
                                      ranks[2].replicas.tensors()[3].name, "\""));
}

TEST_P(Replicas, ARankWithoutReplicasFailsAllRanks) {
  std::vector<Rank> ranks = Equal();
  ranks[1].has_replicas = false;
  SaveAll(&ranks);
  ExpectAllFailed(ranks, "rank 1 and rank 0 differ in");
}

TEST_P(Replicas, ARankZeroWithoutReplicasFailsAllRanks) {
  std::vector<Rank> ranks = Equal();
  ranks[0].has_replicas = false;
  SaveAll(&ranks);
  ExpectAllFailed(ranks, "rank 1 and rank 0 differ in");
}

TEST_P(Replicas, AnotherLayoutFailsAllRanks) {
  std::vector<Rank> ranks = Equal();
  ranks[1].replicas = Named(TrainingState::Uniform(4, 3u << 20, 7), "same.");
  SaveAll(&ranks);
  ExpectAllFailed(ranks, "rank 1 and rank 0 differ in");
}

TEST_P(Replicas, AManifestThatEndsEarlyEndsNoTrainer) {
  if (!IsThread()) GTEST_SKIP() << "the call is this process's";
  // As of one that is cut behind the look at its length.
  sys::g_system.fstat = [](int fd, struct stat* out) {
    char path[PATH_MAX] = {};
    const std::string link = absl::StrCat("/proc/self/fd/", fd);
    const int result = sys::kKernel.fstat(fd, out);
    if (sys::kKernel.readlinkat(AT_FDCWD, link.c_str(), path, sizeof(path) - 1) > 0 &&
        absl::EndsWith(path, "manifest.json")) {
      out->st_size += 1 << 20;
    }
    return result;
  };
  std::vector<Rank> ranks = Equal();
  ranks[2].replicas.tensors()[3].bytes[1000] ^= 1;
  SaveAll(&ranks);
  sys::g_system = sys::kKernel;
  ExpectAllFailed(ranks, "rank 2 and rank 0 differ in tensor");
}

TEST_P(Replicas, AreRefusedInAFrameworksDirectory) {
  std::filesystem::create_directory(path());
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  SavePlan plan;
  Append(kReplicas, Equal()[0].replicas, true, &plan);
  const auto begun = checkpointer->SaveAsync(
      {.name = "step-1", .plan = &plan, .attempt = attempt_, .files_only = true});
  EXPECT_TRUE(absl::IsInvalidArgument(begun.status())) << begun.status();
}

// Rank 0's worker has the bug, and so must be a thread of this process.
TEST_P(Replicas, ThatNobodyComparesAreFound) {
  if (!IsThread()) GTEST_SKIP() << "the flag is this process's";
  worker::testing::g_never_compare_replicas = true;
  std::vector<Rank> ranks = Equal();
  ranks[1].replicas.tensors()[0].bytes[0] ^= 1;
  SaveAll(&ranks);
  for (const Rank& rank : ranks) EXPECT_TRUE(rank.status.ok()) << rank.status;
  // What a rank had is lost. Readers of all manifests refuse the checkpoint, and so does a recovery
  // of such a save that was killed before its rename.
  EXPECT_NE(VerdictOf(path()), Verdict::kSound);
  std::filesystem::remove(path() + "/holdfast.commit.json");
  char id[33] = {};
  snprintf(id, sizeof(id), "%016lx%016lx", attempt_.high, attempt_.low);
  std::filesystem::rename(path(), absl::StrCat(path(), ".partial-", id));
  const auto recovered = Recover(directory(), {});
  ASSERT_TRUE(recovered.ok()) << recovered.status();
  EXPECT_THAT(Names(directory()), ::testing::IsEmpty());
}

}  // namespace
}  // namespace holdfast::testing
