// The text form of digests and attempt ids: 32 lower-case hex digits, high half first.
#include "runtime/digest/digest.h"

namespace holdfast::digest {
namespace {

constexpr size_t kDigits = 16;  // per 64-bit half

void HalfToHex(uint64_t value, char* out) {
  for (size_t i = 0; i < kDigits; ++i) {
    out[i] = "0123456789abcdef"[(value >> (60 - 4 * i)) & 15];
  }
}

bool HalfFromHex(const char* text, uint64_t* out) {
  uint64_t value = 0;
  for (size_t i = 0; i < kDigits; ++i) {
    const char c = text[i];
    // Upper case is refused: a digest has one spelling, so that manifests can be compared as text.
    if (c >= '0' && c <= '9') {
      value = value << 4 | static_cast<uint64_t>(c - '0');
    } else if (c >= 'a' && c <= 'f') {
      value = value << 4 | static_cast<uint64_t>(c - 'a' + 10);
    } else {
      return false;
    }
  }
  *out = value;
  return true;
}

template <typename Words>
bool WordsFromHex(const char* text, Words* out) {
  Words words;
  if (!HalfFromHex(text, &words.high) || !HalfFromHex(text + kDigits, &words.low)) return false;
  *out = words;
  return true;
}

}  // namespace

void ToHex(const Digest& digest, char* out) {
  HalfToHex(digest.high, out);
  HalfToHex(digest.low, out + kDigits);
}

void ToHex(const AttemptId& id, char* out) {
  HalfToHex(id.high, out);
  HalfToHex(id.low, out + kDigits);
}

bool FromHex(const char* text, Digest* out) { return WordsFromHex(text, out); }
bool FromHex(const char* text, AttemptId* out) { return WordsFromHex(text, out); }

}  // namespace holdfast::digest
