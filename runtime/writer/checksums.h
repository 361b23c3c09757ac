// The CRC-32s of tensors that a plan has places for: taken from staged bytes, chunk by chunk on the
// sealer's threads or while they are copied, combined, and put into the literals before those are
// digested.
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

/// The digest of an extent that could not be finished while it was copied: a checksum that it has a
/// place for was not known yet. Its tensors' parts have theirs.
struct BegunDigest {
  digest::Stream whole;
  uint32_t bytes = 0;  ///< So much of the extent is in it.
};

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

  /// Whether `bytes` at `offset` of extent `index` have places for checksums.
  bool HasPlaces(uint32_t index, uint32_t offset, uint32_t bytes) const;

  /// Whether the bytes at `offset` of extent `index` begin a part of a tensor whose checksum is
  /// wanted.
  bool Wants(uint32_t index, uint32_t offset) const;

  /// The CRC-32 of that part, taken while it was copied: `Take` leaves it alone then. Either all
  /// wanted parts of an extent are told so, or none.
  void Add(uint32_t index, uint32_t offset, uint32_t crc);

  /// After `Add`: extents that `Take` turned down before and that have everything now.
  std::vector<uint32_t> Ready();

  /// Fills the places in `bytes` at `offset` of the extent at `memory`, if everything for them is
  /// known.
  bool Fill(uint32_t index, uint32_t offset, uint32_t bytes, char* memory);

  /// Keeps what was digested of an extent until it is sealed, for whoever does that.
  void Keep(uint32_t index, const BegunDigest& begun);
  /// Null: nothing was.
  std::unique_ptr<BegunDigest> TakeBegun(uint32_t index);

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
    std::vector<Part> parts;    // by their offsets
    std::vector<Place> places;  // likewise
    bool waits_for_device = false;
    bool taken = false;
    std::unique_ptr<BegunDigest> begun;
  };

  void AddFile(const PlannedFile& file, uint32_t extent_first);
  const Part* FindPart(uint32_t index, uint32_t offset) const;
  /// The first place at `offset` or behind it.
  std::vector<Place>::const_iterator PlaceAt(uint32_t index, uint32_t offset) const;
  void AddLocked(const Part& part, uint32_t crc) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<uint32_t> ReadyLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// False: something is missing for one of those from `begin` to before `end`.
  bool Complete(uint32_t index, uint32_t begin, uint32_t end) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool FillLocked(uint32_t index, uint32_t begin, uint32_t end, char* memory) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  base::Mutex mutex_;
  std::vector<Extent> extents_;  // each touched by who seals it
  std::vector<Tensor> tensors_ ABSL_GUARDED_BY(mutex_);
  std::vector<uint32_t> parked_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace holdfast::writer

#endif  // HOLDFAST_RUNTIME_WRITER_CHECKSUMS_H_
