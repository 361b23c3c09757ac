// Pseudo-random bytes, fast enough for tens of MiB under a sanitizer.
#ifndef HOLDFAST_TESTS_TESTING_RANDOM_BYTES_H_
#define HOLDFAST_TESTS_TESTING_RANDOM_BYTES_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace holdfast::testing {

/// splitmix64: a bijection with unrelated values for neighbours.
inline uint64_t Mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

/// Every seed gives other bytes, and every 8 bytes differ from every other 8.
inline void FillRandom(char* out, size_t bytes, uint64_t seed) {
  const uint64_t begin = Mix(seed);
  uint64_t word = 0;
  size_t at = 0;
  // Whole words separately: the compiler turns a copy of constant length into a store.
  for (; at + sizeof(word) <= bytes; at += sizeof(word)) {
    word = Mix(begin + at);
    std::memcpy(out + at, &word, sizeof(word));
  }
  word = Mix(begin + at);
  if (at < bytes) std::memcpy(out + at, &word, bytes - at);
}

inline std::string RandomBytes(size_t bytes, uint64_t seed) {
  std::string out(bytes, '\0');
  FillRandom(out.data(), bytes, seed);
  return out;
}

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_TESTING_RANDOM_BYTES_H_
