// The fixed table of transfers in flight, and its description.
#include "io_uring/slots.h"

#include "runtime/sys/assert.h"
#include "runtime/sys/system.h"

namespace holdfast::io {

void Slots::Reset(uint32_t depth) {
  HOLDFAST_ASSERT(depth >= 1 && depth <= kDepthMax);
  for (bool& busy : busy_) busy = false;
  depth_ = depth;
  in_flight_ = 0;
}

uint32_t Slots::Take(const Request& request) {
  HOLDFAST_ASSERT(!full());
  uint32_t index = 0;
  while (busy_[index]) ++index;
  HOLDFAST_ASSERT(index < depth_);
  transfers_[index] = Transfer{.request = request, .started_ns = sys::NowNs()};
  busy_[index] = true;
  ++in_flight_;
  return index;
}

void Slots::Release(uint32_t index) {
  HOLDFAST_ASSERT(busy(index));
  HOLDFAST_ASSERT(in_flight_ > 0);
  busy_[index] = false;
  --in_flight_;
}

void Slots::Describe(Text* text) const {
  text->Add(in_flight_).Add(" of ").Add(depth_).Add(" in flight");
  const Transfer* oldest = nullptr;
  for (uint32_t i = 0; i < depth_; ++i) {
    if (!busy_[i]) continue;
    if (oldest == nullptr || transfers_[i].started_ns < oldest->started_ns) oldest = &transfers_[i];
  }
  if (oldest == nullptr) return;
  const Request& request = oldest->request;
  text->Add(", oldest: ")
      .Add(request.opcode == Opcode::kWrite ? "write" : "read")
      .Add(" fd ")
      .Add(static_cast<uint64_t>(request.fd))
      .Add(" @ ")
      .Add(request.offset)
      .Add(" + ")
      .Add(request.bytes)
      .Add(" for ")
      .Add((sys::NowNs() - oldest->started_ns) / 1'000'000)
      .Add(" ms");
}

}  // namespace holdfast::io
