// The bounded memory for streaming reads: aligned, on huge pages if available, unmapped after the
// read.
#ifndef HOLDFAST_RUNTIME_LOAD_STREAM_BUFFER_H_
#define HOLDFAST_RUNTIME_LOAD_STREAM_BUFFER_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "holdfast/pod.h"

namespace holdfast::load {

/// `slots` areas of one chunk each, in private memory that a child of a fork does not inherit. An
/// O_DIRECT read into a private page that a concurrent fork has made copy-on-write may land in the
/// child's copy (open(2), NOTES).
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

  /// Keeps the memory mapped for good, after a transfer without a proven end. Such a transfer could
  /// otherwise hit the next mapping of the address.
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

/// Returns the number of slots that fit into `buffer_bytes`. At least 2: one is read during the
/// digest of the other. At most `needed`, but at least 1.
uint32_t SlotsFor(uint64_t buffer_bytes, uint64_t needed);

}  // namespace holdfast::load

#endif  // HOLDFAST_RUNTIME_LOAD_STREAM_BUFFER_H_
