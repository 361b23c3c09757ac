// ExtentAllocator against a flag for each granule, for a sequence of requests and returns. After
// each step no byte has two owners, no byte is lost, and adjacent free runs are one run.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "fuzz/expect.h"
#include "fuzz/input.h"
#include "fuzz/planted.h"
#include "runtime/staging/extent_allocator.h"

namespace {

using holdfast::fuzz::Input;
using holdfast::staging::ExtentAllocator;

constexpr uint64_t kGranule = 4096;
constexpr size_t kGranulesMax = 128;
constexpr size_t kStepsMax = 150;

/// The free runs, in granules.
struct FreeRuns {
  uint64_t sum = 0;
  uint64_t largest = 0;
  uint64_t certain = 0;  // of all runs, without the last `request_max - 1` granules of each
};

class Model {
 public:
  explicit Model(size_t granules) : granules_(granules) {}

  void Set(uint64_t offset, uint64_t granules, bool taken) {
    HOLDFAST_EXPECT(offset % kGranule == 0 && offset / kGranule + granules <= granules_);
    for (uint64_t i = offset / kGranule; i < offset / kGranule + granules; ++i) {
      HOLDFAST_EXPECT(taken_[i] != taken);
      taken_[i] = taken;
    }
  }

  FreeRuns Runs(uint64_t request_max) const {
    FreeRuns runs;
    uint64_t run = 0;
    for (size_t i = 0; i <= granules_; ++i) {
      if (i < granules_ && !taken_[i]) {
        ++run;
        continue;
      }
      runs.sum += run;
      runs.largest = std::max(runs.largest, run);
      runs.certain += run - std::min(run, request_max - 1);
      run = 0;
    }
    return runs;
  }

 private:
  size_t granules_;
  std::array<bool, kGranulesMax> taken_ = {};
};

/// Compares the allocator's figures with the model's.
void Compare(const ExtentAllocator& allocator, const FreeRuns& runs, uint64_t request_max) {
  HOLDFAST_EXPECT(allocator.free_bytes() == runs.sum * kGranule);
  HOLDFAST_EXPECT(allocator.largest_free() == runs.largest * kGranule);
  HOLDFAST_EXPECT(allocator.CertainBytes(request_max * kGranule) ==
                  std::max(runs.certain, runs.largest) * kGranule);
}

/// Checks the promise of CertainBytes with a sequence of sizes.
void TakeAllThatIsCertain(ExtentAllocator allocator, uint64_t request_max, Input* input) {
  uint64_t left = allocator.CertainBytes(request_max * kGranule) / kGranule;
  while (left > 0) {
    const uint64_t granules = std::min(left, 1 + input->Below(request_max));
    HOLDFAST_EXPECT(allocator.Allocate(granules * kGranule).has_value());
    left -= granules;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  Input input(data, bytes);
  const size_t granules = 1 + input.Below(kGranulesMax);
  const uint64_t request_max = 1 + input.Below(20);
  // A tail of less than a granule is never given out.
  ExtentAllocator allocator(granules * kGranule + input.Below(kGranule), kGranule);
  Model model(granules);
  std::map<uint64_t, uint64_t> held;  // offset -> granules
  FreeRuns runs = model.Runs(request_max);
  for (size_t step = 0; step < kStepsMax && !input.AtEnd(); ++step) {
    const uint8_t choice = input.Byte();
    if (held.empty() || choice % 2 == 0) {
      const uint64_t need = 1 + input.Below(request_max);
      const bool fits = runs.largest >= need;
      // A length that ends inside the last granule stands for the whole granule.
      const auto offset = allocator.Allocate(need * kGranule - choice);
      HOLDFAST_EXPECT(offset.has_value() == fits);
      if (!fits) continue;
      model.Set(*offset, need, true);
      HOLDFAST_EXPECT(held.emplace(*offset, need).second);
    } else {
      const auto run = std::next(held.begin(), static_cast<long>(input.Below(held.size())));
      allocator.Free(run->first, run->second * kGranule - choice % kGranule);
      model.Set(run->first, run->second, false);
      // As if a returned run of four granules lost a granule.
      if (holdfast::fuzz::Planted() && run->second == 4) (void)allocator.Allocate(kGranule);
      held.erase(run);
    }
    runs = model.Runs(request_max);
    Compare(allocator, runs, request_max);
  }
  TakeAllThatIsCertain(allocator, request_max, &input);
  for (const auto& [offset, length] : held) allocator.Free(offset, length * kGranule);
  HOLDFAST_EXPECT(allocator.largest_free() == granules * kGranule);
  return 0;
}
