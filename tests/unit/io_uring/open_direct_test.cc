// OpenDirect on real file systems, and on file systems that misbehave.
#include <sys/stat.h>

#include <cerrno>

#include "tests/testing/small_file_system.h"
#include "tests/unit/io_uring/queue_fixture.h"

namespace holdfast::io {
namespace {

using ::holdfast::testing::SmallFileSystem;

class OpenDirectTest : public ::testing::Test {
 protected:
  int Open(const std::string& path, int flags, DirectOpen* out, bool want_direct = true) {
    return OpenDirect(AT_FDCWD, path.c_str(), flags, 0600, want_direct, out);
  }

  static bool IsDirect(int fd) { return (fcntl(fd, F_GETFL) & O_DIRECT) != 0; }
  static off_t Size(int fd) {
    struct stat status = {};
    return fstat(fd, &status) == 0 ? status.st_size : -1;
  }

  ScratchDirectory scratch_;
};

constexpr int kMake = O_CREAT | O_EXCL | O_WRONLY;
constexpr uint64_t kDiskBytes = 320u << 20;  // mkfs.xfs refuses less than 300 MiB

TEST_F(OpenDirectTest, ProvesDirectIoOnExt4AndXfs) {
  const std::pair<const char*, const char*> kinds[] = {{"mkfs.ext4 -q -F", "ext4"},
                                                       {"mkfs.xfs -q -f", "xfs"}};
  for (const auto& [make, type] : kinds) {
    SCOPED_TRACE(type);
    const auto mounted = SmallFileSystem::Loop(make, type, kDiskBytes);
    if (!mounted.ok()) GTEST_SKIP() << mounted.status();
    const std::string path = (*mounted)->path() + "/a";
    DirectOpen file;
    ASSERT_EQ(Open(path, kMake, &file), 0);
    EXPECT_EQ(file.direct, DirectIo::kProven);
    EXPECT_GT(file.memory_alignment, 0u);
    EXPECT_GT(file.offset_alignment, 0u);
    EXPECT_TRUE(IsDirect(file.fd));
    EXPECT_EQ(Size(file.fd), 0);
    EXPECT_NE(fcntl(file.fd, F_GETFD) & FD_CLOEXEC, 0);
    sys::CloseOwned(file.fd);
    ASSERT_EQ(Open(path, O_RDONLY, &file), 0);
    EXPECT_EQ(file.direct, DirectIo::kProven);
    sys::CloseOwned(file.fd);
  }
}

TEST_F(OpenDirectTest, ClaimsOnlyOnBtrfs) {
  const auto mounted = SmallFileSystem::Loop("mkfs.btrfs -q -f", "btrfs", kDiskBytes);
  if (!mounted.ok()) GTEST_SKIP() << mounted.status();
  DirectOpen file;
  ASSERT_EQ(Open((*mounted)->path() + "/a", kMake, &file), 0);
  EXPECT_NE(file.direct, DirectIo::kProven);
  EXPECT_EQ(file.memory_alignment, 0u);
  EXPECT_EQ(Size(file.fd), 0) << "the probe must leave nothing";
  sys::CloseOwned(file.fd);
}

TEST_F(OpenDirectTest, ProvesNothingOnTmpfs) {
  const auto mounted = SmallFileSystem::Tmpfs(8u << 20);
  if (!mounted.ok()) GTEST_SKIP() << mounted.status();
  DirectOpen file;
  ASSERT_EQ(Open((*mounted)->path() + "/a", kMake, &file), 0);
  EXPECT_NE(file.direct, DirectIo::kProven);
  EXPECT_EQ(Size(file.fd), 0) << "the probe must leave nothing";
  sys::CloseOwned(file.fd);
}

TEST_F(OpenDirectTest, IsBufferedIfNotAskedForMore) {
  const std::string path = scratch_.File("a");
  DirectOpen file;
  ASSERT_EQ(Open(path, kMake, &file, /*want_direct=*/false), 0);
  EXPECT_EQ(file.direct, DirectIo::kNo);
  EXPECT_FALSE(IsDirect(file.fd));
  sys::CloseOwned(file.fd);
}

TEST_F(OpenDirectTest, ReportsTheErrorsOfOpen) {
  DirectOpen file;
  EXPECT_EQ(Open(scratch_.path() + "/absent", O_RDONLY, &file), ENOENT);
  EXPECT_EQ(file.fd, -1);
  EXPECT_EQ(Open(scratch_.path() + "/absent", O_RDONLY, &file, false), ENOENT);
  const std::string path = scratch_.File("a");
  ASSERT_EQ(Open(path, kMake, &file), 0);
  sys::CloseOwned(file.fd);
  EXPECT_EQ(Open(path, kMake, &file), EEXIST);
  EXPECT_EQ(Open(path, kMake, &file, false), EEXIST);
}

TEST_F(OpenDirectTest, DoesNotProbeAFileThatHasBytes) {
  const std::string path = scratch_.File("a");
  DirectOpen file;
  ASSERT_EQ(Open(path, kMake, &file, false), 0);
  ASSERT_EQ(write(file.fd, "precious", 8), 8);
  sys::CloseOwned(file.fd);
  Planted planted;
  planted->pwrite = [](int, const void*, size_t, off_t) -> ssize_t {
    ADD_FAILURE() << "probed";
    return 0;
  };
  ASSERT_EQ(Open(path, O_WRONLY, &file), 0);
  EXPECT_NE(file.direct, DirectIo::kProven);
  sys::CloseOwned(file.fd);
  EXPECT_EQ(Contents(path), "precious");
}

// A file system without O_DIRECT: the kernel makes the file and then refuses.
int RefusesDirect(int directory, const char* path, int flags, mode_t mode) {
  if ((flags & O_DIRECT) == 0) return openat(directory, path, flags, mode);
  const int fd = openat(directory, path, flags & ~O_DIRECT, mode);
  if (fd < 0) return fd;
  close(fd);
  errno = EINVAL;
  return -1;
}

TEST_F(OpenDirectTest, FallsBackToBufferedWhereDirectIoIsRefused) {
  const std::string path = scratch_.File("a");
  Planted planted;
  planted->openat = RefusesDirect;
  DirectOpen file;
  ASSERT_EQ(Open(path, kMake, &file), 0);
  EXPECT_EQ(file.direct, DirectIo::kNo);
  EXPECT_EQ(write(file.fd, "x", 1), 1);
  sys::CloseOwned(file.fd);
  EXPECT_EQ(Open(path, kMake, &file), EEXIST);
}

TEST_F(OpenDirectTest, DoesNotTakeOverAFileThatIsNotItsOwn) {
  const std::string path = scratch_.File("a");
  Planted planted;
  planted->openat = [](int directory, const char* name, int flags, mode_t mode) {
    if ((flags & O_DIRECT) != 0) {  // another process made the file first
      const int other = openat(directory, name, O_CREAT | O_WRONLY, mode);
      EXPECT_EQ(write(other, "other", 5), 5);
      close(other);
      errno = EINVAL;
      return -1;
    }
    return openat(directory, name, flags, mode);
  };
  DirectOpen file;
  EXPECT_EQ(Open(path, kMake, &file), EEXIST);
  EXPECT_EQ(file.fd, -1);
  EXPECT_EQ(Contents(path), "other");
}

// Results of statx in the tests below.
uint32_t told_memory = 0;
uint32_t told_offset = 0;
int TellAlignment(int, const char*, int, unsigned, struct statx* out) {
  out->stx_mask = STATX_DIOALIGN;
  out->stx_dio_mem_align = told_memory;
  out->stx_dio_offset_align = told_offset;
  return 0;
}

TEST_F(OpenDirectTest, IsBufferedWhereTheAlignmentIsMoreThanOurs) {
  Planted planted;
  planted->statx = TellAlignment;
  for (const auto& [memory, offset] :
       std::initializer_list<std::pair<uint32_t, uint32_t>>{{512, 65536}, {8192, 512}, {0, 0}}) {
    told_memory = memory;
    told_offset = offset;
    const std::string path = scratch_.File("a" + std::to_string(memory));
    DirectOpen file;
    ASSERT_EQ(Open(path, kMake, &file), 0);
    EXPECT_EQ(file.direct, DirectIo::kNo);
    EXPECT_EQ(file.offset_alignment, offset);
    EXPECT_FALSE(IsDirect(file.fd));
    sys::CloseOwned(file.fd);
  }
}

TEST_F(OpenDirectTest, DoesNotBelieveAnAlignmentThatIsNotEnforced) {
  told_memory = told_offset = 512;
  Planted planted;
  planted->statx = TellAlignment;
  planted->pwrite = [](int fd, const void*, size_t bytes, off_t offset) -> ssize_t {
    EXPECT_EQ(ftruncate(fd, offset + static_cast<off_t>(bytes)), 0);
    return static_cast<ssize_t>(bytes);
  };
  const std::string path = scratch_.File("a");
  DirectOpen file;
  ASSERT_EQ(Open(path, kMake, &file), 0);
  EXPECT_EQ(file.direct, DirectIo::kClaimed);
  EXPECT_EQ(Size(file.fd), 0);
  sys::CloseOwned(file.fd);
}

TEST_F(OpenDirectTest, ClaimsWhereStatxDoesNotSay) {
  Planted planted;
  planted->statx = [](int, const char*, int, unsigned, struct statx*) {
    errno = ENOSYS;
    return -1;
  };
  const std::string path = scratch_.File("a");
  DirectOpen file;
  ASSERT_EQ(Open(path, kMake, &file), 0);
  EXPECT_EQ(file.direct, DirectIo::kClaimed);
  sys::CloseOwned(file.fd);
  ASSERT_EQ(Open(path, O_RDONLY, &file), 0);
  EXPECT_EQ(file.direct, DirectIo::kClaimed);
  sys::CloseOwned(file.fd);
}

TEST_F(OpenDirectTest, FailsIfTheProbeCannotBeUndone) {
  Planted planted;
  planted->pwrite = [](int, const void*, size_t bytes, off_t) {
    return static_cast<ssize_t>(bytes);
  };
  planted->ftruncate = [](int, off_t) {
    errno = EIO;
    return -1;
  };
  const std::string path = scratch_.File("a");
  DirectOpen file;
  EXPECT_EQ(Open(path, kMake, &file), EIO);
  EXPECT_EQ(file.fd, -1);
}

TEST_F(OpenDirectTest, LeavesAFailingProbeToTheRealWrites) {
  Planted planted;
  planted->pwrite = [](int, const void*, size_t, off_t) -> ssize_t {
    errno = ENOSPC;
    return -1;
  };
  const std::string path = scratch_.File("a");
  DirectOpen file;
  ASSERT_EQ(Open(path, kMake, &file), 0);
  EXPECT_NE(file.direct, DirectIo::kProven);
  sys::CloseOwned(file.fd);
}

TEST_F(OpenDirectTest, OutlastsInterruptions) {
  static int interruptions = 0;
  interruptions = 5;
  Planted planted;
  planted->openat = [](int directory, const char* path, int flags, mode_t mode) {
    if (interruptions-- > 0) {
      errno = EINTR;
      return -1;
    }
    return openat(directory, path, flags, mode);
  };
  const std::string path = scratch_.File("a");
  DirectOpen file;
  ASSERT_EQ(Open(path, kMake, &file), 0);
  sys::CloseOwned(file.fd);
}

}  // namespace
}  // namespace holdfast::io
