// A target's planted bug, by which a test proves that the target can fail.
#ifndef HOLDFAST_FUZZ_PLANTED_H_
#define HOLDFAST_FUZZ_PLANTED_H_

#include <cstdlib>

namespace holdfast::fuzz {

/// Returns true when the environment asks for the planted bug.
inline bool Planted() {
  static const bool planted = std::getenv("HOLDFAST_FUZZ_PLANTED") != nullptr;
  return planted;
}

}  // namespace holdfast::fuzz

#endif  // HOLDFAST_FUZZ_PLANTED_H_
