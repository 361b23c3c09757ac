// The probe finds what it is shown, and leaves nothing behind.
#include "holdfast/probe.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>

#include "holdfast/recovery.h"
#include "runtime/directory/entries.h"
#include "runtime/doctor/directory_probe.h"
#include "runtime/sys/system.h"
#include "tests/testing/small_checkpoint.h"

namespace holdfast {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using testing::TemporaryDirectory;

class ProbeTest : public ::testing::Test {
 protected:
  void TearDown() override {
    sys::g_system = sys::kKernel;
    EXPECT_TRUE(std::filesystem::is_empty(directory_.path())) << "something was left behind";
  }
  ProbeReport Probed(absl::Duration speed_probe = absl::ZeroDuration()) {
    auto report = Probe(directory_.path(), {.speed_probe = speed_probe});
    EXPECT_TRUE(report.ok()) << report.status();
    return report.ok() ? *std::move(report) : ProbeReport{};
  }
  TemporaryDirectory directory_;
};

TEST_F(ProbeTest, FindsAnEngineAnArenaAndWhatTheDirectoryCanDo) {
  const ProbeReport report = Probed();
  EXPECT_EQ(report.directory, directory_.path());
  EXPECT_FALSE(report.file_system.empty());
  EXPECT_NE(report.engine, EngineRung::kAuto);
  EXPECT_FALSE(report.engine_reason.empty());
  EXPECT_NE(report.pages, PageRung::kAuto);
  EXPECT_GE(report.page_bytes, report.base_page_bytes);
  EXPECT_GT(report.free_bytes, 0u);
  EXPECT_FALSE(report.digest_unit.empty());
  EXPECT_EQ(report.write_bytes_per_second, 0);
}

TEST_F(ProbeTest, FindsLocksAndRenamesOnFileSystemsThatHaveThem) {
  const ProbeReport report = Probed();
  if (report.file_system != "ext4" && report.file_system != "xfs" &&
      report.file_system != "tmpfs" && report.file_system != "btrfs") {
    GTEST_SKIP() << "what " << report.file_system << " can do is not known here";
  }
  EXPECT_TRUE(report.lock);
  EXPECT_TRUE(report.reserve);
  EXPECT_TRUE(report.rename_noreplace);
  EXPECT_TRUE(report.rename_exchange);
}

TEST_F(ProbeTest, MeasuresSpeeds) {
  const ProbeReport report = Probed(absl::Milliseconds(60));
  EXPECT_GT(report.write_bytes_per_second, 0);
  EXPECT_GT(report.digest_bytes_per_second, 0);
  EXPECT_GT(report.copy_bytes_per_second, 0);
}

TEST_F(ProbeTest, NeedsADirectory) {
  EXPECT_TRUE(absl::IsNotFound(Probe(directory_ / "missing", {}).status()));
}

TEST_F(ProbeTest, SaysWhyADirectoryCannotBeWrittenTo) {
  sys::g_system.mkdirat = [](int, const char*, mode_t) {
    errno = EROFS;
    return -1;
  };
  const absl::Status status = Probe(directory_.path(), {}).status();
  EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("Read-only"));
}

TEST_F(ProbeTest, ReportsAnErrorOfTheDisk) {
  sys::g_system.fsync = [](int) {
    errno = EIO;
    return -1;
  };
  EXPECT_TRUE(absl::IsDataLoss(Probe(directory_.path(), {}).status()));
}

TEST_F(ProbeTest, SeesAFileSystemWithoutRenameFlags) {
  sys::g_system.renameat2 = [](int a, const char* b, int c, const char* d, unsigned flags) {
    if (flags != 0) {
      errno = EINVAL;
      return -1;
    }
    return sys::kKernel.renameat2(a, b, c, d, flags);
  };
  const ProbeReport report = Probed();
  EXPECT_FALSE(report.rename_noreplace);
  EXPECT_FALSE(report.rename_exchange);
  EXPECT_THAT(report.advice, Contains(HasSubstr("exchanged")));
}

TEST_F(ProbeTest, SeesAFileSystemThatReplacesWhenToldNotTo) {
  sys::g_system.renameat2 = [](int a, const char* b, int c, const char* d, unsigned flags) {
    return sys::kKernel.renameat2(a, b, c, d, flags & ~1u);
  };
  EXPECT_FALSE(Probed().rename_noreplace);
}

TEST_F(ProbeTest, SeesAFileSystemWithoutReservation) {
  sys::g_system.fallocate = [](int, int, off_t, off_t) {
    errno = EOPNOTSUPP;
    return -1;
  };
  EXPECT_FALSE(Probed().reserve);
}

TEST_F(ProbeTest, SeesAFileSystemWithoutLocks) {
  sys::g_system.flock = [](int, int) {
    errno = EOPNOTSUPP;
    return -1;
  };
  const ProbeReport report = Probed();
  EXPECT_FALSE(report.lock);
  EXPECT_THAT(report.advice, Contains(HasSubstr("24 hours")));
}

TEST_F(ProbeTest, SeesLocksThatExcludeNobody) {
  sys::g_system.flock = [](int, int) { return 0; };
  EXPECT_FALSE(Probed().lock);
}

TEST_F(ProbeTest, SeesARefusalOfDirectIo) {
  sys::g_system.openat = [](int directory, const char* path, int flags, mode_t mode) {
    if ((flags & O_DIRECT) != 0) {
      errno = EINVAL;
      return -1;
    }
    return sys::kKernel.openat(directory, path, flags, mode);
  };
  const ProbeReport report = Probed();
  EXPECT_EQ(report.direct_io, DirectIo::kNo);
  EXPECT_THAT(report.advice, Contains(HasSubstr("page cache")));
}

TEST_F(ProbeTest, SeesThatIoUringIsForbidden) {
  sys::g_system.uring_queue_init_params = [](unsigned, struct io_uring*, struct io_uring_params*) {
    return -EPERM;
  };
  const ProbeReport report = Probed(absl::Milliseconds(30));
  EXPECT_EQ(report.engine, EngineRung::kPwrite);
  EXPECT_THAT(report.advice, Contains(HasSubstr("seccomp")));
  EXPECT_GT(report.write_bytes_per_second, 0);
}

TEST_F(ProbeTest, SeesThatNoArenaCanBeMade) {
  sys::g_system.mmap = [](void*, size_t, int, int, int, off_t) -> void* {
    errno = ENOMEM;
    return reinterpret_cast<void*>(-1);
  };
  const ProbeReport report = Probed(absl::Milliseconds(30));
  EXPECT_EQ(report.pages, PageRung::kAuto);
  EXPECT_THAT(report.advice, Contains(HasSubstr("arena cannot be made")));
}

TEST_F(ProbeTest, KnowsANetworkFileSystem) {
  sys::g_system.fstatfs = [](int fd, struct statfs* out) {
    const int result = sys::kKernel.fstatfs(fd, out);
    out->f_type = 0x6969;
    return result;
  };
  const ProbeReport report = Probed();
  EXPECT_EQ(report.file_system, "nfs");
  EXPECT_THAT(report.advice, Contains(HasSubstr("other machines")));
}

TEST_F(ProbeTest, SeesTheWorkerProgram) {
  const ProbeReport report = Probed();
  if (!report.worker_program_found) {
    EXPECT_THAT(report.advice, Contains(HasSubstr("holdfast-worker")));
  } else {
    EXPECT_THAT(report.worker_program, HasSubstr("holdfast-worker"));
  }
}

TEST_F(ProbeTest, WhatAKilledProbeLeavesIsRemovedByTheNextRecoveryAndNotBefore) {
  {
    auto parent = directory::OpenDirectory(AT_FDCWD, directory_.path());
    const auto alive = doctor::ScratchDirectory::Make(parent->get());
    ASSERT_TRUE(alive.ok()) << alive.status();
    const auto report = Recover(directory_.path(), {});
    ASSERT_TRUE(report.ok());
    EXPECT_THAT(report->removed, SizeIs(0));
  }
  const pid_t child = fork();
  if (child == 0) {
    auto parent = directory::OpenDirectory(AT_FDCWD, directory_.path());
    const auto killed = doctor::ScratchDirectory::Make(parent->get());
    _exit(0);
  }
  waitpid(child, nullptr, 0);
  EXPECT_FALSE(std::filesystem::is_empty(directory_.path()));
  const auto report = Recover(directory_.path(), {});
  ASSERT_TRUE(report.ok());
  EXPECT_THAT(report->removed, SizeIs(1));
}

}  // namespace
}  // namespace holdfast
