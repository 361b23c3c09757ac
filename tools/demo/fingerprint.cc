#include "tools/demo/fingerprint.h"

#include <bit>
#include <cstring>

namespace holdfast::demo {
namespace {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87ull;
constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4Full;
constexpr size_t kLanes = 4;

/// Each step is a bijection of the lane, so no change of one word can vanish in its own lane.
inline uint64_t Mix(uint64_t lane, uint64_t word) {
  return std::rotl((lane ^ word) * kPrime1, 31) + kPrime2;
}

}  // namespace

uint64_t Fingerprint(const void* data, size_t bytes) {
  const char* at = static_cast<const char*>(data);
  uint64_t lanes[kLanes] = {1, 2, 3, 4};
  size_t left = bytes;
  for (; left >= sizeof(lanes); left -= sizeof(lanes), at += sizeof(lanes)) {
    uint64_t words[kLanes];
    std::memcpy(words, at, sizeof(words));
    for (size_t i = 0; i < kLanes; ++i) lanes[i] = Mix(lanes[i], words[i]);
  }
  uint64_t sum = Mix(kPrime2, bytes);
  for (const uint64_t lane : lanes) sum = Mix(sum, lane);
  for (; left > 0; --left, ++at) sum = Mix(sum, static_cast<unsigned char>(*at));
  return sum ^ (sum >> 29);
}

}  // namespace holdfast::demo
