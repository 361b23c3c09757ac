// The allocator against a bitmap model, and every misuse.
#include "runtime/staging/extent_allocator.h"

#include <cstdlib>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace holdfast::staging {
namespace {

constexpr uint64_t kGranule = 4096;

TEST(ExtentAllocator, RoundsUpToTheGranule) {
  ExtentAllocator allocator(16 * kGranule + 100, kGranule);
  EXPECT_EQ(allocator.free_bytes(), 16 * kGranule);
  EXPECT_EQ(allocator.Allocate(1), 0u);
  EXPECT_EQ(allocator.Allocate(kGranule + 1), kGranule);
  EXPECT_EQ(allocator.free_bytes(), 13 * kGranule);
  allocator.Free(0, 1);  // the requested length stands for the run
  EXPECT_EQ(allocator.free_bytes(), 14 * kGranule);
}

TEST(ExtentAllocator, TakesTheSmallestRunThatFits) {
  ExtentAllocator allocator(16 * kGranule, kGranule);
  for (int i = 0; i < 16; ++i) ASSERT_TRUE(allocator.Allocate(kGranule).has_value());
  for (const uint64_t i : {1, 2, 3, 7, 8, 12}) allocator.Free(i * kGranule, kGranule);
  EXPECT_EQ(allocator.largest_free(), 3 * kGranule);
  EXPECT_EQ(allocator.Allocate(2 * kGranule), 7 * kGranule);
  EXPECT_EQ(allocator.Allocate(kGranule), 12 * kGranule);
  EXPECT_EQ(allocator.Allocate(3 * kGranule), kGranule);
  EXPECT_EQ(allocator.Allocate(kGranule), std::nullopt);
}

TEST(ExtentAllocator, MergesRunsThatTouch) {
  ExtentAllocator allocator(8 * kGranule, kGranule);
  for (int i = 0; i < 8; ++i) ASSERT_TRUE(allocator.Allocate(kGranule).has_value());
  for (const uint64_t i : {0, 2, 4, 6, 1, 5, 3, 7}) allocator.Free(i * kGranule, kGranule);
  EXPECT_EQ(allocator.largest_free(), 8 * kGranule);
  EXPECT_EQ(allocator.Allocate(8 * kGranule), 0u);
}

TEST(ExtentAllocator, RefusesTooLongRunsWithoutOverflow) {
  ExtentAllocator allocator(8 * kGranule, kGranule);
  EXPECT_EQ(allocator.Allocate(8 * kGranule + 1), std::nullopt);
  EXPECT_EQ(allocator.Allocate(UINT64_MAX), std::nullopt);
  EXPECT_EQ(allocator.free_bytes(), 8 * kGranule);
}

TEST(ExtentAllocator, ManagesNothingAtAll) {
  ExtentAllocator allocator(kGranule - 1, kGranule);
  EXPECT_EQ(allocator.free_bytes(), 0u);
  EXPECT_EQ(allocator.largest_free(), 0u);
  EXPECT_EQ(allocator.CertainBytes(kGranule), 0u);
  EXPECT_EQ(allocator.Allocate(1), std::nullopt);
}

TEST(ExtentAllocatorDeathTest, AbortsOnEveryMisuse) {
  ExtentAllocator allocator(8 * kGranule, kGranule);
  const uint64_t offset = *allocator.Allocate(2 * kGranule);
  EXPECT_DEATH((void)allocator.Allocate(0), "no owner");
  EXPECT_DEATH(allocator.Free(offset + kGranule, kGranule), "not allocated");
  EXPECT_DEATH(allocator.Free(offset, kGranule), "part of a run");
  EXPECT_DEATH(allocator.Free(offset, 3 * kGranule), "part of a run");
  allocator.Free(offset, 2 * kGranule);
  EXPECT_DEATH(allocator.Free(offset, 2 * kGranule), "not allocated");
  EXPECT_DEATH(ExtentAllocator(100, 0), "granule");
}

uint64_t Seed() {
  const char* text = std::getenv("HOLDFAST_TEST_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : std::random_device()();
}

// One flag per granule marks taken granules; the allocator must agree at every step.
class Model {
 public:
  explicit Model(size_t granules) : taken_(granules, false) {}

  void Set(uint64_t offset, uint64_t granules, bool taken) {
    for (uint64_t i = 0; i < granules; ++i) {
      ASSERT_LT(offset / kGranule + i, taken_.size());
      ASSERT_NE(taken_[offset / kGranule + i], taken) << "granule " << offset / kGranule + i;
      taken_[offset / kGranule + i] = taken;
    }
  }

  std::vector<uint64_t> FreeRuns() const {
    std::vector<uint64_t> runs;
    uint64_t run = 0;
    for (const bool taken : taken_) {
      if (!taken) ++run;
      if (taken && run > 0) runs.push_back(std::exchange(run, 0));
    }
    if (run > 0) runs.push_back(run);
    return runs;
  }

 private:
  std::vector<bool> taken_;
};

struct HeldRun {
  uint64_t offset = 0;
  uint64_t granules = 0;
};

TEST(ExtentAllocator, AgreesWithABitmapUnderRandomUse) {
  const uint64_t seed = Seed();
  SCOPED_TRACE(::testing::Message() << "HOLDFAST_TEST_SEED=" << seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 20; ++round) {
    const size_t granules = 1 + random() % 300;
    const uint64_t request_max = 1 + random() % 40;
    ExtentAllocator allocator(granules * kGranule, kGranule);
    Model model(granules);
    std::vector<HeldRun> held;
    for (int step = 0; step < 1000; ++step) {
      const std::vector<uint64_t> runs = model.FreeRuns();
      uint64_t largest = 0, sum = 0, best = UINT64_MAX;
      const uint64_t need = 1 + random() % request_max;
      for (const uint64_t run : runs) {
        largest = std::max(largest, run);
        sum += run;
        if (run >= need) best = std::min(best, run);
      }
      ASSERT_EQ(allocator.free_bytes(), sum * kGranule);
      ASSERT_EQ(allocator.largest_free(), largest * kGranule);
      if (held.empty() || random() % 2 == 0) {
        const auto offset = allocator.Allocate(need * kGranule - random() % kGranule);
        ASSERT_EQ(offset.has_value(), best != UINT64_MAX);
        if (!offset.has_value()) continue;
        ASSERT_EQ(*offset % kGranule, 0u);
        held.push_back({.offset = *offset, .granules = need});
        ASSERT_NO_FATAL_FAILURE(model.Set(*offset, need, true));
      } else {
        std::swap(held[random() % held.size()], held.back());
        const HeldRun run = held.back();
        held.pop_back();
        allocator.Free(run.offset, run.granules * kGranule);
        ASSERT_NO_FATAL_FAILURE(model.Set(run.offset, run.granules, false));
      }
    }
  }
}

TEST(ExtentAllocator, KeepsThePromiseOfCertainBytes) {
  const uint64_t seed = Seed();
  SCOPED_TRACE(::testing::Message() << "HOLDFAST_TEST_SEED=" << seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 300; ++round) {
    const uint64_t request_max = 1 + random() % 16;
    ExtentAllocator allocator((1 + random() % 200) * kGranule, kGranule);
    std::vector<HeldRun> held;
    while (true) {
      const uint64_t granules = 1 + random() % request_max;
      const auto offset = allocator.Allocate(granules * kGranule);
      if (!offset.has_value()) break;
      held.push_back({.offset = *offset, .granules = granules});
    }
    for (const HeldRun& run : held) {
      if (random() % 3 != 0) allocator.Free(run.offset, run.granules * kGranule);
    }
    // In any sizes and any order, up to the last promised byte.
    uint64_t left = allocator.CertainBytes(request_max * kGranule) / kGranule;
    while (left > 0) {
      const uint64_t granules = std::min(left, 1 + random() % request_max);
      ASSERT_TRUE(allocator.Allocate(granules * kGranule).has_value())
          << granules << " of " << left << " granules that were still promised";
      left -= granules;
    }
  }
}

TEST(ExtentAllocator, IsCertainOfAllBytesOfOneRun) {
  ExtentAllocator allocator(64 * kGranule, kGranule);
  EXPECT_EQ(allocator.CertainBytes(16 * kGranule), 64 * kGranule);
}

}  // namespace
}  // namespace holdfast::staging
