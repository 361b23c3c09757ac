// Which runs of the arena are free: pure arithmetic on offsets, no memory is touched.
#ifndef HOLDFAST_RUNTIME_STAGING_EXTENT_ALLOCATOR_H_
#define HOLDFAST_RUNTIME_STAGING_EXTENT_ALLOCATOR_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace holdfast::staging {

/// Best fit over free runs that are merged as soon as they touch. \threadsafety None: StagingPool
/// locks around it.
class ExtentAllocator {
 public:
  /// `bytes` is the arena's size, `granule` the alignment of every offset and length; both in
  /// bytes.
  ExtentAllocator(uint64_t bytes, uint64_t granule);

  /// Takes a run of at least `bytes`, rounded up to the granule. Nothing when no free run is long
  /// enough.
  std::optional<uint64_t> Allocate(uint64_t bytes);

  /// Gives a run back; it must be exactly one that was allocated (aborts otherwise: the caller
  /// would corrupt memory).
  void Free(uint64_t offset, uint64_t bytes);

  uint64_t free_bytes() const { return free_bytes_; }
  uint64_t largest_free() const;

  /// Bytes that can be allocated now, whatever the order and sizes of the requests, as long as none
  /// is larger than `request_bytes_max`.
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
