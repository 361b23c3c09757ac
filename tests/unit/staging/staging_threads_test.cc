// Many saves at once, from many threads: bytes have one owner at any time, the cap holds, and every
// save ends.
#include <atomic>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/base/clock.h"
#include "runtime/base/mutex.h"
#include "runtime/staging/staging_pool.h"

namespace holdfast::staging {
namespace {

constexpr uint64_t kArenaBytes = 6 * uint64_t{kChunkBytes};
constexpr int kSaves = 24;
constexpr int kSavers = 4;
constexpr int kLeasesMax = 30;

uint64_t Seed() {
  const char* text = std::getenv("HOLDFAST_TEST_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : std::random_device()();
}

// Marks the first and the last bytes of a lease with its owner. Another mark proves two owners;
// under TSan the write itself does, too.
void Mark(StagingPool& pool, const Lease& lease) {
  char* const base = pool.arena().base() + lease.offset;
  *reinterpret_cast<uint64_t*>(base) = lease.serial;
  *reinterpret_cast<uint64_t*>(base + lease.bytes - 8) = lease.serial;
}
void ExpectMark(StagingPool& pool, const Lease& lease) {
  const char* const base = pool.arena().base() + lease.offset;
  ASSERT_EQ(*reinterpret_cast<const uint64_t*>(base), lease.serial);
  ASSERT_EQ(*reinterpret_cast<const uint64_t*>(base + lease.bytes - 8), lease.serial);
}

class NothingRegistrant final : public Registrant {
 public:
  absl::Status DropRegistration() override { return absl::OkStatus(); }
  absl::Status RestoreRegistration() override { return absl::OkStatus(); }
};

class Saver {
 public:
  Saver(StagingPool* pool, uint64_t seed) : pool_(*pool), random_(seed) {}

  // A save that streams, holds all, or is cancelled; its copies and its worker are this thread.
  void Save() {
    const uint64_t epoch = pool_.OpenEpoch();
    const int leases = static_cast<int>(random_() % kLeasesMax);
    const int cancel_at = random_() % 5 == 0 ? static_cast<int>(random_() % kLeasesMax) : -1;
    std::vector<Lease> held;
    for (int i = 0; i < leases; ++i) {
      if (i == cancel_at) {
        pool_.AbortEpoch(epoch);
        break;
      }
      const uint32_t bytes =
          random_() % 3 == 0 ? 1 + static_cast<uint32_t>(random_() % kChunkBytes) : kChunkBytes;
      Lease lease;
      ASSERT_NO_FATAL_FAILURE(AcquireStreaming(epoch, bytes, &held, &lease));
      Mark(pool_, lease);
      pool_.Seal(lease);
      if (random_() % 4 != 0) {
        pool_.StartWriting(lease);
        held.push_back(lease);
      }
    }
    pool_.FinishLeasing(epoch);
    for (const Lease& lease : held) ASSERT_NO_FATAL_FAILURE(ExpectMark(pool_, lease));
    if (random_() % 8 == 0) pool_.Quarantine(epoch, "a test");
    pool_.Retire(epoch);
  }

 private:
  void AcquireStreaming(uint64_t epoch, uint32_t bytes, std::vector<Lease>* held, Lease* out) {
    while (true) {
      const absl::Time deadline = base::Now() + absl::Milliseconds(static_cast<int>(random_() % 3));
      const absl::StatusOr<Lease> lease = random_() % 2 == 0
                                              ? pool_.TryAcquire(epoch, bytes)
                                              : pool_.Acquire(epoch, bytes, deadline);
      if (lease.ok()) {
        *out = *lease;
        return;
      }
      ASSERT_TRUE(absl::IsUnavailable(lease.status()) || absl::IsDeadlineExceeded(lease.status()))
          << lease.status();
      if (held->empty()) continue;
      std::swap((*held)[random_() % held->size()], held->back());
      ASSERT_NO_FATAL_FAILURE(ExpectMark(pool_, held->back()));
      pool_.Release(held->back());
      held->pop_back();
    }
  }

  StagingPool& pool_;
  std::mt19937_64 random_;
};

TEST(StagingThreads, BytesHaveOneOwnerAtAnyTime) {
  const uint64_t seed = Seed();
  SCOPED_TRACE(::testing::Message() << "HOLDFAST_TEST_SEED=" << seed);
  // A quarter of the leases stays sealed to the end of its save, which must therefore fit.
  absl::StatusOr<std::unique_ptr<StagingPool>> created =
      StagingPool::Create({.arena_bytes = kArenaBytes * 4});
  ASSERT_TRUE(created.ok()) << created.status();
  StagingPool& pool = **created;
  std::atomic<int> left{kSaves};
  std::atomic<bool> stop{false};
  std::thread observer([&] {
    std::mt19937_64 random(seed + 1);
    NothingRegistrant registrant;
    while (!stop) {
      const StagingStats stats = pool.stats();
      EXPECT_LE(stats.bytes_held, stats.arena_bytes);
      uint64_t sum = 0;
      for (const EpochHolding& epoch : stats.epochs) sum += epoch.bytes_held;
      EXPECT_EQ(sum, stats.bytes_held);
      (void)pool.WouldWait(random() % (2 * stats.arena_bytes));
      pool.AddRegistrant(&registrant);
      const absl::Status trimmed = pool.Trim();
      EXPECT_TRUE(trimmed.ok() || absl::IsFailedPrecondition(trimmed)) << trimmed;
      pool.RemoveRegistrant(&registrant);
      (void)pool.IdleFor();
      std::this_thread::yield();
    }
  });
  std::vector<std::thread> savers;
  for (int i = 0; i < kSavers; ++i) {
    savers.emplace_back([&, i] {
      Saver saver(&pool, seed + 10 + static_cast<uint64_t>(i));
      while (left.fetch_sub(1) > 0) saver.Save();
    });
  }
  for (std::thread& saver : savers) saver.join();
  stop = true;
  observer.join();
  const StagingStats stats = pool.stats();
  EXPECT_EQ(stats.bytes_held, 0u);
  EXPECT_TRUE(stats.epochs.empty());
  EXPECT_LE(stats.bytes_held_peak, stats.arena_bytes);
  EXPECT_FALSE(pool.WouldWait(stats.arena_bytes));
}

TEST(StagingThreads, SeveralStagersOfOneSaveShareItsTurn) {
  absl::StatusOr<std::unique_ptr<StagingPool>> created =
      StagingPool::Create({.arena_bytes = kArenaBytes});
  ASSERT_TRUE(created.ok()) << created.status();
  StagingPool& pool = **created;
  const uint64_t epoch = pool.OpenEpoch();
  std::vector<std::thread> stagers;
  for (int i = 0; i < kSavers; ++i) {
    stagers.emplace_back([&] {
      for (int j = 0; j < 100; ++j) {
        const auto lease = pool.Acquire(epoch, kChunkBytes, absl::InfiniteFuture());
        ASSERT_TRUE(lease.ok()) << lease.status();
        Mark(pool, *lease);
        pool.Seal(*lease);
        pool.StartWriting(*lease);
        ASSERT_NO_FATAL_FAILURE(ExpectMark(pool, *lease));
        pool.Release(*lease);
      }
    });
  }
  for (std::thread& stager : stagers) stager.join();
  EXPECT_EQ(pool.stats().leases, 100u * kSavers);
  EXPECT_EQ(pool.stats().bytes_held, 0u);
}

}  // namespace
}  // namespace holdfast::staging
