// Has a bug of each kind that targets look for, each behind a word. The run must find them.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "fuzz/expect.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  const std::string text(reinterpret_cast<const char*>(data), bytes);
  if (text == "address") {
    const auto copy = std::make_unique<char[]>(bytes);
    std::memcpy(copy.get(), data, bytes);
    volatile char behind = copy.get()[bytes];
    (void)behind;
  }
  if (text == "undefined") {
    volatile int shift = 32;
    volatile int shifted = 1 << shift;
    (void)shifted;
  }
  // Letter by letter, as coverage finds a word.
  if (bytes == 4 && data[0] == 'w' && data[1] == 'o' && data[2] == 'r') {
    HOLDFAST_EXPECT(data[3] != 'd');
  }
  return 0;
}
