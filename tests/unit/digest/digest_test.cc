// Digests of spans, chunks and parts, compared with libxxhash's plain entry points.
#include "runtime/digest/digest.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/testing/random_bytes.h"

namespace holdfast::digest {
namespace {

Digest Plain(const void* data, size_t bytes) {
  const XXH128_hash_t hash = XXH3_128bits(data, bytes);
  return {.low = hash.low64, .high = hash.high64};
}

std::vector<size_t> Lengths() {
  std::vector<size_t> lengths;
  for (size_t i = 0; i <= 600; ++i) lengths.push_back(i);  // every short code path of XXH3
  for (const size_t around : {1024u, 4096u, 16384u, 65536u, 1u << 20, kChunkBytes}) {
    for (const int delta : {-65, -64, -1, 0, 1, 63, 64, 65}) lengths.push_back(around + delta);
  }
  return lengths;
}

TEST(Digest, IsPlainXxh3AtEveryLengthAndAlignment) {
  const std::string bytes = testing::RandomBytes(kChunkBytes + 256, 1);
  for (const size_t length : Lengths()) {
    for (const size_t offset : {0, 1, 7, 63}) {
      ASSERT_EQ(Of(&bytes[offset], length), Plain(&bytes[offset], length))
          << length << " bytes at " << offset;
    }
  }
}

TEST(Digest, StreamIsIndependentOfHowTheBytesAreCut) {
  const std::string bytes = testing::RandomBytes(300000, 2);
  std::mt19937 random(3);
  for (int round = 0; round < 100; ++round) {
    Stream stream;
    size_t at = 0;
    while (at < bytes.size()) {
      const size_t cut = std::min<size_t>(random() % 20000, bytes.size() - at);
      stream.Update(&bytes[at], cut);
      at += cut;
    }
    ASSERT_EQ(stream.Finish(), Plain(bytes.data(), bytes.size())) << "round " << round;
  }
}

TEST(Digest, StreamMayBeFinishedInBetweenCopiedAndReset) {
  const std::string bytes = testing::RandomBytes(10000, 4);
  Stream stream;
  stream.Update(bytes.data(), 5000);
  EXPECT_EQ(stream.Finish(), Plain(bytes.data(), 5000));
  Stream copy = stream;
  stream.Update(&bytes[5000], 5000);
  EXPECT_EQ(stream.Finish(), Plain(bytes.data(), 10000));
  EXPECT_EQ(copy.Finish(), Plain(bytes.data(), 5000));
  stream.Reset();
  EXPECT_EQ(stream.Finish(), Plain(bytes.data(), 0));
  stream.Update(nullptr, 0);
  EXPECT_EQ(stream.Finish(), Plain(bytes.data(), 0));
}

TEST(DigestOfChunk, WithoutPartsIsTheDigestOfTheChunk) {
  const std::string bytes = testing::RandomBytes(kChunkBytes, 5);
  EXPECT_EQ(OfChunk(bytes.data(), bytes.size(), nullptr, 0), Plain(bytes.data(), bytes.size()));
  EXPECT_EQ(OfChunk(bytes.data(), 0, nullptr, 0), Plain(bytes.data(), 0));
}

TEST(DigestOfChunk, GivesAPartOfTheWholeChunkTheSameDigest) {
  const std::string bytes = testing::RandomBytes(kChunkBytes, 6);
  Digest part;
  const Part parts[] = {{.offset = 0, .bytes = kChunkBytes, .out = &part}};
  const Digest whole = OfChunk(bytes.data(), bytes.size(), parts, 1);
  EXPECT_EQ(whole, Plain(bytes.data(), bytes.size()));
  EXPECT_EQ(part, whole);
}

TEST(DigestOfChunk, DigestsRandomPartsInOnePass) {
  const std::string bytes = testing::RandomBytes(kChunkBytes, 7);
  for (uint64_t seed = 0; seed < 60; ++seed) {
    std::mt19937_64 random(seed);
    const size_t chunk = random() % 3 == 0 ? kChunkBytes : random() % 200000;
    const size_t part_max = size_t{1} << (random() % 21);
    std::vector<Part> parts;
    std::vector<Digest> out(20000);
    size_t at = 0;
    while (at < chunk && parts.size() < out.size()) {
      if (random() % 3 == 0) at += random() % (part_max + 1);  // a gap: padding
      if (at > chunk) break;
      const size_t length = std::min<size_t>(random() % (part_max + 1), chunk - at);
      const bool wanted = random() % 5 != 0;
      parts.push_back({.offset = static_cast<uint32_t>(at),
                       .bytes = static_cast<uint32_t>(length),
                       .out = wanted ? &out[parts.size()] : nullptr});
      at += length;
    }
    ASSERT_EQ(OfChunk(bytes.data(), chunk, parts.data(), parts.size()), Plain(bytes.data(), chunk));
    for (size_t i = 0; i < parts.size(); ++i) {
      if (parts[i].out == nullptr) {
        ASSERT_EQ(out[i], Digest{}) << "seed " << seed << ": an unwanted part was written";
      } else {
        ASSERT_EQ(out[i], Plain(&bytes[parts[i].offset], parts[i].bytes))
            << "seed " << seed << " part " << i << " at " << parts[i].offset;
      }
    }
  }
}

TEST(DigestOfChunk, DigestsEmptyPartsAtEitherEnd) {
  const std::string bytes = testing::RandomBytes(50000, 8);
  Digest first, middle, last;
  const Part parts[] = {{.offset = 0, .bytes = 0, .out = &first},
                        {.offset = 16384, .bytes = 20000, .out = &middle},
                        {.offset = 50000, .bytes = 0, .out = &last}};
  OfChunk(bytes.data(), bytes.size(), parts, 3);
  EXPECT_EQ(first, Plain(bytes.data(), 0));
  EXPECT_EQ(middle, Plain(&bytes[16384], 20000));
  EXPECT_EQ(last, Plain(bytes.data(), 0));
}

TEST(DigestHex, SpellsTheHighHalfFirst) {
  char text[33] = {};
  ToHex(Digest{.low = 0x0123456789abcdef, .high = 0xfedcba9876543210}, text);
  EXPECT_STREQ(text, "fedcba98765432100123456789abcdef");
  ToHex(AttemptId{.high = 0xfedcba9876543210, .low = 0x0123456789abcdef}, text);
  EXPECT_STREQ(text, "fedcba98765432100123456789abcdef");
}

TEST(DigestHex, IsXxhashsCanonicalForm) {
  const XXH128_hash_t hash = XXH3_128bits("holdfast", 8);
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  std::string expected;
  for (const unsigned char byte : canonical.digest) {
    expected += "0123456789abcdef"[byte >> 4];
    expected += "0123456789abcdef"[byte & 15];
  }
  std::string text(32, ' ');
  ToHex(Of("holdfast", 8), text.data());
  EXPECT_EQ(text, expected);
}

TEST(DigestHex, ReadsItsOwnOutput) {
  std::mt19937_64 random(9);
  for (int i = 0; i < 100; ++i) {
    const Digest digest{.low = random(), .high = random()};
    const AttemptId id{.high = random(), .low = random()};
    char text[32];
    Digest digest_read;
    AttemptId id_read;
    ToHex(digest, text);
    ASSERT_TRUE(FromHex(text, &digest_read));
    EXPECT_EQ(digest_read, digest);
    ToHex(id, text);
    ASSERT_TRUE(FromHex(text, &id_read));
    EXPECT_EQ(id_read, id);
  }
}

TEST(DigestHex, RefusesAnythingElse) {
  const std::string good = "fedcba98765432100123456789abcdef";
  for (size_t i = 0; i < good.size(); ++i) {
    for (const char c : {'g', 'A', 'F', ' ', '\0', '-', '/', ':', '`', '\x7f', '\xff'}) {
      std::string bad = good;
      bad[i] = c;
      Digest digest{.low = 1, .high = 2};
      ASSERT_FALSE(FromHex(bad.c_str(), &digest)) << "char " << int{c} << " at " << i;
      ASSERT_EQ(digest, (Digest{.low = 1, .high = 2})) << "written although refused";
    }
  }
}

TEST(DigestVectorUnit, IsOneOfThoseThatReportsKnow) {
  const std::string unit = VectorUnit();
  EXPECT_TRUE(unit == "avx512" || unit == "avx2" || unit == "sse2" || unit == "neon" ||
              unit == "scalar")
      << unit;
}

}  // namespace
}  // namespace holdfast::digest
