#include "runtime/staging/extent_allocator.h"

#include <algorithm>
#include <iterator>

#include "holdfast/pod.h"
#include "runtime/base/check.h"

namespace holdfast::staging {

ExtentAllocator::ExtentAllocator(uint64_t bytes, uint64_t granule) : granule_(granule) {
  HOLDFAST_CHECK(granule > 0, "every offset is a multiple of the granule");
  const uint64_t whole = bytes / granule * granule;
  if (whole > 0) Insert(0, whole);
  free_bytes_ = whole;
}

std::optional<uint64_t> ExtentAllocator::Allocate(uint64_t bytes) {
  HOLDFAST_CHECK(bytes > 0, "an empty run has no owner");
  // Checked before rounding up, which could overflow.
  if (bytes > free_bytes_) return std::nullopt;
  const uint64_t need = RoundUp(bytes);
  const auto best = by_size_.lower_bound({need, 0});
  if (best == by_size_.end()) return std::nullopt;
  const auto [run_bytes, offset] = *best;
  Erase(free_.find(offset));
  if (run_bytes > need) Insert(offset + need, run_bytes - need);
  taken_.emplace(offset, need);
  free_bytes_ -= need;
  return offset;
}

void ExtentAllocator::Free(uint64_t offset, uint64_t bytes) {
  const auto taken = taken_.find(offset);
  HOLDFAST_CHECK(taken != taken_.end(), "freeing bytes that are not allocated");
  HOLDFAST_CHECK(taken->second == RoundUp(bytes), "freeing a part of a run, or more than it");
  const uint64_t freed = taken->second;
  taken_.erase(taken);

  uint64_t begin = offset;
  uint64_t end = offset + freed;
  const auto after = free_.lower_bound(offset);
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == begin) {
      begin = before->first;
      Erase(before);
    }
  }
  if (after != free_.end() && after->first == end) {
    end += after->second;
    Erase(after);
  }
  Insert(begin, end - begin);
  free_bytes_ += freed;
}

uint64_t ExtentAllocator::largest_free() const {
  return by_size_.empty() ? 0 : by_size_.rbegin()->first;
}

// A request fails only when every run has less than `request_bytes_max` left, so each run has given
// away its other bytes by then. A request too large for every other run fits the largest run, as
// long as the sum does.
uint64_t ExtentAllocator::CertainBytes(uint64_t request_bytes_max) const {
  const uint64_t left_over = RoundUp(request_bytes_max) - granule_;
  uint64_t sum = 0;
  for (const auto& [offset, bytes] : free_) sum += bytes > left_over ? bytes - left_over : 0;
  return std::max(sum, largest_free());
}

uint64_t ExtentAllocator::RoundUp(uint64_t bytes) const { return AlignUp(bytes, granule_); }

void ExtentAllocator::Insert(uint64_t offset, uint64_t bytes) {
  free_.emplace(offset, bytes);
  by_size_.emplace(bytes, offset);
}

void ExtentAllocator::Erase(std::map<uint64_t, uint64_t>::iterator run) {
  by_size_.erase({run->second, run->first});
  free_.erase(run);
}

}  // namespace holdfast::staging
