// Reading of small text files of the kernel, and of the fields in them.
#include "runtime/sys/text_file.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <string>

#include "runtime/sys/system.h"
#include "tests/testing/small_checkpoint.h"

namespace holdfast::sys {
namespace {

constexpr char kText[] =
    "MemTotal:       2048 kB\n"
    "inactive_file 4096\n"
    "Umask:\t0027\n"
    "Mem: none\n"
    "Last: 7 kB";

class TextFile : public ::testing::Test {
 protected:
  void SetUp() override { std::ofstream(path_) << kText; }
  void TearDown() override { g_system = kKernel; }

  testing::TemporaryDirectory directory_;
  const std::string path_ = directory_ / "meminfo";
  char out_[sizeof(kText)] = {};
};

TEST_F(TextFile, IsReadWhole) {
  EXPECT_EQ(ReadTextFile(path_.c_str(), out_, sizeof(out_)), ssize_t{sizeof(kText) - 1});
  EXPECT_STREQ(out_, kText);
}

TEST_F(TextFile, IsReadAcrossShortReads) {
  g_system.read = [](int fd, void* to, size_t) { return kKernel.read(fd, to, 1); };
  EXPECT_EQ(ReadTextFile(path_.c_str(), out_, sizeof(out_)), ssize_t{sizeof(kText) - 1});
  EXPECT_STREQ(out_, kText);
}

TEST_F(TextFile, IsCutAndTerminated) {
  char cut[9];
  EXPECT_EQ(ReadTextFile(path_.c_str(), cut, sizeof(cut)), 8);
  EXPECT_STREQ(cut, "MemTotal");
}

TEST_F(TextFile, FailsWithErrno) {
  EXPECT_EQ(ReadTextFile((path_ + ".no").c_str(), out_, sizeof(out_)), -1);
  EXPECT_EQ(errno, ENOENT);
  g_system.read = [](int, void*, size_t) {
    errno = EIO;
    return ssize_t{-1};
  };
  EXPECT_EQ(ReadTextFile(path_.c_str(), out_, sizeof(out_)), -1);
  EXPECT_EQ(errno, EIO);
}

TEST_F(TextFile, HasFields) {
  EXPECT_EQ(FindBytes(kText, "MemTotal"), 2048u * 1024);
  EXPECT_EQ(FindBytes(kText, "inactive_file"), 4096u);
  EXPECT_EQ(FindBytes(kText, "Last"), 7u * 1024);
  EXPECT_EQ(FindBytes(kText, "Mem", 3), 3u);       // no number
  EXPECT_EQ(FindBytes(kText, "inactive", 3), 3u);  // the begin of a key
  EXPECT_EQ(FindBytes("", "Mem", 3), 3u);
  ASSERT_NE(FindField(kText, "Umask"), nullptr);
  EXPECT_EQ(std::strtoul(FindField(kText, "Umask"), nullptr, 8), 027u);
}

}  // namespace
}  // namespace holdfast::sys
