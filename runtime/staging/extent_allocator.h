// Free runs of the arena: arithmetic on offsets, without touching memory.
#ifndef HOLDFAST_RUNTIME_STAGING_EXTENT_ALLOCATOR_H_
#define HOLDFAST_RUNTIME_STAGING_EXTENT_ALLOCATOR_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace holdfast::staging {

/// Best fit over free runs; adjacent runs are merged at once. \threadsafety None: StagingPool
/// locks.
class ExtentAllocator {
 public:
  /// `bytes` is the arena's size, `granule` the alignment of every offset and length; both in
  /// bytes.
  ExtentAllocator(uint64_t bytes, uint64_t granule);

  /// Allocates a run of at least `bytes`, rounded up to the granule. Returns nothing when no free
  /// run is long enough.
  std::optional<uint64_t> Allocate(uint64_t bytes);

  /// Frees a run. Aborts unless the run is exactly an allocated one: the caller would corrupt
  /// memory.
  void Free(uint64_t offset, uint64_t bytes);

  uint64_t free_bytes() const { return free_bytes_; }
  uint64_t largest_free() const;

  /// Returns the bytes that any sequence of requests can allocate now, if no request is larger than
  /// `request_bytes_max`.
  uint64_t CertainBytes(uint64_t request_bytes_max) const;

 private:
  uint64_t RoundUp(uint64_t bytes) const;
  void Insert(uint64_t offset, uint64_t bytes);
  void Erase(std::map<uint64_t, uint64_t>::iterator run);

  uint64_t granule_;
  uint64_t free_bytes_ = 0;
  std::map<uint64_t, uint64_t> free_;                // offset -> bytes
  std::set<std::pair<uint64_t, uint64_t>> by_size_;  // (bytes, offset)
  std::map<uint64_t, uint64_t> taken_;               // offset -> bytes
};

}  // namespace holdfast::staging

#endif  // HOLDFAST_RUNTIME_STAGING_EXTENT_ALLOCATOR_H_
