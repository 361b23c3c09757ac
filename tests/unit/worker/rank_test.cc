// Saves of several ranks: votes, one rename, and what happens when a rank fails.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "runtime/sys/system.h"
#include "tests/testing/path_of.h"
#include "tests/unit/worker/worker_rig.h"

namespace holdfast::worker {
namespace {

constexpr uint64_t kArena = 16ull << 20;

std::string NameOf(int fd) { return std::filesystem::path(testing::PathOf(fd)).filename(); }

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
  /// Everything sealed, voted, and waiting.
  void StartAndVote() {
    save.Build();
    save.SealAll();
    Start();
    AwaitPhase(layout::Phase::kWaitingForRanks);
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

TEST_F(RankTest, SeesTheVoteOfASaveWithALongEscapedName) {
  // Each of these bytes takes six in the manifest's JSON.
  const std::string name(200, '\x01');
  Rank zero(directory.path(), 0, 2);
  Rank one(directory.path(), 1, 2);
  for (Rank* rank : {&zero, &one}) {
    rank->save.parameters.target = name;
    rank->save.Build();
    rank->save.SealAll();
    rank->Start();
  }
  ASSERT_TRUE(zero.save.AwaitDone());
  ASSERT_TRUE(one.save.AwaitDone());
  EXPECT_TRUE(zero.save.failure().ok());
  EXPECT_TRUE(one.save.failure().ok());
  EXPECT_EQ(NamesIn(directory.path()), std::vector<std::string>{name});
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
      rank->save.parameters.older = {{.high = 0, .low = attempt - 1}};
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
    if (attempt == 2) expected = {RetiredName("step-7", {.high = 0, .low = 1}), "step-7"};
    EXPECT_EQ(NamesIn(directory.path()), expected);
    EXPECT_EQ(zero.save.job()->completion.left_behind,
              std::string(attempt == 2 ? expected[0] : ""));
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
  EXPECT_EQ(zero.save.seen().rank, 2u);
  EXPECT_EQ(zero.save.seen().kind, static_cast<uint32_t>(layout::RankFailureKind::kAbsent));
  // Rank 1 would wait for 20 s, but rank 0 left word.
  ASSERT_TRUE(one.save.AwaitDone());
  EXPECT_EQ(one.save.failure().code, FailureCode::kAborted);
  EXPECT_EQ(one.save.seen().rank, 2u);
  // For a rank that comes late; it ends at once and is the last.
  EXPECT_EQ(NamesIn(zero.save.partial_path()), std::vector<std::string>{layout::kBoardName});
  Rank two(directory.path(), 2, 3);
  two.save.Build();
  two.Start();
  ASSERT_TRUE(two.save.AwaitDone());
  EXPECT_EQ(two.save.failure().code, FailureCode::kAborted);
  EXPECT_EQ(two.save.failure().operation, Operation::kWaitRanks);
  EXPECT_TRUE(NamesIn(directory.path()).empty());
}

TEST_F(RankTest, SilentRankIsMissedAndOneInsideAnFsyncIsNot) {
  for (const bool in_fsync : {false, true}) {
    TestDirectory below(directory.path());
    Rank zero(below.path(), 0, 2);
    zero.save.parameters.time_liveness_max_ns = 300'000'000;
    zero.save.parameters.time_ranks_max_ns = 1'500'000'000;
    zero.save.Build();
    zero.save.SealAll();
    ::mkdir(zero.save.partial_path().c_str(), 0755);
    RankBoard board;
    OpenBoardOf(zero.save, zero.save.partial_path(), 1, &board);
    ASSERT_TRUE(WritePulse(board, Side::kWorker, layout::RankState::kJoined, in_fsync ? 60 : 0));
    CloseBoard(&board);
    zero.Start();
    ASSERT_TRUE(zero.save.AwaitDone());
    EXPECT_EQ(zero.save.failure().code, FailureCode::kDeadlineExceeded);
    EXPECT_EQ(zero.save.seen().rank, 1u);
    EXPECT_EQ(zero.save.seen().kind,
              static_cast<uint32_t>(in_fsync ? layout::RankFailureKind::kSlow
                                             : layout::RankFailureKind::kSilent));
  }
}

TEST_F(RankTest, SilentVoteWithoutAManifestIsMissed) {
  // A recovery has removed the manifest of the dead rank, and died before it removed the board.
  for (const bool has_manifest : {false, true}) {
    TestDirectory below(directory.path());
    Rank zero(below.path(), 0, 3);
    zero.save.parameters.time_liveness_max_ns = 300'000'000;
    zero.save.parameters.time_ranks_max_ns = 60'000'000'000;
    zero.save.Build();
    zero.save.SealAll();
    ::mkdir(zero.save.partial_path().c_str(), 0755);
    for (const uint32_t rank : {1u, 2u}) {
      RankBoard board;
      OpenBoardOf(zero.save, zero.save.partial_path(), rank, &board);
      ASSERT_TRUE(WritePulse(board, Side::kWorker, layout::RankState::kVoted));
      CloseBoard(&board);
    }
    if (has_manifest) {
      WriteFileAt(zero.save.partial_path() + "/rank-00001-of-00003.manifest.json",
                  R"({"attempt":"112233445566778899aabbccddeeff00"})");
    }
    zero.Start();
    ASSERT_TRUE(zero.save.AwaitDone());
    EXPECT_EQ(zero.save.failure().code, FailureCode::kDeadlineExceeded);
    EXPECT_EQ(zero.save.seen().rank, has_manifest ? 2u : 1u);
    EXPECT_EQ(zero.save.seen().kind, static_cast<uint32_t>(layout::RankFailureKind::kSilent));
  }
}

TEST_F(RankTest, OrphanSaysBeforeAnFsyncThatItWillBeSilent) {
  static std::atomic<bool> job_has_begun;
  static std::atomic<bool> trainer_is_dead;
  job_has_begun = false;
  trainer_is_dead = false;
  // The trainer dies between the start of the job and its first fsync.
  sys::g_system.fallocate = [](int fd, int mode, off_t offset, off_t bytes) {
    job_has_begun = true;
    while (!trainer_is_dead) ::usleep(500);
    return sys::kKernel.fallocate(fd, mode, offset, bytes);
  };
  static uint32_t silent_s_max = 0;
  silent_s_max = 0;
  static std::string partial;
  sys::g_system.fsync = [](int fd) {
    if (NameOf(fd).ends_with(".tmp")) {
      const std::string bytes = ReadFileOf(partial + "/" + layout::kBoardName);
      layout::RankPulse pulse;
      EXPECT_GE(bytes.size(), layout::WorkerPulseAt(1) + sizeof(pulse));
      if (bytes.size() >= layout::WorkerPulseAt(1) + sizeof(pulse)) {
        memcpy(&pulse, bytes.data() + layout::WorkerPulseAt(1), sizeof(pulse));
      }
      silent_s_max = std::max(silent_s_max, pulse.silent_s_max);
    }
    return sys::kKernel.fsync(fd);
  };
  StandIn trainer_process;
  Rank one(directory.path(), 1, 2, trainer_process.pid());
  partial = one.save.partial_path();
  one.save.parameters.time_ranks_max_ns = 100'000'000;
  one.save.Build();
  one.save.SealAll();
  one.Start();
  while (!job_has_begun) ::usleep(500);
  trainer_process.Die();
  trainer_is_dead = true;
  const bool done = one.save.AwaitDone();
  one.worker.reset();
  sys::g_system = sys::kKernel;
  ASSERT_TRUE(done);
  EXPECT_GT(silent_s_max, 0u);
}

TEST_F(RankTest, RankZeroThatNeverComesIsMissedWithoutItsDeadline) {
  Rank one(directory.path(), 1, 2);
  one.save.parameters.time_liveness_max_ns = 300'000'000;
  one.save.Build();
  one.save.SealAll();
  one.Start();
  ASSERT_TRUE(one.save.AwaitDone());
  EXPECT_EQ(one.save.failure().code, FailureCode::kDeadlineExceeded);
  EXPECT_EQ(one.save.seen().kind, static_cast<uint32_t>(layout::RankFailureKind::kAbsent));
  EXPECT_EQ(one.save.UnsoundAt(one.save.partial_path()), "") << "it has voted";
}

TEST_F(RankTest, CommitWhoseRankZeroDiedBeforeItSaidSoIsFound) {
  Rank one(directory.path(), 1, 2);
  one.save.parameters.time_liveness_max_ns = 300'000'000;
  one.StartAndVote();
  ASSERT_EQ(::rename(one.save.partial_path().c_str(), one.save.target_path().c_str()), 0);
  ASSERT_TRUE(one.save.AwaitDone());
  EXPECT_TRUE(one.save.failure().ok());
}

TEST_F(RankTest, VoteIsTakenBackByACancelWhileRankZeroWaits) {
  Rank zero(directory.path(), 0, 3);
  Rank one(directory.path(), 1, 3);
  zero.StartAndVote();
  one.StartAndVote();
  one.save.job()->cancel.store(1);
  one.save.Ring();
  ASSERT_TRUE(zero.save.AwaitDone());
  EXPECT_EQ(zero.save.failure().code, FailureCode::kAborted);
  EXPECT_EQ(zero.save.seen().rank, 1u);
  EXPECT_EQ(zero.save.seen().code, static_cast<int32_t>(FailureCode::kCancelled));
  ASSERT_TRUE(one.save.AwaitDone());
  EXPECT_FALSE(one.save.failure().ok());
  EXPECT_EQ(NamesIn(zero.save.partial_path()), std::vector<std::string>{layout::kBoardName});
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
  ASSERT_TRUE(zero.save.AwaitDone());
  EXPECT_EQ(zero.save.failure().code, FailureCode::kAborted);
  EXPECT_EQ(zero.save.failure().operation, Operation::kWaitRanks);
  EXPECT_TRUE(NamesIn(directory.path()).empty());
}

TEST_F(RankTest, CancelOfRankZeroStopsTheOthers) {
  Rank zero(directory.path(), 0, 3);
  Rank one(directory.path(), 1, 3);
  zero.StartAndVote();
  one.StartAndVote();
  zero.save.job()->cancel.store(1);
  zero.save.Ring();
  ASSERT_TRUE(zero.save.AwaitDone());
  EXPECT_EQ(zero.save.failure().code, FailureCode::kCancelled);
  ASSERT_TRUE(one.save.AwaitDone());
  EXPECT_EQ(one.save.failure().code, FailureCode::kAborted);
  EXPECT_EQ(one.save.seen().rank, 0u);
  EXPECT_EQ(NamesIn(zero.save.partial_path()), std::vector<std::string>{layout::kBoardName});
}

TEST_F(RankTest, RankThatVotedKeepsItsFilesWhateverHappens) {
  Rank one(directory.path(), 1, 2);
  one.save.parameters.time_ranks_max_ns = 200'000'000;
  one.StartAndVote();
  // Too late: rank 0 may be renaming.
  one.save.job()->cancel.store(1);
  one.save.Ring();
  ASSERT_TRUE(one.save.AwaitDone());
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
  const bool done = one.save.AwaitDone();
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
  VoteAs(zero.save, 1, "00000000000000000000000000000000");
  zero.Start();
  ASSERT_TRUE(zero.save.AwaitDone());
  EXPECT_EQ(zero.save.failure().code, FailureCode::kFailedPrecondition);
  EXPECT_EQ(zero.save.failure().operation, Operation::kJoinRanks);
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
  // The missing vote never comes.
  const uint64_t begin = sys::NowNs();
  ASSERT_TRUE(zero.save.AwaitDone());
  EXPECT_LT(sys::NowNs() - begin, 5'000'000'000u) << "the promise is one second";
  EXPECT_EQ(zero.save.failure().code, FailureCode::kAborted);
  EXPECT_EQ(zero.save.seen().kind, static_cast<uint32_t>(layout::RankFailureKind::kFenced));
  EXPECT_FALSE(Exists(zero.save.target_path()));
  EXPECT_TRUE(Exists(fenced + "/" + zero.save.manifest_name()));
  EXPECT_TRUE(Exists(fenced + "/model-0"));
}

std::string g_unseen;
std::atomic<int> g_looks_to_fail{0};

int FailingLook(int directory, const char* name, struct stat* out, int flags) {
  if (name != g_unseen || g_looks_to_fail == 0) {
    return sys::kKernel.fstatat(directory, name, out, flags);
  }
  --g_looks_to_fail;
  errno = EIO;
  return -1;
}

TEST_F(RankTest, ALookThatFailsIsNoFence) {
  Rank zero(directory.path(), 0, 2);
  Rank one(directory.path(), 1, 2);
  for (Rank* rank : {&zero, &one}) {
    rank->save.Build();
    rank->save.SealAll();
  }
  g_unseen = std::filesystem::path(zero.save.partial_path()).filename();
  sys::g_system.fstatat = FailingLook;  // before the worker's thread reads the table
  zero.Start();
  zero.AwaitPhase(layout::Phase::kWaitingForRanks);
  g_looks_to_fail = 2;
  for (int i = 0; i < 5000 && g_looks_to_fail > 0; ++i) ::usleep(1000);
  one.Start();
  const bool done = zero.save.AwaitDone() && one.save.AwaitDone();
  zero.worker.reset();
  one.worker.reset();
  sys::g_system = sys::kKernel;
  ASSERT_TRUE(done);
  EXPECT_EQ(g_looks_to_fail, 0);
  EXPECT_TRUE(zero.save.failure().ok());
  EXPECT_TRUE(one.save.failure().ok());
}

TEST_F(RankTest, PromotedByARecoveryIsDurable) {
  Rank zero(directory.path(), 0, 2);
  zero.StartAndVote();
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
