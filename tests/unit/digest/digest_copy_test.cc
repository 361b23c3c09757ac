// CopyAndDigest: the same bytes as memcpy, the same digests as a separate pass.
#include <cstring>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/digest/digest.h"
#include "tests/testing/random_bytes.h"

namespace holdfast::digest {
namespace {

constexpr char kUntouched = '\x5a';
constexpr size_t kMargin = 128;

class CopyAndDigestTest : public ::testing::Test {
 protected:
  // Copies, then checks bytes, margins and digests.
  void Check(size_t from, size_t to, size_t bytes) {
    SCOPED_TRACE(::testing::Message() << bytes << " bytes from " << from << " to " << to);
    std::fill(destination_.begin(), destination_.end(), kUntouched);
    Stream whole, part;
    char* at = &destination_[kMargin + to];
    CopyAndDigest(at, &source_[from], bytes, &whole, &part);
    ASSERT_EQ(std::memcmp(at, &source_[from], bytes), 0);
    for (size_t i = 0; i < kMargin; ++i) {
      ASSERT_EQ(at[-1 - static_cast<ptrdiff_t>(i)], kUntouched) << "wrote before the destination";
      ASSERT_EQ(at[bytes + i], kUntouched) << "wrote behind the destination";
    }
    const Digest expected = Of(&source_[from], bytes);
    ASSERT_EQ(whole.Finish(), expected);
    ASSERT_EQ(part.Finish(), expected);
  }

  std::string source_ = testing::RandomBytes((size_t{1} << 20) + 4096, 1);
  std::vector<char> destination_ = std::vector<char>(source_.size() + 4 * kMargin);
};

TEST_F(CopyAndDigestTest, CopiesEveryLengthAndAlignment) {
  for (const size_t bytes :
       {0, 1, 63, 64, 65, 4095, 4096, 4097, 16383, 16384, 16385, 20000, 65536, 65537, 1 << 20}) {
    for (const size_t from : {0, 1, 8, 63}) {
      for (const size_t to : {0, 1, 16, 63}) Check(from, to, static_cast<size_t>(bytes));
    }
  }
}

TEST_F(CopyAndDigestTest, CopiesRandomRuns) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 300; ++i) {
    Check(random() % 4096, random() % 64, random() % (i % 10 == 0 ? 1000000 : 40000));
  }
}

TEST_F(CopyAndDigestTest, FeedsOnlyTheStreamsThatAreGiven) {
  constexpr size_t kBytes = 100000;
  const Digest expected = Of(source_.data(), kBytes);
  Stream whole, part;
  CopyAndDigest(destination_.data(), source_.data(), kBytes, &whole, nullptr);
  EXPECT_EQ(whole.Finish(), expected);
  CopyAndDigest(destination_.data(), source_.data(), kBytes, nullptr, &part);
  EXPECT_EQ(part.Finish(), expected);
  std::fill(destination_.begin(), destination_.end(), kUntouched);
  CopyAndDigest(destination_.data(), source_.data(), kBytes, nullptr, nullptr);
  EXPECT_EQ(std::memcmp(destination_.data(), source_.data(), kBytes), 0);
  CopyAndDigest(nullptr, nullptr, 0, &whole, &part);
  EXPECT_EQ(whole.Finish(), expected) << "an empty copy must change nothing";
}

TEST_F(CopyAndDigestTest, AddsUpToAChunkOfSeveralTensors) {
  Stream whole;
  size_t at = 0;
  for (const size_t bytes : {100u, 70001u, 4096u, 300000u}) {
    Stream part;
    CopyAndDigest(&destination_[at], &source_[at], bytes, &whole, &part);
    EXPECT_EQ(part.Finish(), Of(&source_[at], bytes));
    at += bytes;
  }
  EXPECT_EQ(whole.Finish(), Of(source_.data(), at));
}

}  // namespace
}  // namespace holdfast::digest
