// The root of a file: the documented bytes, and every bound field matters.
#include <string>

#include "gtest/gtest.h"
#include "runtime/digest/digest.h"

namespace holdfast::digest {
namespace {

const RootInput kInput = {.attempt = {.high = 0x0102030405060708, .low = 0x1112131415161718},
                          .rank = 3,
                          .world_size = 8,
                          .file = 2,
                          .file_bytes = 0x123456789a};
const Digest kFirst = {.low = 0x2122232425262728, .high = 0x3132333435363738};
const Digest kSecond = {.low = 5, .high = 6};

Digest RootOf(const RootInput& input) {
  RootStream stream(input);
  stream.Add(kFirst);
  stream.Add(kSecond);
  return stream.Finish();
}

TEST(DigestRoot, IsTheDigestOfTheDocumentedBytes) {
  using namespace std::string_literals;
  const std::string bytes =
      "holdfast-root-v1"s
      "\x08\x07\x06\x05\x04\x03\x02\x01\x18\x17\x16\x15\x14\x13\x12\x11"s
      "\x03\0\0\0\x08\0\0\0\x02\0\0\0\0\0\x40\0"s
      "\x9a\x78\x56\x34\x12\0\0\0"s
      "\x31\x32\x33\x34\x35\x36\x37\x38\x21\x22\x23\x24\x25\x26\x27\x28"s
      "\0\0\0\0\0\0\0\x06\0\0\0\0\0\0\0\x05"s;
  ASSERT_EQ(bytes.size(), 56u + 32u);
  EXPECT_EQ(RootOf(kInput), Of(bytes.data(), bytes.size()));
}

TEST(DigestRoot, ChangesWithEveryBoundField) {
  const Digest root = RootOf(kInput);
  EXPECT_EQ(RootOf(kInput), root);
  RootInput changed = kInput;
  changed.attempt.high ^= 1;
  EXPECT_NE(RootOf(changed), root);
  changed = kInput;
  changed.attempt.low ^= 1;
  EXPECT_NE(RootOf(changed), root);
  changed = kInput;
  changed.rank ^= 1;
  EXPECT_NE(RootOf(changed), root);
  changed = kInput;
  changed.world_size ^= 1;
  EXPECT_NE(RootOf(changed), root);
  changed = kInput;
  changed.file ^= 1;
  EXPECT_NE(RootOf(changed), root);
  changed = kInput;
  changed.file_bytes ^= 1;
  EXPECT_NE(RootOf(changed), root);
}

TEST(DigestRoot, ChangesWithTheChunksTheirOrderAndTheirCount) {
  const Digest root = RootOf(kInput);
  RootStream swapped(kInput);
  swapped.Add(kSecond);
  swapped.Add(kFirst);
  EXPECT_NE(swapped.Finish(), root);
  RootStream longer(kInput);
  longer.Add(kFirst);
  longer.Add(kSecond);
  longer.Add(kSecond);
  EXPECT_NE(longer.Finish(), root);
  RootStream shorter(kInput);
  shorter.Add(kFirst);
  EXPECT_NE(shorter.Finish(), root);
  RootStream other(kInput);
  other.Add({.low = kFirst.high, .high = kFirst.low});
  other.Add(kSecond);
  EXPECT_NE(other.Finish(), root);
}

}  // namespace
}  // namespace holdfast::digest
