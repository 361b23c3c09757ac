// The CRC-32s of tensors that a plan has places for: taken from staged bytes, chunk by chunk on the
// sealer's threads, combined, and put into the literals before those are digested.
#ifndef HOLDFAST_RUNTIME_WRITER_CHECKSUMS_H_
#define HOLDFAST_RUNTIME_WRITER_CHECKSUMS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "holdfast/plan.h"
#include "runtime/base/mutex.h"

namespace holdfast::writer {

/// Checksums of one save. An extent with a place for a checksum can be sealed only when all of the
/// tensor was staged. It is not waited for: whoever takes the last part seals it.
///
/// \threadsafety All methods may be called from any thread, once or more for an extent, never for
/// the same extent at once.
class Checksums {
 public:
  /// Null if the plan has no places for checksums. Extents are counted through the files, one per
  /// chunk.
  static std::unique_ptr<Checksums> For(const SavePlan& plan);

  /// Whether extent `index` has a place for the checksum of a device tensor that is not all in it.
  bool WaitsForDevice(uint32_t index) const { return extents_[index].waits_for_device; }

  /// Takes what the staged bytes of extent `index` contribute, the first time that it is called for
  /// it. True: nothing is missing for its places, they were filled, and it can be sealed. False:
  /// it will be among the `ready` of a later call for another extent. `ready`: extents that were
  /// turned down before and have everything now.
  bool Take(uint32_t index, char* memory, std::vector<uint32_t>* ready);

 private:
  /// A tensor whose checksum is wanted: one part for each chunk that it touches.
  struct Tensor {
    std::vector<uint32_t> parts;  // CRC-32 of each
    std::vector<uint64_t> bytes;  // and length
    uint32_t missing = 0;
    uint32_t crc = 0;  // of all, once nothing is missing
  };
  struct Part {
    uint32_t tensor = 0;
    uint32_t part = 0;
    uint32_t offset = 0;  // in the extent
    uint32_t bytes = 0;
  };
  struct Place {
    uint32_t tensor = 0;
    uint32_t byte = 0;    // which of the four
    uint32_t offset = 0;  // in the extent
  };
  struct Extent {
    std::vector<Part> parts;
    std::vector<Place> places;
    bool waits_for_device = false;
    bool taken = false;
  };

  void Add(const PlannedFile& file, uint32_t extent_first);
  bool Complete(const Extent& extent) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  base::Mutex mutex_;
  std::vector<Extent> extents_;  // each touched by who seals it
  std::vector<Tensor> tensors_ ABSL_GUARDED_BY(mutex_);
  std::vector<uint32_t> parked_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace holdfast::writer

#endif  // HOLDFAST_RUNTIME_WRITER_CHECKSUMS_H_
