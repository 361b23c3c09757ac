// A bound of the time that an input may take, linear in its length.
#ifndef HOLDFAST_FUZZ_TIME_BOUND_H_
#define HOLDFAST_FUZZ_TIME_BOUND_H_

#include <time.h>

#include <cstdint>
#include <cstdio>

#include "fuzz/expect.h"

namespace holdfast::fuzz {

inline uint64_t ThreadNs() {
  timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

#if defined(__SANITIZE_ADDRESS__)
inline constexpr uint64_t kFixedNs = 1'000'000'000;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
inline constexpr uint64_t kFixedNs = 1'000'000'000;
#else
inline constexpr uint64_t kFixedNs = 100'000'000;
#endif
#else
inline constexpr uint64_t kFixedNs = 100'000'000;
#endif

/// Runs `work`, which is repeatable, on an input of `bytes`. Fails if it takes more CPU time than
/// kFixedNs and 1 us for each byte, three times one after the other. The walk over archives may do
/// the work of 64 KiB for a shorter file. Quadratic work on 32 KiB takes seconds.
template <typename Work>
void ExpectLinearTime(uint64_t bytes, Work work) {
  constexpr uint64_t kNsPerByte = 1000;
  constexpr int kTries = 3;
  const uint64_t bound = kFixedNs + kNsPerByte * bytes;
  uint64_t took = 0;
  for (int i = 0; i < kTries; ++i) {
    const uint64_t begin = ThreadNs();
    work();
    took = ThreadNs() - begin;
    if (took <= bound) return;
  }
  std::fprintf(stderr, "%llu ns for %llu bytes\n", static_cast<unsigned long long>(took),
               static_cast<unsigned long long>(bytes));
  HOLDFAST_EXPECT(took <= bound);
}

}  // namespace holdfast::fuzz

#endif  // HOLDFAST_FUZZ_TIME_BOUND_H_
