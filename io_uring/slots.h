// The fixed table of transfers in flight.
#ifndef HOLDFAST_IO_URING_SLOTS_H_
#define HOLDFAST_IO_URING_SLOTS_H_

#include <cstdint>

#include "io_uring/text.h"
#include "io_uring/transfer.h"
#include "runtime/sys/assert.h"

namespace holdfast::io {

class Slots {
 public:
  /// Empties the table and sets its size. `depth` is at most kDepthMax.
  void Reset(uint32_t depth);

  bool full() const { return in_flight_ >= depth_; }
  uint32_t in_flight() const { return in_flight_; }
  uint32_t depth() const { return depth_; }
  bool busy(uint32_t index) const { return index < depth_ && busy_[index]; }
  Transfer& at(uint32_t index) {
    HOLDFAST_ASSERT(index < depth_);
    return transfers_[index];
  }

  /// Puts the request in a free slot and returns its index; the table must not be full.
  uint32_t Take(const Request& request);
  void Release(uint32_t index);

  /// Describes transfers in flight: number, the oldest one and its age.
  void Describe(Text* text) const;

 private:
  Transfer transfers_[kDepthMax];
  bool busy_[kDepthMax] = {};
  uint32_t depth_ = 0;
  uint32_t in_flight_ = 0;
};

}  // namespace holdfast::io

#endif  // HOLDFAST_IO_URING_SLOTS_H_
