// Saves of several ranks: votes, one rename, and what happens when a rank fails.
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "runtime/sys/system.h"
#include "tests/unit/worker/worker_rig.h"

namespace holdfast::worker {
namespace {

constexpr uint64_t kArena = 16ull << 20;

/// One rank with its own trainer and worker.
struct Rank {
  Rank(const std::string& directory, uint32_t rank, uint32_t world, pid_t trainer_process = 0)
      : trainer(kArena, trainer_process), save(&trainer, directory) {
    save.parameters.rank = rank;
    save.parameters.world_size = world;
    save.AddFile("model-" + std::to_string(rank), {5'000'000});
  }
  void Start(Launcher launcher = Launcher::kThread) {
    worker = std::make_unique<TestWorker>(launcher, trainer);
    save.StartOn(worker.get());
  }
  void AwaitPhase(layout::Phase phase) const { EXPECT_TRUE(save.AwaitPhase(phase)); }
  Trainer trainer;
  TestSave save;
  std::unique_ptr<TestWorker> worker;
};

struct RankTest : ::testing::Test {
  TestDirectory directory;
};

TEST_F(RankTest, AppearsOnceAllRanksHaveVoted) {
  Rank zero(directory.path(), 0, 2);
  Rank one(directory.path(), 1, 2);
  zero.save.Build();
  one.save.Build();
  zero.save.SealAll();
  zero.Start(Launcher::kSpawn);
  zero.AwaitPhase(layout::Phase::kWaitingForRanks);
  EXPECT_FALSE(Exists(zero.save.target_path()));
  one.save.SealAll();
  one.Start(Launcher::kSpawn);
  ASSERT_TRUE(zero.save.AwaitDone());
  ASSERT_TRUE(one.save.AwaitDone());
  EXPECT_TRUE(zero.save.failure().ok());
  EXPECT_TRUE(one.save.failure().ok());
  EXPECT_EQ(zero.save.Unsound(), "");
  EXPECT_EQ(one.save.Unsound(), "");
  EXPECT_GT(one.save.job()->completion.times.committed, 0u);
  EXPECT_EQ(NamesIn(directory.path()), std::vector<std::string>{"step-7"});
}

TEST_F(RankTest, RankZeroStillWaitsAndRenamesAfterItsTrainersDeath) {
  for (const Launcher launcher : {Launcher::kSpawn, Launcher::kFork}) {
    TestDirectory below(directory.path());
    StandIn trainer_process;
    Rank zero(below.path(), 0, 2, trainer_process.pid());
    Rank one(below.path(), 1, 2);
    zero.save.Build();
    one.save.Build();
    zero.save.SealAll();
    one.save.SealAll();
    zero.Start(launcher);
    zero.AwaitPhase(layout::Phase::kWaitingForRanks);
    trainer_process.Die();
    // It has looked at its trainer by then, at least once.
    ::usleep(300'000);
    EXPECT_FALSE(zero.save.AwaitDone(0)) << "it waits for the vote of rank 1";
    EXPECT_FALSE(Exists(zero.save.target_path()));
    one.Start(launcher);
    ASSERT_TRUE(zero.save.AwaitDone());
    ASSERT_TRUE(one.save.AwaitDone());
    EXPECT_TRUE(zero.save.failure().ok());
    EXPECT_TRUE(one.save.failure().ok());
    EXPECT_EQ(zero.save.job()->completion.trainer_died, 1u);
    EXPECT_EQ(one.save.job()->completion.trainer_died, 0u);
    EXPECT_EQ(zero.save.Unsound(), "");
    EXPECT_EQ(one.save.Unsound(), "");
    EXPECT_EQ(NamesIn(below.path()), std::vector<std::string>{"step-7"});
  }
}

TEST_F(RankTest, ReplacesAnExistingCheckpointOfTheSameRanks) {
  for (const uint64_t attempt : {1u, 2u}) {
    Rank zero(directory.path(), 0, 2);
    Rank one(directory.path(), 1, 2);
    for (Rank* rank : {&zero, &one}) {
      rank->save.parameters.attempt = {.high = 0, .low = attempt};
      rank->save.parameters.partial = "step-7.partial-" + std::to_string(attempt);
      rank->save.parameters.flags |= layout::kReplaceExisting;
      rank->save.Build();
      rank->save.SealAll();
    }
    one.Start();
    one.AwaitPhase(layout::Phase::kWaitingForRanks);
    // The old target has a manifest of this name, of another attempt: not taken for the new one.
    EXPECT_FALSE(one.save.AwaitDone(0));
    zero.Start();
    ASSERT_TRUE(zero.save.AwaitDone());
    ASSERT_TRUE(one.save.AwaitDone());
    EXPECT_TRUE(zero.save.failure().ok());
    EXPECT_TRUE(one.save.failure().ok());
    EXPECT_EQ(one.save.Unsound(), "");
    std::vector<std::string> expected = {"step-7"};
    if (attempt == 2) expected.emplace_back("step-7.partial-2");
    EXPECT_EQ(NamesIn(directory.path()), expected);
    EXPECT_EQ(zero.save.job()->completion.left_behind,
              std::string(attempt == 2 ? expected[1] : ""));
    EXPECT_STREQ(one.save.job()->completion.left_behind, "") << "rank 0 has decided";
  }
}

TEST_F(RankTest, RankZeroGivesUpAtItsDeadlineAndTheOthersFollow) {
  Rank zero(directory.path(), 0, 3);
  Rank one(directory.path(), 1, 3);
  zero.save.parameters.time_ranks_max_ns = 300'000'000;
  zero.save.Build();
  one.save.Build();
  zero.save.SealAll();
  one.save.SealAll();
  one.Start();
  one.AwaitPhase(layout::Phase::kWaitingForRanks);
  zero.Start();
  ASSERT_TRUE(zero.save.AwaitDone());
  EXPECT_EQ(zero.save.failure().code, FailureCode::kDeadlineExceeded);
  EXPECT_EQ(zero.save.failure().operation, Operation::kWaitRanks);
  // Rank 1 would wait for 20 s, but rank 0 left word.
  ASSERT_TRUE(one.save.AwaitDone(10));
  EXPECT_EQ(one.save.failure().code, FailureCode::kAborted);
  EXPECT_TRUE(NamesIn(directory.path()).empty());
}

TEST_F(RankTest, RankThatFailsBeforeItsVoteStopsTheOthers) {
  Rank zero(directory.path(), 0, 2);
  Rank one(directory.path(), 1, 2);
  zero.save.Build();
  one.save.Build();
  zero.save.SealAll();
  zero.Start();
  zero.AwaitPhase(layout::Phase::kWaitingForRanks);
  one.save.SealAll();
  one.save.Memory(0)[0] ^= 1;
  one.Start();
  ASSERT_TRUE(one.save.AwaitDone());
  EXPECT_EQ(one.save.failure().code, FailureCode::kDataLoss);
  ASSERT_TRUE(zero.save.AwaitDone(10));
  EXPECT_EQ(zero.save.failure().code, FailureCode::kAborted);
  EXPECT_EQ(zero.save.failure().operation, Operation::kWaitRanks);
  EXPECT_TRUE(NamesIn(directory.path()).empty());
}

TEST_F(RankTest, CancelOfRankZeroStopsTheOthers) {
  Rank zero(directory.path(), 0, 3);
  Rank one(directory.path(), 1, 3);
  for (Rank* rank : {&zero, &one}) {
    rank->save.Build();
    rank->save.SealAll();
    rank->Start();
    rank->AwaitPhase(layout::Phase::kWaitingForRanks);
  }
  zero.save.job()->cancel.store(1);
  zero.save.Ring();
  ASSERT_TRUE(zero.save.AwaitDone(10));
  EXPECT_EQ(zero.save.failure().code, FailureCode::kCancelled);
  ASSERT_TRUE(one.save.AwaitDone(10));
  EXPECT_EQ(one.save.failure().code, FailureCode::kAborted);
  EXPECT_TRUE(NamesIn(directory.path()).empty());
}

TEST_F(RankTest, RankThatVotedKeepsItsFilesWhateverHappens) {
  Rank one(directory.path(), 1, 2);
  one.save.parameters.time_ranks_max_ns = 200'000'000;
  one.save.Build();
  one.save.SealAll();
  one.Start();
  one.AwaitPhase(layout::Phase::kWaitingForRanks);
  // Too late: rank 0 may be renaming.
  one.save.job()->cancel.store(1);
  one.save.Ring();
  ASSERT_TRUE(one.save.AwaitDone(10));
  EXPECT_EQ(one.save.failure().code, FailureCode::kDeadlineExceeded);
  EXPECT_EQ(one.save.UnsoundAt(one.save.partial_path()), "");
}

bool g_vote_is_seen = false;

TEST_F(RankTest, RankWhoseVoteWasSeenKeepsItsFilesThoughItCannotMakeItDurable) {
  g_vote_is_seen = false;
  sys::g_system.renameat2 = [](int a, const char* from, int b, const char* to, unsigned flags) {
    g_vote_is_seen = g_vote_is_seen || std::string(to).ends_with(".manifest.json");
    return sys::kKernel.renameat2(a, from, b, to, flags);
  };
  sys::g_system.fsync = [](int fd) {
    if (!g_vote_is_seen) return sys::kKernel.fsync(fd);
    errno = EIO;
    return -1;
  };
  Rank one(directory.path(), 1, 2);
  one.save.Build();
  one.save.SealAll();
  one.Start();
  const bool done = one.save.AwaitDone(10);
  one.worker.reset();
  sys::g_system = sys::kKernel;
  ASSERT_TRUE(done);
  EXPECT_EQ(one.save.failure().operation, Operation::kSyncDirectory);
  // Rank 0 may have renamed by now.
  EXPECT_EQ(one.save.UnsoundAt(one.save.partial_path()), "");
}

TEST_F(RankTest, RefusesAManifestOfAnotherAttempt) {
  Rank zero(directory.path(), 0, 2);
  zero.save.Build();
  zero.save.SealAll();
  ::mkdir(zero.save.partial_path().c_str(), 0755);
  WriteFileAt(zero.save.partial_path() + "/rank-00001-of-00002.manifest.json",
              R"({"format":"x","attempt":"00000000000000000000000000000000"})");
  zero.Start();
  ASSERT_TRUE(zero.save.AwaitDone());
  EXPECT_EQ(zero.save.failure().code, FailureCode::kFailedPrecondition);
  EXPECT_EQ(zero.save.failure().operation, Operation::kWaitRanks);
  EXPECT_FALSE(Exists(zero.save.target_path()));
}

TEST_F(RankTest, FencedWorkerTouchesNothing) {
  Rank zero(directory.path(), 0, 2);
  Rank one(directory.path(), 1, 2);
  for (Rank* rank : {&zero, &one}) {
    rank->save.Build();
    rank->save.SealAll();
  }
  zero.Start();
  zero.AwaitPhase(layout::Phase::kWaitingForRanks);
  // What a recovery does with a directory whose owner it gave up on.
  const std::string fenced = directory.path() + "/fenced";
  ASSERT_EQ(::rename(zero.save.partial_path().c_str(), fenced.c_str()), 0);
  WriteFileAt(fenced + "/rank-00001-of-00002.manifest.json",
              R"({"attempt":"112233445566778899aabbccddeeff00"})");
  ASSERT_TRUE(zero.save.AwaitDone());
  EXPECT_EQ(zero.save.failure().code, FailureCode::kAborted);
  EXPECT_FALSE(Exists(zero.save.target_path()));
  EXPECT_TRUE(Exists(fenced + "/" + zero.save.manifest_name()));
  EXPECT_TRUE(Exists(fenced + "/model-0"));
}

TEST_F(RankTest, PromotedByARecoveryIsDurable) {
  Rank zero(directory.path(), 0, 2);
  zero.save.Build();
  zero.save.SealAll();
  zero.Start();
  zero.AwaitPhase(layout::Phase::kWaitingForRanks);
  WriteFileAt(zero.save.partial_path() + "/new",
              R"({"attempt":"112233445566778899aabbccddeeff00"})");
  ASSERT_EQ(::rename(zero.save.partial_path().c_str(), zero.save.target_path().c_str()), 0);
  ASSERT_EQ(::rename((zero.save.target_path() + "/new").c_str(),
                     (zero.save.target_path() + "/rank-00001-of-00002.manifest.json").c_str()),
            0);
  ASSERT_TRUE(zero.save.AwaitDone());
  EXPECT_TRUE(zero.save.failure().ok());
  EXPECT_EQ(ReadFileOf(zero.save.target_path() + "/model-0"), zero.save.contents()[0]);
}

}  // namespace
}  // namespace holdfast::worker
