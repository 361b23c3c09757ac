// Proof that the streaming tests can fail: a worker that releases bytes when the write is
// submitted is caught by its own re-digest when a hostile trainer refills them at once.
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "runtime/sys/system.h"
#include "runtime/worker/planted_bugs.h"
#include "tests/unit/worker/worker_rig.h"

namespace holdfast::worker {
namespace {

std::atomic<bool> g_hold_until_refilled{false};

// The disk is slow, the trainer is fast: writing starts only once the memory was refilled.
ssize_t PwriteAfterRefill(int fd, const void* buffer, size_t bytes, off_t offset) {
  const volatile char* const memory = static_cast<const char*>(buffer);
  const bool hold = g_hold_until_refilled && bytes == kChunkBytes && offset == 0;
  while (hold && memory[0] != 'x') ::usleep(500);
  return sys::kKernel.pwrite(fd, buffer, bytes, offset);
}

Failure SaveUnderAHostileTrainer(bool bug) {
  TestDirectory directory;
  Trainer trainer(4 * uint64_t{kChunkBytes});
  TestSave save(&trainer, directory.path());
  save.parameters.streams = true;
  save.parameters.engine = EngineRung::kPwrite;
  save.parameters.pwrite_threads = 1;
  save.AddFile("model.bin", {2 * uint64_t{kChunkBytes}});
  save.Build();
  testing::g_acknowledge_at_submit = bug;
  g_hold_until_refilled = bug;
  sys::g_system.pwrite = PwriteAfterRefill;
  {
    TestWorker worker(Launcher::kThread, trainer);
    save.Seal(0);
    save.StartOn(&worker);
    layout::LogReader acknowledged(
        layout::At<layout::SharedU32>(save.job(), save.job()->acknowledged), 2);
    uint32_t freed = 0;
    for (int i = 0; i < 10'000 && !acknowledged.Next(&freed); ++i) ::usleep(500);
    std::memset(save.Memory(freed), 'x', kChunkBytes);
    save.Seal(1);
    save.Ring();
    EXPECT_TRUE(save.AwaitDone());
  }
  sys::g_system = sys::kKernel;
  testing::g_acknowledge_at_submit = false;
  g_hold_until_refilled = false;
  if (!bug) {
    EXPECT_EQ(save.Unsound(), "");
  }
  return save.failure();
}

TEST(PlantedBug, ReleaseAtSubmitIsCaughtAndNamesTheChunk) {
  const Failure failure = SaveUnderAHostileTrainer(true);
  EXPECT_EQ(failure.code, FailureCode::kDataLoss);
  EXPECT_EQ(failure.tensor, 0u);
  EXPECT_EQ(failure.offset, 0u);
}

TEST(PlantedBug, WithoutItTheSameTrainerDoesNoHarm) {
  EXPECT_TRUE(SaveUnderAHostileTrainer(false).ok());
}

TEST(PlantedBug, WithoutTheSecondLookAChangeGoesToDisk) {
  for (const bool bug : {false, true}) {
    TestDirectory directory;
    Trainer trainer(4 * uint64_t{kChunkBytes});
    TestSave save(&trainer, directory.path());
    save.AddFile("model.bin", {1000});
    save.Build();
    save.SealAll();
    save.Memory(0)[3] ^= 1;
    testing::g_never_redigest = bug;
    EXPECT_TRUE(save.Run(Launcher::kThread));
    testing::g_never_redigest = false;
    EXPECT_EQ(save.failure().ok(), bug);
    EXPECT_NE(save.Unsound(), "");
  }
}

// ---- Ranks: without each step of theirs another rank waits on.

struct PlantedRank {
  PlantedRank(const std::string& directory, uint32_t rank)
      : trainer(kArena), save(&trainer, directory) {
    save.parameters.rank = rank;
    save.parameters.world_size = 2;
    save.parameters.time_liveness_max_ns = 500'000'000;
    save.AddFile("model-" + std::to_string(rank), {1000});
    save.Build();
    save.SealAll();
  }
  void Start() {
    worker = std::make_unique<TestWorker>(Launcher::kThread, trainer);
    save.StartOn(worker.get());
  }
  /// Ends it without a word to others.
  void End() {
    save.job()->cancel.store(1);
    save.Ring();
    EXPECT_TRUE(save.AwaitDone());
  }
  static constexpr uint64_t kArena = 16ull << 20;
  Trainer trainer;
  TestSave save;
  std::unique_ptr<TestWorker> worker;
};

// With a bug the wait is for nothing; without one only a slow machine takes long.
int SecondsToWait(bool bug) { return bug ? 3 : 120; }

/// Whether rank 0 ends soon after rank 1 has failed.
bool RankZeroIsToldOfAFailure(bool bug) {
  TestDirectory directory;
  PlantedRank zero(directory.path(), 0);
  PlantedRank one(directory.path(), 1);
  zero.save.job()->time_liveness_max_ns = 60'000'000'000;
  zero.Start();
  EXPECT_TRUE(zero.save.AwaitPhase(layout::Phase::kWaitingForRanks));
  testing::g_leave_ranks_silently = bug;
  one.save.Memory(0)[0] ^= 1;
  one.Start();
  EXPECT_TRUE(one.save.AwaitDone());
  const bool told = zero.save.AwaitDone(SecondsToWait(bug));
  if (!told) zero.End();
  testing::g_leave_ranks_silently = false;
  return told;
}

bool RankZeroMissesARank(bool bug) {
  TestDirectory directory;
  PlantedRank zero(directory.path(), 0);
  testing::g_never_miss_a_rank = bug;
  zero.Start();
  const bool missed = zero.save.AwaitDone(SecondsToWait(bug));
  if (!missed) zero.End();
  testing::g_never_miss_a_rank = false;
  return missed;
}

bool RankZeroStopsWhenFenced(bool bug) {
  TestDirectory directory;
  PlantedRank zero(directory.path(), 0);
  zero.save.job()->time_liveness_max_ns = 60'000'000'000;
  testing::g_never_look_at_place = bug;
  zero.Start();
  EXPECT_TRUE(zero.save.AwaitPhase(layout::Phase::kWaitingForRanks));
  EXPECT_EQ(::rename(zero.save.partial_path().c_str(), (directory.path() + "/fenced").c_str()), 0);
  const bool stopped = zero.save.AwaitDone(SecondsToWait(bug));
  if (!stopped) zero.End();
  testing::g_never_look_at_place = false;
  return stopped;
}

TEST(PlantedBug, RankThatFailsSilentlyIsWaitedFor) {
  EXPECT_TRUE(RankZeroIsToldOfAFailure(false));
  EXPECT_FALSE(RankZeroIsToldOfAFailure(true));
}

TEST(PlantedBug, RankThatNeverComesIsWaitedForWithoutTheLivenessDeadline) {
  EXPECT_TRUE(RankZeroMissesARank(false));
  EXPECT_FALSE(RankZeroMissesARank(true));
}

TEST(PlantedBug, FencedRankZeroWaitsOnWithoutALookAtItsPlace) {
  EXPECT_TRUE(RankZeroStopsWhenFenced(false));
  EXPECT_FALSE(RankZeroStopsWhenFenced(true));
}

}  // namespace
}  // namespace holdfast::worker
