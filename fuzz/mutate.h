// Random changes of an input, for runs without libFuzzer.
#ifndef HOLDFAST_FUZZ_MUTATE_H_
#define HOLDFAST_FUZZ_MUTATE_H_

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <random>
#include <string>

namespace holdfast::fuzz {

class Mutator {
 public:
  explicit Mutator(uint32_t seed) : random_(seed) {}

  size_t Below(size_t bound) { return random_() % bound; }

  /// Makes one to four changes: bits, bytes, numbers, cuts, doublings, swaps.
  std::string Change(std::string text) {
    for (size_t i = 1 + Below(4); i-- > 0 && !text.empty();) {
      const size_t at = Below(text.size());
      const size_t length = 1 + Below(std::min<size_t>(text.size() - at, 40));
      switch (Below(7)) {
        case 0:
          text[at] = static_cast<char>(text[at] ^ (1 << Below(8)));
          break;
        case 1:
          text[at] = static_cast<char>(Below(256));
          break;
        case 2:
          text.erase(at, length);
          break;
        case 3:
          text.insert(at, text.substr(Below(text.size()), length));
          break;
        case 4: {
          static const char* const kTokens[] = {"18446744073709551615",
                                                "-1",
                                                "0",
                                                "\"",
                                                "{",
                                                "}",
                                                "[",
                                                "]",
                                                ",",
                                                "\\u0000",
                                                "null",
                                                "1e9",
                                                "\xff\xff\xff\xff",
                                                "../",
                                                "9223372036854775807"};
          text.insert(at, kTokens[Below(std::size(kTokens))]);
          break;
        }
        case 5:
          text.resize(at);
          break;
        default:
          std::swap(text[at], text[Below(text.size())]);
      }
    }
    return text;
  }

  /// Returns any bytes.
  std::string Bytes(size_t bytes) {
    std::string text(bytes, '\0');
    for (char& byte : text) byte = static_cast<char>(random_());
    return text;
  }

 private:
  std::mt19937 random_;
};

}  // namespace holdfast::fuzz

#endif  // HOLDFAST_FUZZ_MUTATE_H_
