// Where archives lie is found with work that the file's size bounds, whatever the file says.
#include "runtime/verify/zip_archives.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fcntl.h>

#include <algorithm>
#include <atomic>

#include "runtime/base/unique_fd.h"
#include "runtime/sys/system.h"
#include "tests/testing/checkpoint_files.h"
#include "tests/testing/random_bytes.h"
#include "tests/testing/training_state.h"
#include "tests/testing/zip_files.h"

namespace holdfast::verify {
namespace {

using testing::RandomBytes;
using testing::ScratchDirectory;
using testing::WriteFileBytes;
using testing::ZipArchive;

constexpr uint64_t kMiB = uint64_t{1} << 20;

std::atomic<uint64_t> g_bytes_read;
std::atomic<uint64_t> g_reads;
std::atomic<uint64_t> g_bytes_max;  // of a read

ssize_t CountingPread(int fd, void* buffer, size_t bytes, off_t offset) {
  const ssize_t got = sys::kKernel.pread(fd, buffer, bytes, offset);
  if (got > 0) g_bytes_read += static_cast<uint64_t>(got);
  ++g_reads;
  g_bytes_max = std::max<uint64_t>(g_bytes_max, bytes);
  return got;
}

class ZipArchiveWalk : public ::testing::Test {
 protected:
  void SetUp() override {
    g_bytes_read = g_reads = g_bytes_max = 0;
    sys::g_system.pread = CountingPread;
  }
  void TearDown() override { sys::g_system = sys::kKernel; }

  ZipArchives Found(const std::string& bytes) {
    const std::string path = scratch_.path() + "/x.distcp";
    WriteFileBytes(path, bytes);
    const base::UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    auto found = FindZipArchives(file.get(), "x.distcp", bytes.size());
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? *std::move(found) : ZipArchives{};
  }

  void ExpectLinear(const std::string& bytes) {
    EXPECT_LE(g_bytes_read, 4 * bytes.size() + 2 * kMiB);
    EXPECT_LE(g_reads, bytes.size() / 16 + 20'000);
  }

  ScratchDirectory scratch_;
};

void Put(uint64_t value, size_t width, std::string* out) {
  for (; width-- > 0; value >>= 8) out->push_back(static_cast<char>(value));
}

/// An end record that stands at byte `at` and says that the directory lies from `begin` to it.
std::string EndRecord(uint64_t begin, uint64_t at, uint16_t comment_bytes = 0) {
  std::string out = "PK\x05\x06";
  Put(0, 4, &out);
  Put(1, 2, &out);
  Put(1, 2, &out);
  Put(at - begin, 4, &out);
  Put(begin, 4, &out);
  Put(comment_bytes, 2, &out);
  return out;
}

std::string WithEndRecords(std::string bytes, uint64_t begin, int count,
                           uint16_t comment_bytes = 0) {
  for (int i = 0; i < count; ++i) bytes += EndRecord(begin, bytes.size(), comment_bytes);
  return bytes;
}

TEST_F(ZipArchiveWalk, EndRecordsWithoutADirectoryCostNothing) {
  const std::string file = WithEndRecords(std::string(32 * kMiB, '\0'), 0, 20'000);
  const ZipArchives found = Found(file);
  EXPECT_EQ(found.archives, 0u);
  ASSERT_EQ(found.gaps.size(), 1u);
  EXPECT_EQ(found.gaps[0].end, file.size());
  ExpectLinear(file);
}

TEST_F(ZipArchiveWalk, EndRecordsOfOneDirectoryAreGivenUp) {
  // The bytes they lead to begin as a directory does.
  const std::string file = WithEndRecords("PK\x01\x02" + std::string(32 * kMiB, '\0'), 0, 20'000);
  const ZipArchives found = Found(file);
  EXPECT_EQ(found.archives, 0u);
  ASSERT_EQ(found.gaps.size(), 1u);
  EXPECT_EQ(found.gaps[0].begin, 0u);
  EXPECT_EQ(found.gaps[0].why.code(), absl::StatusCode::kResourceExhausted);
  ExpectLinear(file);
}

TEST_F(ZipArchiveWalk, ADirectoryOfAnyLengthIsNotReadIntoMemory) {
  const std::string path = scratch_.path() + "/sparse.distcp";
  constexpr uint64_t kBytes = 1088 * kMiB;
  const base::UniqueFd file(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  const std::string end = EndRecord(0, kBytes);
  ASSERT_EQ(pwrite(file.get(), "PK\x01\x02", 4, 0), 4);
  ASSERT_EQ(pwrite(file.get(), end.data(), end.size(), off_t{kBytes}), ssize_t{22});
  const auto found = FindZipArchives(file.get(), "sparse.distcp", kBytes + end.size());
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->archives, 0u);
  ASSERT_EQ(found->gaps.size(), 1u);
  EXPECT_LE(g_bytes_max, 64 * kMiB);
}

TEST_F(ZipArchiveWalk, LongCommentsAreNotSearchedAgainAndAgain) {
  const std::string file =
      WithEndRecords(std::string(4 * kMiB, '\0'), 0, 40'000, 0xfff0) + std::string(kMiB, '\0');
  EXPECT_EQ(Found(file).archives, 0u);
  ExpectLinear(file);
}

TEST_F(ZipArchiveWalk, SmallArchivesBetweenItemsAreAllFound) {
  std::string file;
  const std::string archive = ZipArchive({{"a", RandomBytes(50, 1)}, {"b", "x"}}, {});
  for (int i = 0; i < 20'000; ++i) file += archive + std::string(static_cast<size_t>(i % 3), 'r');
  const ZipArchives found = Found(file);
  EXPECT_EQ(found.archives, 20'000u);
  EXPECT_EQ(found.records.size(), 40'000u);
  EXPECT_EQ(found.gaps.size(), 13'333u);
  ExpectLinear(file);
}

TEST_F(ZipArchiveWalk, LargeArchivesAreFoundWithoutTheirData) {
  std::string file;
  for (uint64_t i = 0; i < 5; ++i) file += ZipArchive({{"a", RandomBytes(3 * kMiB, i)}}, {});
  EXPECT_EQ(Found(file).archives, 5u);
  EXPECT_LE(g_bytes_read, file.size() / 10);
}

}  // namespace
}  // namespace holdfast::verify
