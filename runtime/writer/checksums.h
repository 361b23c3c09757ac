// The CRC-32s of tensors that a plan has places for. CRCs are computed chunk by chunk, from staged
// bytes on the sealer's threads or during the copy. The CRCs of a tensor are combined and written
// into the literals before the literals are digested.
#ifndef HOLDFAST_RUNTIME_WRITER_CHECKSUMS_H_
#define HOLDFAST_RUNTIME_WRITER_CHECKSUMS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "holdfast/plan.h"
#include "runtime/base/mutex.h"
#include "runtime/digest/digest.h"

namespace holdfast::writer {

/// The running digest of an extent whose copy met a place of an unknown checksum. The CRCs of its
/// tensors' parts are complete.
struct BegunDigest {
  digest::Stream whole;
  uint32_t bytes = 0;  ///< The digested bytes of the extent.
};

/// Checksums of one save. An extent with a place for a checksum can be sealed only when all of the
/// tensor was staged. No thread waits for the tensor: the thread that adds the last part seals the
/// extent.
///
/// \threadsafety All methods may be called from any thread, repeatedly for an extent, never for the
/// same extent at once.
class Checksums {
 public:
  /// Returns null if the plan has no places for checksums. Extents are counted through the files,
  /// one per chunk.
  static std::unique_ptr<Checksums> For(const SavePlan& plan);

  /// Returns true when extent `index` has a place for the checksum of a device tensor that is not
  /// all in the extent.
  bool WaitsForDevice(uint32_t index) const { return extents_[index].waits_for_device; }

  /// Whether `bytes` at `offset` of extent `index` have places for checksums.
  bool HasPlaces(uint32_t index, uint32_t offset, uint32_t bytes) const;

  /// Whether the bytes at `offset` of extent `index` begin a part of a tensor whose checksum is
  /// wanted.
  bool Wants(uint32_t index, uint32_t offset) const;

  /// Adds the CRC-32 of a part, computed during the copy; `Take` then skips the part. Either all
  /// wanted parts of an extent are added so, or no part.
  void Add(uint32_t index, uint32_t offset, uint32_t crc);

  /// Returns, after `Add`, the extents that `Take` refused before and that are complete now.
  std::vector<uint32_t> Ready();

  /// Fills the places in `bytes` at `offset` of the extent at `memory` if all their checksums are
  /// known.
  bool Fill(uint32_t index, uint32_t offset, uint32_t bytes, char* memory);

  /// Keeps an extent's running digest for the thread that seals the extent.
  void Keep(uint32_t index, const BegunDigest& begun);
  /// Null: nothing was.
  std::unique_ptr<BegunDigest> TakeBegun(uint32_t index);

  /// Adds the CRCs of extent `index`'s staged bytes once. Returns true when all places of the
  /// extent are filled and the extent can be sealed. Returns false otherwise: the extent will be in
  /// `ready` of a later call for another extent. `ready` receives extents that were refused before
  /// and are complete now.
  bool Take(uint32_t index, char* memory, std::vector<uint32_t>* ready);

 private:
  /// A tensor with a wanted checksum: one part for each chunk of the tensor.
  struct Tensor {
    std::vector<uint32_t> parts;  // CRC-32 of each
    std::vector<uint64_t> bytes;  // and length
    uint32_t missing = 0;
    uint32_t crc = 0;  // of the whole tensor, once complete
  };
  struct Part {
    uint32_t tensor = 0;
    uint32_t part = 0;
    uint32_t offset = 0;  // in the extent
    uint32_t bytes = 0;
  };
  struct Place {
    uint32_t tensor = 0;
    uint32_t byte = 0;    // which of the four bytes
    uint32_t offset = 0;  // in the extent
  };
  struct Extent {
    std::vector<Part> parts;    // ordered by offset
    std::vector<Place> places;  // likewise
    bool waits_for_device = false;
    bool taken = false;
    std::unique_ptr<BegunDigest> begun;
  };

  void AddFile(const PlannedFile& file, uint32_t extent_first);
  const Part* FindPart(uint32_t index, uint32_t offset) const;
  /// The first place at or behind `offset`.
  std::vector<Place>::const_iterator PlaceAt(uint32_t index, uint32_t offset) const;
  void AddLocked(const Part& part, uint32_t crc) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<uint32_t> ReadyLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Returns false if a checksum for a place from `begin` to before `end` is unknown.
  bool Complete(uint32_t index, uint32_t begin, uint32_t end) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool FillLocked(uint32_t index, uint32_t begin, uint32_t end, char* memory) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  base::Mutex mutex_;
  std::vector<Extent> extents_;  // each touched only by the thread that seals it
  std::vector<Tensor> tensors_ ABSL_GUARDED_BY(mutex_);
  std::vector<uint32_t> parked_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace holdfast::writer

#endif  // HOLDFAST_RUNTIME_WRITER_CHECKSUMS_H_
