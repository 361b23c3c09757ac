// A fingerprint of bytes that shares no code with the runtime's digests: the demo's own witness.
#ifndef HOLDFAST_TOOLS_DEMO_FINGERPRINT_H_
#define HOLDFAST_TOOLS_DEMO_FINGERPRINT_H_

#include <cstddef>
#include <cstdint>

namespace holdfast::demo {

/// 64 bits over `bytes` at `data`; any changed bit changes it, short of a 1 in 2^64 accident.
uint64_t Fingerprint(const void* data, size_t bytes);

}  // namespace holdfast::demo

#endif  // HOLDFAST_TOOLS_DEMO_FINGERPRINT_H_
