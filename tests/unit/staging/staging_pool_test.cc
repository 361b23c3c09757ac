// Leases and epochs: holdings, holders, states, and every illegal edge.
#include "runtime/staging/staging_pool.h"
#include "runtime/base/clock.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace holdfast::staging {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kArenaBytes = 8 * uint64_t{kChunkBytes};

class StagingPoolTest : public ::testing::Test {
 protected:
  StagingPoolTest() {
    absl::StatusOr<std::unique_ptr<StagingPool>> pool =
        StagingPool::Create({.arena_bytes = kArenaBytes, .control_bytes_max = 1000});
    EXPECT_TRUE(pool.ok()) << pool.status();
    pool_ = *std::move(pool);
  }

  Lease Take(uint64_t epoch, uint32_t bytes = kChunkBytes) {
    absl::StatusOr<Lease> lease = pool_->Acquire(epoch, bytes, absl::InfinitePast());
    EXPECT_TRUE(lease.ok()) << lease.status();
    return lease.ok() ? *lease : Lease();
  }
  Lease TakeWriting(uint64_t epoch) {
    const Lease lease = Take(epoch);
    pool_->Seal(lease);
    pool_->StartWriting(lease);
    return lease;
  }

  std::unique_ptr<StagingPool> pool_;
};

TEST_F(StagingPoolTest, GivesAlignedLeasesInsideTheArena) {
  const uint64_t epoch = pool_->OpenEpoch();
  const Lease lease = Take(epoch, 5000);
  EXPECT_EQ(lease.epoch, epoch);
  EXPECT_EQ(lease.bytes, 8192u);
  EXPECT_EQ(lease.offset % kIoAlignment, 0u);
  EXPECT_LE(lease.offset + lease.bytes, pool_->arena().bytes());
  const Lease other = Take(epoch, 1);
  EXPECT_EQ(other.bytes, kIoAlignment);
  EXPECT_TRUE(other.offset >= lease.offset + lease.bytes ||
              lease.offset >= other.offset + other.bytes);
  std::memset(pool_->arena().base() + lease.offset, 1, lease.bytes);
}

TEST_F(StagingPoolTest, ReusesBytesOnlyAfterEpochRetires) {
  const uint64_t first = pool_->OpenEpoch();
  for (int i = 0; i < 8; ++i) TakeWriting(first);
  pool_->FinishLeasing(first);
  const uint64_t second = pool_->OpenEpoch();
  EXPECT_EQ(pool_->TryAcquire(second, 1).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(pool_->Acquire(second, 1, base::Now()).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  pool_->Retire(first);
  EXPECT_TRUE(pool_->TryAcquire(second, 1).ok());
}

TEST_F(StagingPoolTest, ReusesAReleasedLeaseAtOnce) {
  const uint64_t epoch = pool_->OpenEpoch();
  std::vector<Lease> leases;
  for (int i = 0; i < 8; ++i) leases.push_back(TakeWriting(epoch));
  ASSERT_FALSE(pool_->TryAcquire(epoch, 1).ok());
  pool_->Release(leases[3]);
  const Lease again = Take(epoch);
  EXPECT_EQ(again.offset, leases[3].offset);
  EXPECT_NE(again.serial, leases[3].serial);
}

TEST_F(StagingPoolTest, RetiresLeasesInAnyState) {
  const uint64_t epoch = pool_->OpenEpoch();
  Take(epoch);
  pool_->Seal(Take(epoch));
  TakeWriting(epoch);
  pool_->Release(TakeWriting(epoch));
  EXPECT_EQ(pool_->stats().bytes_held, 3 * uint64_t{kChunkBytes});
  pool_->Retire(epoch);
  EXPECT_EQ(pool_->stats().bytes_held, 0u);
  EXPECT_TRUE(pool_->stats().epochs.empty());
}

TEST_F(StagingPoolTest, RetiresOneEpochAlone) {
  const uint64_t first = pool_->OpenEpoch();
  Take(first);
  pool_->FinishLeasing(first);
  const uint64_t second = pool_->OpenEpoch();
  const Lease kept = Take(second);
  pool_->Retire(first);
  EXPECT_EQ(pool_->stats().bytes_held, kChunkBytes);
  pool_->Seal(kept);
}

TEST_F(StagingPoolTest, GivesNothingToAnAbortedEpochButKeepsItsLeases) {
  const uint64_t epoch = pool_->OpenEpoch();
  const Lease lease = Take(epoch);
  pool_->AbortEpoch(epoch);
  EXPECT_EQ(pool_->TryAcquire(epoch, 1).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(pool_->Acquire(epoch, 1, absl::InfiniteFuture()).status().code(),
            absl::StatusCode::kAborted);
  EXPECT_EQ(pool_->stats().bytes_held, kChunkBytes);
  pool_->Seal(lease);  // copies in flight may still end
  pool_->Retire(epoch);
  EXPECT_EQ(pool_->stats().bytes_held, 0u);
  EXPECT_EQ(pool_->TryAcquire(epoch, 1).status().code(), absl::StatusCode::kAborted);
  pool_->AbortEpoch(epoch);  // may come late
  pool_->FinishLeasing(epoch);
}

TEST_F(StagingPoolTest, KeepsAndReportsQuarantinedBytes) {
  const uint64_t stuck = pool_->OpenEpoch();
  for (int i = 0; i < 5; ++i) TakeWriting(stuck);
  pool_->Quarantine(stuck, "a test");
  EXPECT_EQ(pool_->TryAcquire(stuck, 1).status().code(), absl::StatusCode::kAborted);
  const uint64_t next = pool_->OpenEpoch();
  for (int i = 0; i < 3; ++i) Take(next);
  const absl::Status full = pool_->Acquire(next, kChunkBytes, absl::InfinitePast()).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(full.message(), HasSubstr("20971520 of them quarantined"));
  const StagingStats stats = pool_->stats();
  EXPECT_EQ(stats.bytes_quarantined, 5 * uint64_t{kChunkBytes});
  ASSERT_EQ(stats.epochs.size(), 2u);
  EXPECT_EQ(stats.epochs[0].quarantined, "a test");
  EXPECT_EQ(stats.epochs[1].quarantined, "");
  pool_->Retire(stuck);  // its worker is provably gone
  EXPECT_EQ(pool_->stats().bytes_quarantined, 0u);
  EXPECT_TRUE(pool_->TryAcquire(next, kChunkBytes).ok());
}

TEST_F(StagingPoolTest, RefusesALeaseAfterFinishLeasing) {
  const uint64_t epoch = pool_->OpenEpoch();
  pool_->FinishLeasing(epoch);
  EXPECT_EQ(pool_->TryAcquire(epoch, 1).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(pool_->Acquire(epoch, 1, absl::InfiniteFuture()).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(StagingPoolTest, CountsHeldBytes) {
  const uint64_t epoch = pool_->OpenEpoch();
  const Lease first = TakeWriting(epoch);
  TakeWriting(epoch);
  pool_->Release(first);
  StagingStats stats = pool_->stats();
  EXPECT_EQ(stats.arena_bytes, kArenaBytes);
  EXPECT_EQ(stats.bytes_held, kChunkBytes);
  EXPECT_EQ(stats.bytes_held_peak, 2 * uint64_t{kChunkBytes});
  EXPECT_EQ(stats.leases, 2u);
  EXPECT_EQ(stats.waits, 0u);
  EXPECT_EQ(stats.time_waiting, absl::ZeroDuration());
  EXPECT_TRUE(stats.resident);
  EXPECT_EQ(stats.pages, pool_->arena().pages());
  EXPECT_EQ(stats.page_bytes, pool_->arena().page_bytes());
  EXPECT_EQ(stats.pages_reason, pool_->arena().reason());
  ASSERT_EQ(stats.epochs.size(), 1u);
  EXPECT_EQ(stats.epochs[0].epoch, epoch);
  EXPECT_EQ(stats.epochs[0].bytes_held, kChunkBytes);
  EXPECT_GT(stats.epochs[0].age, absl::ZeroDuration());
  const uint64_t empty = pool_->OpenEpoch();
  stats = pool_->stats();
  ASSERT_EQ(stats.epochs.size(), 2u);
  EXPECT_EQ(stats.epochs[1].epoch, empty);
  EXPECT_EQ(stats.epochs[1].age, absl::ZeroDuration()) << "it has no lease yet";
}

TEST_F(StagingPoolTest, CapsControlMemory) {
  EXPECT_TRUE(pool_->TakeControlBytes(600).ok());
  EXPECT_TRUE(pool_->TakeControlBytes(400).ok());
  const absl::Status full = pool_->TakeControlBytes(1);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(full.message(), HasSubstr("control_bytes_max"));
  EXPECT_EQ(pool_->TakeControlBytes(UINT64_MAX).code(), absl::StatusCode::kResourceExhausted);
  pool_->ReturnControlBytes(600);
  EXPECT_EQ(pool_->stats().control_bytes_held, 400u);
  EXPECT_EQ(pool_->stats().control_bytes_peak, 1000u);
  EXPECT_TRUE(pool_->TakeControlBytes(1).ok());
}

TEST_F(StagingPoolTest, IsIdleOnlyWhileNoEpochIsOpen) {
  EXPECT_GT(pool_->IdleFor(), absl::ZeroDuration());
  const uint64_t epoch = pool_->OpenEpoch();
  EXPECT_EQ(pool_->IdleFor(), absl::ZeroDuration());
  pool_->Retire(epoch);
  EXPECT_GT(pool_->IdleFor(), absl::ZeroDuration());
}

TEST(StagingPool, ReportsThatTheArenaCannotBeHad) {
  const auto pool = StagingPool::Create({.arena_bytes = uint64_t{1} << 50});
  EXPECT_EQ(pool.status().code(), absl::StatusCode::kResourceExhausted);
}

// ---- Every illegal edge ends the process.

using StagingPoolDeathTest = StagingPoolTest;

TEST_F(StagingPoolDeathTest, AbortsOnEveryIllegalEdge) {
  const uint64_t epoch = pool_->OpenEpoch();
  const Lease filling = Take(epoch);
  EXPECT_DEATH(pool_->StartWriting(filling), "illegal edge");
  EXPECT_FALSE(pool_->Release(filling));
  const Lease sealed = Take(epoch);
  pool_->Seal(sealed);
  EXPECT_DEATH(pool_->Seal(sealed), "illegal edge");
  EXPECT_FALSE(pool_->Release(sealed));
  const Lease writing = TakeWriting(epoch);
  EXPECT_DEATH(pool_->Seal(writing), "illegal edge");
  EXPECT_DEATH(pool_->StartWriting(writing), "illegal edge");
}

TEST_F(StagingPoolDeathTest, AbortsOnALeaseThatWasGivenBack) {
  const uint64_t epoch = pool_->OpenEpoch();
  const Lease lease = TakeWriting(epoch);
  EXPECT_TRUE(pool_->Release(lease));
  EXPECT_FALSE(pool_->Release(lease));
  // Equal bytes, table index and epoch; only the serial differs.
  const Lease again = Take(epoch);
  ASSERT_EQ(again.offset, lease.offset);
  ASSERT_EQ(again.index, lease.index);
  EXPECT_DEATH(pool_->Seal(lease), "given back");
  pool_->Retire(epoch);
  EXPECT_DEATH(pool_->Seal(again), "given back");
}

TEST_F(StagingPoolDeathTest, AbortsOnALeaseThatItNeverGave) {
  const uint64_t epoch = pool_->OpenEpoch();
  Lease lease = Take(epoch);
  lease.offset += kIoAlignment;
  EXPECT_DEATH(pool_->Seal(lease), "given back");
  lease.index = 1000;
  EXPECT_DEATH(pool_->Seal(lease), "never gave");
}

TEST_F(StagingPoolDeathTest, AbortsOnMisusedEpochsAndSizes) {
  const uint64_t epoch = pool_->OpenEpoch();
  EXPECT_DEATH((void)pool_->TryAcquire(epoch, 0), "one chunk");
  EXPECT_DEATH((void)pool_->TryAcquire(epoch, kChunkBytes + 1), "one chunk");
  EXPECT_DEATH((void)pool_->Acquire(epoch, 0, absl::InfiniteFuture()), "one chunk");
  EXPECT_DEATH(pool_->Retire(epoch + 1), "never opened");
  EXPECT_DEATH((void)pool_->TryAcquire(0, 1), "never opened");
  pool_->Retire(epoch);
  EXPECT_DEATH(pool_->Retire(epoch), "ends once");
  EXPECT_DEATH(pool_->Quarantine(epoch, "a test"), "nothing to quarantine");
  EXPECT_DEATH(pool_->ReturnControlBytes(1), "more control memory");
}

// ---- Destruction.

bool IsMapped(const char* base) {
  std::ostringstream start;
  start << std::hex << reinterpret_cast<uintptr_t>(base) << "-";
  std::ifstream in("/proc/self/maps");
  std::string line;
  while (std::getline(in, line)) {
    if (line.rfind(start.str(), 0) == 0) return true;
  }
  return false;
}

TEST_F(StagingPoolTest, UnmapsTheArenaAtItsEnd) {
  const char* const base = pool_->arena().base();
  pool_->Retire(pool_->OpenEpoch());
  ASSERT_TRUE(IsMapped(base));
  pool_.reset();
  EXPECT_FALSE(IsMapped(base));
}

TEST_F(StagingPoolTest, NeverUnmapsMemoryInUse) {
  const char* const base = pool_->arena().base();
  const uint64_t stuck = pool_->OpenEpoch();
  TakeWriting(stuck);
  pool_->Quarantine(stuck, "a test");
  pool_.reset();
  EXPECT_TRUE(IsMapped(base));
}

TEST_F(StagingPoolTest, IsNotInAForeignChildAndDoesNothingThere) {
  Take(pool_->OpenEpoch());
  const char* const base = pool_->arena().base();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const bool mapped = IsMapped(base);
    pool_.reset();
    _exit(mapped ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_TRUE(IsMapped(base));
}

}  // namespace
}  // namespace holdfast::staging
