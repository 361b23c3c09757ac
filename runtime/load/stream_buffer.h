// The bounded memory that everything read streams through: aligned, on huge pages where the kernel
// gives them, gone when the read ends.
#ifndef HOLDFAST_RUNTIME_LOAD_STREAM_BUFFER_H_
#define HOLDFAST_RUNTIME_LOAD_STREAM_BUFFER_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "holdfast/pod.h"

namespace holdfast::load {

/// `slots` areas of one chunk each. Private memory that no child of a fork inherits: an O_DIRECT
/// read into a private page that a concurrent fork has made copy-on-write may land in the child's
/// copy (open(2), NOTES).
class StreamBuffer {
 public:
  /// \error kResourceExhausted when the memory cannot be mapped.
  static absl::StatusOr<StreamBuffer> Create(uint32_t slots);

  StreamBuffer(StreamBuffer&& other) noexcept;
  StreamBuffer& operator=(StreamBuffer&&) = delete;
  ~StreamBuffer();

  char* base() const { return base_; }
  size_t bytes() const { return size_t{slots_} * kChunkBytes; }
  uint32_t slots() const { return slots_; }
  char* slot(uint32_t index) const { return base_ + size_t{index} * kChunkBytes; }

  /// Keeps the memory mapped for good: a transfer into or out of it could not be proven ended, so
  /// that unmapping would let it hit whatever is mapped there next.
  void Abandon() { abandoned_ = true; }
  bool abandoned() const { return abandoned_; }

 private:
  StreamBuffer(void* mapping, size_t mapping_bytes, char* base, uint32_t slots)
      : mapping_(mapping), mapping_bytes_(mapping_bytes), base_(base), slots_(slots) {}
  void* mapping_;
  size_t mapping_bytes_;
  char* base_;
  uint32_t slots_;
  bool abandoned_ = false;
};

/// Slots that fit into `buffer_bytes`, at least 2 (one is read while the other is digested) and at
/// most `needed` (but at least 1).
uint32_t SlotsFor(uint64_t buffer_bytes, uint64_t needed);

}  // namespace holdfast::load

#endif  // HOLDFAST_RUNTIME_LOAD_STREAM_BUFFER_H_
