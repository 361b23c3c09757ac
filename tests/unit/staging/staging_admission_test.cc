// Admission to memory: first come first served, and never a deadlock on the cap.
#include <atomic>
#include <deque>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/base/clock.h"
#include "runtime/staging/staging_pool.h"

namespace holdfast::staging {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kChunk = kChunkBytes;
constexpr uint64_t kArenaBytes = 4 * kChunk;

class StagingAdmissionTest : public ::testing::Test {
 protected:
  StagingAdmissionTest() {
    absl::StatusOr<std::unique_ptr<StagingPool>> pool =
        StagingPool::Create({.arena_bytes = kArenaBytes});
    EXPECT_TRUE(pool.ok()) << pool.status();
    pool_ = *std::move(pool);
  }

  Lease Take(uint64_t epoch, uint32_t bytes = kChunkBytes) {
    absl::StatusOr<Lease> lease = pool_->TryAcquire(epoch, bytes);
    EXPECT_TRUE(lease.ok()) << lease.status();
    return lease.ok() ? *lease : Lease();
  }
  bool Refused(uint64_t epoch, uint32_t bytes = kChunkBytes) {
    const absl::Status status = pool_->TryAcquire(epoch, bytes).status();
    EXPECT_TRUE(status.ok() || absl::IsUnavailable(status)) << status;
    return !status.ok();
  }
  void MakeWritten(const Lease& lease) {
    pool_->Seal(lease);
    pool_->StartWriting(lease);
    pool_->Release(lease);
  }
  // Waits until a thread waits in Acquire, which takes a ticket before its wait.
  void AwaitBlocked(const std::atomic<bool>& done, uint64_t epoch) {
    while (!done && pool_->TryAcquire(epoch, 1).status().code() != absl::StatusCode::kUnavailable)
      std::this_thread::yield();
  }

  std::unique_ptr<StagingPool> pool_;
};

TEST_F(StagingAdmissionTest, ServesEpochsInTheOrderOfTheirOpening) {
  const uint64_t first = pool_->OpenEpoch();
  const uint64_t second = pool_->OpenEpoch();
  const absl::Status behind = pool_->TryAcquire(second, 1).status();
  EXPECT_EQ(behind.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(behind.message(), HasSubstr("save 1 goes first"));
  Take(first);
  EXPECT_TRUE(Refused(second));
  pool_->FinishLeasing(first);
  Take(second);
}

TEST_F(StagingAdmissionTest, PassesTheTurnWhenTheOldestIsAbortedRetiredOrQuarantined) {
  const uint64_t aborted = pool_->OpenEpoch();
  const uint64_t retired = pool_->OpenEpoch();
  const uint64_t quarantined = pool_->OpenEpoch();
  const uint64_t last = pool_->OpenEpoch();
  pool_->AbortEpoch(aborted);
  EXPECT_TRUE(Refused(last));
  pool_->Retire(retired);
  EXPECT_TRUE(Refused(last));
  pool_->Quarantine(quarantined, "a test");
  EXPECT_FALSE(Refused(last));
}

TEST_F(StagingAdmissionTest, GivesWaitersTheirTurnWhenItComes) {
  const uint64_t first = pool_->OpenEpoch();
  const uint64_t second = pool_->OpenEpoch();
  std::thread waiter(
      [&] { EXPECT_TRUE(pool_->Acquire(second, kChunkBytes, absl::InfiniteFuture()).ok()); });
  for (int i = 0; i < 4; ++i) Take(first);
  pool_->FinishLeasing(first);
  pool_->Retire(first);
  waiter.join();
  EXPECT_EQ(pool_->stats().bytes_held, kChunk);
}

TEST_F(StagingAdmissionTest, CountsTheTimeOfAWaitThatFails) {
  const uint64_t epoch = pool_->OpenEpoch();
  for (int i = 0; i < 4; ++i) Take(epoch);
  EXPECT_EQ(pool_->Acquire(epoch, 1, base::Now() + absl::Milliseconds(2)).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_GE(pool_->stats().time_waiting, absl::Milliseconds(2));
  EXPECT_EQ(pool_->stats().waits, 0u) << "it got no lease";
}

TEST_F(StagingAdmissionTest, CountsLeasesThatHadToWait) {
  const uint64_t epoch = pool_->OpenEpoch();
  std::deque<Lease> held;
  for (int i = 0; i < 4; ++i) held.push_back(Take(epoch));
  uint64_t rounds = 0;
  // The scheduler chooses the first thread: repeat until the waiter was first.
  while (pool_->stats().waits == 0) {
    ++rounds;
    std::thread waiter([&] {
      const auto lease = pool_->Acquire(epoch, kChunkBytes, absl::InfiniteFuture());
      ASSERT_TRUE(lease.ok()) << lease.status();
      held.push_back(*lease);
    });
    std::this_thread::yield();
    const Lease oldest = held.front();
    MakeWritten(oldest);
    waiter.join();
    held.pop_front();
  }
  EXPECT_EQ(pool_->stats().waits, 1u);
  EXPECT_GT(pool_->stats().time_waiting, absl::ZeroDuration());
  EXPECT_EQ(pool_->stats().leases, 4 + rounds);
}

TEST_F(StagingAdmissionTest, WakesAWaiterWhoseEpochEnds) {
  for (int how = 0; how < 3; ++how) {
    const uint64_t epoch = pool_->OpenEpoch();
    for (int i = 0; i < 4; ++i) Take(epoch);
    std::thread waiter([&] {
      EXPECT_EQ(pool_->Acquire(epoch, 1, absl::InfiniteFuture()).status().code(),
                absl::StatusCode::kAborted);
    });
    if (how == 0) pool_->AbortEpoch(epoch);
    if (how == 1) pool_->Quarantine(epoch, "a test");
    if (how == 2) absl::SleepFor(absl::Milliseconds(5));  // retire during the wait, most likely
    pool_->Retire(epoch);
    waiter.join();
  }
}

TEST_F(StagingAdmissionTest, KeepsTheOrderOfCallsWithinAnEpoch) {
  const uint64_t epoch = pool_->OpenEpoch();
  std::vector<Lease> held;
  for (int i = 0; i < 3; ++i) held.push_back(Take(epoch));
  Take(epoch, kChunkBytes / 2);
  std::atomic<bool> done{false};
  std::thread large([&] {
    EXPECT_TRUE(pool_->Acquire(epoch, kChunkBytes, absl::InfiniteFuture()).ok());
    done = true;
  });
  // Half a chunk is free, but the first waiter needs a whole chunk.
  AwaitBlocked(done, epoch);
  EXPECT_TRUE(Refused(epoch, 1));
  MakeWritten(held[0]);
  large.join();
}

TEST_F(StagingAdmissionTest, PredictsWaits) {
  EXPECT_FALSE(pool_->WouldWait(kArenaBytes));
  EXPECT_FALSE(pool_->WouldWait(100 * kArenaBytes)) << "it streams, but waits for nobody else";
  const uint64_t first = pool_->OpenEpoch();
  EXPECT_TRUE(pool_->WouldWait(1)) << "it is not at turn";
  Take(first);
  pool_->FinishLeasing(first);
  EXPECT_FALSE(pool_->WouldWait(3 * kChunk));
  EXPECT_TRUE(pool_->WouldWait(3 * kChunk + 1));
  pool_->Retire(first);
  EXPECT_FALSE(pool_->WouldWait(kArenaBytes));
}

TEST_F(StagingAdmissionTest, PromisesOnlyBytesUsableUnderFragmentation) {
  // 4 KiB of an older save in the middle: two runs of just under two chunks.
  const uint64_t filler = pool_->OpenEpoch();
  Take(filler);
  Take(filler, kChunkBytes - kIoAlignment);
  pool_->FinishLeasing(filler);
  const uint64_t wedge = pool_->OpenEpoch();
  Take(wedge, kIoAlignment);
  pool_->FinishLeasing(wedge);
  pool_->Retire(filler);
  EXPECT_TRUE(pool_->WouldWait(kArenaBytes - kIoAlignment));
  const uint64_t promised = 2 * kChunk;
  ASSERT_FALSE(pool_->WouldWait(promised));
  const uint64_t epoch = pool_->OpenEpoch();
  for (uint64_t left = promised; left > 0; left -= kChunk) Take(epoch);
}

TEST_F(StagingAdmissionTest, KnowsWhenOnlyAnEpochItselfCanHelp) {
  const uint64_t first = pool_->OpenEpoch();
  Take(first);
  EXPECT_TRUE(pool_->HoldsAlone(first));
  pool_->FinishLeasing(first);
  const uint64_t second = pool_->OpenEpoch();
  EXPECT_FALSE(pool_->HoldsAlone(second));
  Take(second);
  EXPECT_FALSE(pool_->HoldsAlone(first));
  pool_->Quarantine(first, "a test");
  EXPECT_TRUE(pool_->HoldsAlone(second)) << "what is quarantined may never come back";
  pool_->Retire(first);
  EXPECT_TRUE(pool_->HoldsAlone(second));
}

// Two saves, each three times the arena, each with a writer that releases leases in order.
TEST_F(StagingAdmissionTest, TwoStreamingSavesUnderOneCapBothEnd) {
  constexpr int kLeases = 12;
  const uint64_t epochs[] = {pool_->OpenEpoch(), pool_->OpenEpoch()};
  std::vector<std::thread> savers;
  std::atomic<int> ended{0};
  for (const uint64_t epoch : epochs) {
    savers.emplace_back([this, epoch, &ended] {
      std::deque<Lease> in_flight;
      for (int i = 0; i < kLeases; ++i) {
        while (true) {
          const absl::StatusOr<Lease> lease = pool_->TryAcquire(epoch, kChunkBytes);
          if (lease.ok()) {
            pool_->Seal(*lease);
            pool_->StartWriting(*lease);
            in_flight.push_back(*lease);
            break;
          }
          ASSERT_TRUE(absl::IsUnavailable(lease.status())) << lease.status();
          if (!in_flight.empty()) {
            pool_->Release(in_flight.front());
            in_flight.pop_front();
          }
          std::this_thread::yield();
        }
      }
      pool_->FinishLeasing(epoch);
      pool_->Retire(epoch);
      ++ended;
    });
  }
  for (std::thread& saver : savers) saver.join();
  EXPECT_EQ(ended, 2);
  const StagingStats stats = pool_->stats();
  EXPECT_EQ(stats.leases, 2u * kLeases);
  EXPECT_EQ(stats.bytes_held, 0u);
  EXPECT_LE(stats.bytes_held_peak, kArenaBytes);
}

// The case that deadlocks without admission by epoch: both saves hold half of the memory, and each
// needs more before its first release.
TEST_F(StagingAdmissionTest, TwoSavesThatHoldAllTheyTakeDoNotDeadlock) {
  const uint64_t epochs[] = {pool_->OpenEpoch(), pool_->OpenEpoch()};
  std::vector<std::thread> savers;
  for (const uint64_t epoch : epochs) {
    savers.emplace_back([this, epoch] {
      for (int i = 0; i < 4; ++i)
        ASSERT_TRUE(pool_->Acquire(epoch, kChunkBytes, absl::InfiniteFuture()).ok());
      pool_->FinishLeasing(epoch);
      pool_->Retire(epoch);
    });
  }
  for (std::thread& saver : savers) saver.join();
  EXPECT_EQ(pool_->stats().bytes_held_peak, kArenaBytes);
}

}  // namespace
}  // namespace holdfast::staging
