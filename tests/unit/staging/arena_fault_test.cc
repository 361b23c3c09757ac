// Every system call of the arena fails in turn: the rung below takes over, or the error is clear.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/base/status.h"
#include "runtime/staging/arena.h"
#include "tests/unit/staging/scoped_system.h"

namespace holdfast::staging {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kBytes = 96 * kMiB;  // three slices of pre-faulting

std::atomic<int> g_calls{0};
std::atomic<int> g_fail_at{0};
int g_errno = 0;

int Fail(int error) {
  errno = error;
  return -1;
}

int NoHugetlb(const char* name, unsigned flags) {
  return (flags & MFD_HUGETLB) != 0 ? Fail(ENODEV) : sys::kKernel.memfd_create(name, flags);
}
int NoMemfd(const char*, unsigned) { return Fail(g_errno); }
int OldMemfd(const char* name, unsigned flags) {
  constexpr unsigned kKnown = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  if ((flags & ~kKnown) != 0) return Fail(EINVAL);
  return sys::kKernel.memfd_create(name, flags);
}
int NoFsOpen(const char*, unsigned) { return Fail(EPERM); }
int NoFsConfig(int, unsigned, const char*, const void*, int) { return Fail(EINVAL); }
int NoFsMount(int, unsigned, unsigned) { return Fail(EPERM); }
int NoTmpFile(int directory, const char* path, int flags, mode_t mode) {
  if ((flags & O_TMPFILE) == O_TMPFILE) return Fail(EOPNOTSUPP);
  return sys::kKernel.openat(directory, path, flags, mode);
}
int NoTruncate(int, off_t) { return Fail(EINVAL); }
int NoStat(int, struct stat*) { return Fail(EIO); }
int NoSeal(int fd, int command, long argument) {
  return command == F_ADD_SEALS ? Fail(EPERM) : sys::kKernel.fcntl(fd, command, argument);
}
/// Places a mapping of the caller's choice one page behind a huge page's border.
void* Misplace(size_t bytes, int protection, int flags, int fd, off_t offset) {
  constexpr size_t kHuge = 2 * kMiB;
  void* const range =
      sys::kKernel.mmap(nullptr, bytes + 2 * kHuge, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  sys::kKernel.munmap(range, bytes + 2 * kHuge);
  const uintptr_t border = (reinterpret_cast<uintptr_t>(range) + kHuge - 1) / kHuge * kHuge;
  return sys::kKernel.mmap(reinterpret_cast<void*>(border + 4096), bytes, protection, flags, fd,
                           offset);
}
/// As older kernels, which know no alignment of files.
void* UnalignedWithoutHint(void* address, size_t bytes, int protection, int flags, int fd,
                           off_t offset) {
  if (fd >= 0 && address == nullptr) return Misplace(bytes, protection, flags, fd, offset);
  return sys::kKernel.mmap(address, bytes, protection, flags, fd, offset);
}
/// Other threads take each range of a hint first.
void* Unaligned(void*, size_t bytes, int protection, int flags, int fd, off_t offset) {
  if (fd >= 0) return Misplace(bytes, protection, flags, fd, offset);
  return sys::kKernel.mmap(nullptr, bytes, protection, flags, fd, offset);
}
void* NoRange(void* address, size_t bytes, int protection, int flags, int fd, off_t offset) {
  if (protection != PROT_NONE)
    return UnalignedWithoutHint(address, bytes, protection, flags, fd, offset);
  errno = ENOMEM;
  return MAP_FAILED;
}
void* g_of_other_thread = nullptr;
/// The kernel takes the range of a MAP_FIXED away before it finds no huge page for the new mapping.
/// Another thread's mapping comes there in the meantime.
void* FailsWhileAnotherThreadMaps(void* address, size_t bytes, int protection, int flags, int fd,
                                  off_t offset) {
  if (fd < 0) return sys::kKernel.mmap(address, bytes, protection, flags, fd, offset);
  if ((flags & MAP_FIXED) != 0) sys::kKernel.munmap(address, bytes);
  g_of_other_thread =
      sys::kKernel.mmap(address, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  errno = ENOMEM;
  return MAP_FAILED;
}
void* NoMapping(void* address, size_t bytes, int protection, int flags, int fd, off_t offset) {
  if (fd < 0) return sys::kKernel.mmap(address, bytes, protection, flags, fd, offset);
  errno = ENOMEM;
  return MAP_FAILED;
}
template <int kAdvice>
int NoAdvice(void* address, size_t bytes, int advice) {
  return advice == kAdvice ? Fail(EINVAL) : sys::kKernel.madvise(address, bytes, advice);
}
// The Nth page allocation fails.
int FailingPopulate(void* address, size_t bytes, int advice) {
  if (advice == MADV_POPULATE_WRITE && ++g_calls == g_fail_at) return Fail(g_errno);
  return sys::kKernel.madvise(address, bytes, advice);
}
int FailingFallocate(int fd, int mode, off_t offset, off_t bytes) {
  if (++g_calls == g_fail_at) return Fail(g_errno);
  return sys::kKernel.fallocate(fd, mode, offset, bytes);
}
int SmallFileLimit(int resource, struct rlimit* out) {
  if (resource != RLIMIT_FSIZE) return sys::kKernel.getrlimit(resource, out);
  *out = {.rlim_cur = kMiB, .rlim_max = RLIM_INFINITY};
  return 0;
}
int NoLimitKnown(int, struct rlimit*) { return Fail(EPERM); }
int NoReadableFile(int, const char*, int, mode_t) { return Fail(ENOENT); }

class ArenaFaultTest : public ::testing::Test {
 protected:
  ArenaFaultTest() {
    g_calls = 0;
    g_fail_at = 0;
    g_errno = 0;
  }

  static absl::StatusOr<std::unique_ptr<Arena>> Make(PageRung rung) {
    return Arena::Create({.bytes = kBytes, .pages = rung, .threads = 2});
  }
  // On small pages, available on every machine.
  static absl::Status MakeSmall() { return Make(PageRung::kSmall).status(); }

  // kAuto takes a rung below `failed` and gives the reason.
  static void ExpectNextRung(const char* failed, const char* why) {
    const auto arena = Make(PageRung::kAuto);
    ASSERT_TRUE(arena.ok()) << arena.status();
    EXPECT_THAT((*arena)->reason(), HasSubstr(std::string(failed) + ": ")) << (*arena)->reason();
    EXPECT_THAT((*arena)->reason(), HasSubstr(why));
    std::fill_n((*arena)->base(), kBytes, 'x');
  }

  ScopedSystem system_;
};

TEST_F(ArenaFaultTest, GoesOnWithoutHugetlb) {
  system_->memfd_create = NoHugetlb;
  ExpectNextRung("memfd hugetlb", "No such device");
}

TEST_F(ArenaFaultTest, GoesOnWithoutTheRightToMakeATmpfs) {
  system_->fsopen = NoFsOpen;
  ExpectNextRung("tmpfs huge=always", "fsopen tmpfs: Operation not permitted");
}

TEST_F(ArenaFaultTest, GoesOnWhenTmpfsDoesNotKnowHugePages) {
  system_->fsconfig = NoFsConfig;
  ExpectNextRung("tmpfs huge=always", "fsconfig huge");
}

TEST_F(ArenaFaultTest, GoesOnWithoutMount) {
  if (geteuid() != 0) GTEST_SKIP() << "needs CAP_SYS_ADMIN to get that far";
  system_->fsmount = NoFsMount;
  ExpectNextRung("tmpfs huge=always", "fsmount");
}

TEST_F(ArenaFaultTest, GoesOnWithoutUnnamedFiles) {
  if (geteuid() != 0) GTEST_SKIP() << "needs CAP_SYS_ADMIN to get that far";
  system_->openat = NoTmpFile;
  ExpectNextRung("tmpfs huge=always", "O_TMPFILE");
}

TEST_F(ArenaFaultTest, GoesOnToSmallPagesWhereHugeOnesAreUnknown) {
  system_->memfd_create = NoHugetlb;
  system_->fsopen = NoFsOpen;
  system_->madvise = NoAdvice<MADV_HUGEPAGE>;
  ExpectNextRung("memfd madvise", "madvise HUGEPAGE");
  const auto arena = Make(PageRung::kAuto);
  EXPECT_EQ((*arena)->pages(), PageRung::kSmall);
}

TEST_F(ArenaFaultTest, DoesNotClaimHugePagesThatItDidNotGet) {
  // A file of the kernel whose first touch allocates 4 KiB.
  system_->fsconfig = [](int fd, unsigned command, const char* key, const void* value,
                         int auxiliary) {
    const bool huge = key != nullptr && std::string(key) == "huge";
    return sys::kKernel.fsconfig(fd, command, key, huge ? "never" : value, auxiliary);
  };
  const auto arena = Make(PageRung::kTmpfsHuge);
  ASSERT_FALSE(arena.ok());
  if (base::ErrnoOf(arena.status()) == EPERM) GTEST_SKIP() << arena.status();
  EXPECT_THAT(arena.status().message(), HasSubstr("the first page came small"));
  ExpectNextRung("tmpfs huge=always", "the first page came small");
}

TEST_F(ArenaFaultTest, GivesARungOrAnErrorWhenOneIsAskedFor) {
  system_->fsopen = NoFsOpen;
  const auto arena = Make(PageRung::kTmpfsHuge);
  EXPECT_EQ(arena.status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(arena.status().message(), HasSubstr("create staging arena on tmpfs huge=always"));
}

TEST_F(ArenaFaultTest, WorksWhereTheSealAgainstExecutionIsUnknown) {
  system_->memfd_create = OldMemfd;
  EXPECT_TRUE(MakeSmall().ok());
}

TEST_F(ArenaFaultTest, ReportsEveryCallThatSmallPagesNeed) {
  system_->memfd_create = NoMemfd;
  for (const int error : {EMFILE, ENOSYS, EPERM}) {
    g_errno = error;
    EXPECT_EQ(base::ErrnoOf(MakeSmall()), error);
  }
  system_->memfd_create = sys::kKernel.memfd_create;

  system_->ftruncate = NoTruncate;
  EXPECT_THAT(MakeSmall().message(), HasSubstr("ftruncate staging arena: Invalid argument"));
  system_->ftruncate = sys::kKernel.ftruncate;

  system_->fcntl = NoSeal;
  EXPECT_THAT(MakeSmall().message(), HasSubstr("seal staging arena"));
  system_->fcntl = sys::kKernel.fcntl;

  system_->mmap = NoMapping;
  EXPECT_EQ(MakeSmall().code(), absl::StatusCode::kResourceExhausted);
  system_->mmap = sys::kKernel.mmap;

  // Without these calls the arena would leak into foreign children or core dumps: Create fails.
  system_->madvise = NoAdvice<MADV_DONTFORK>;
  EXPECT_THAT(MakeSmall().message(), HasSubstr("DONTFORK"));
  system_->madvise = NoAdvice<MADV_DONTDUMP>;
  EXPECT_THAT(MakeSmall().message(), HasSubstr("DONTDUMP"));
  system_->madvise = sys::kKernel.madvise;

  system_->getrlimit = NoLimitKnown;
  EXPECT_THAT(MakeSmall().message(), HasSubstr("RLIMIT_FSIZE"));
}

TEST_F(ArenaFaultTest, HasHugePagesWhereTheKernelDoesNotAlign) {
  for (const PageRung rung : {PageRung::kTmpfsHuge, PageRung::kMadviseHuge}) {
    if (!Make(rung).ok()) continue;
    system_->mmap = UnalignedWithoutHint;
    const auto arena = Make(rung);
    ASSERT_TRUE(arena.ok()) << arena.status();
    EXPECT_EQ(reinterpret_cast<uintptr_t>((*arena)->base()) % (2 * kMiB), 0u);
    system_->mmap = NoRange;
    EXPECT_EQ(Make(rung).status().code(), absl::StatusCode::kResourceExhausted);
    system_->mmap = sys::kKernel.mmap;
  }
}

TEST_F(ArenaFaultTest, GoesOnWhereNoAlignedAddressCanBeHad) {
  system_->mmap = Unaligned;
  const auto arena = Make(PageRung::kAuto);
  ASSERT_TRUE(arena.ok()) << arena.status();
  std::fill_n((*arena)->base(), kBytes, 'x');
}

TEST_F(ArenaFaultTest, TakesNoMappingOfAnotherThreadAway) {
  system_->mmap = FailsWhileAnotherThreadMaps;
  EXPECT_EQ(MakeSmall().code(), absl::StatusCode::kResourceExhausted);
  ASSERT_NE(g_of_other_thread, MAP_FAILED);
  EXPECT_EQ(msync(g_of_other_thread, 4096, MS_ASYNC), 0) << "it is gone";
  munmap(g_of_other_thread, 4096);
}

TEST_F(ArenaFaultTest, DoesNotRunIntoTheSignalOfTheFileSizeLimit) {
  system_->getrlimit = SmallFileLimit;
  const absl::Status status = MakeSmall();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("ulimit -f"));
}

TEST_F(ArenaFaultTest, ReportsThatPagesRanOut) {
  system_->madvise = FailingPopulate;
  for (const int error : {ENOMEM, EFAULT, EHWPOISON}) {
    g_errno = error;
    for (g_fail_at = 1; g_fail_at <= 3; ++g_fail_at) {
      g_calls = 0;
      const absl::Status status = MakeSmall();
      EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
      EXPECT_EQ(base::ErrnoOf(status), error);
      EXPECT_THAT(status.message(), HasSubstr("provide pages"));
    }
  }
}

TEST_F(ArenaFaultTest, TriesAgainWhenInterrupted) {
  system_->madvise = FailingPopulate;
  for (const int error : {EINTR, EAGAIN}) {
    g_errno = error;
    g_calls = 0;
    g_fail_at = 2;
    EXPECT_TRUE(MakeSmall().ok());
    EXPECT_EQ(g_calls, 4);
  }
}

TEST_F(ArenaFaultTest, TakesPagesTheOldWayOnOldKernels) {
  system_->madvise = NoAdvice<MADV_POPULATE_WRITE>;
  const auto arena = Make(PageRung::kSmall);
  ASSERT_TRUE(arena.ok()) << arena.status();
  struct stat info = {};
  ASSERT_EQ(fstat((*arena)->fd(), &info), 0);
  EXPECT_EQ(static_cast<uint64_t>(info.st_blocks) * 512, kBytes);
  // Populating must not change bytes that a registrant wrote meanwhile.
  ASSERT_TRUE((*arena)->Punch().ok());
  (*arena)->base()[5 * 4096] = 'x';
  ASSERT_TRUE((*arena)->Populate().ok());
  EXPECT_EQ((*arena)->base()[5 * 4096], 'x');
}

TEST_F(ArenaFaultTest, ReportsThatPagesRanOutOnOldKernels) {
  system_->madvise = NoAdvice<MADV_POPULATE_WRITE>;
  system_->fallocate = FailingFallocate;
  g_errno = ENOSPC;
  g_fail_at = 2;
  const absl::Status status = MakeSmall();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(base::ErrnoOf(status), ENOSPC);
}

TEST_F(ArenaFaultTest, ReturnsItsPagesWhenPopulatingAgainFails) {
  const auto arena = Make(PageRung::kSmall);
  ASSERT_TRUE(arena.ok()) << arena.status();
  ASSERT_TRUE((*arena)->Punch().ok());
  system_->madvise = FailingPopulate;
  g_errno = ENOMEM;
  g_fail_at = 3;
  const absl::Status status = (*arena)->Populate();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("take staging memory again"));
  EXPECT_FALSE((*arena)->resident());
  struct stat info = {};
  ASSERT_EQ(fstat((*arena)->fd(), &info), 0);
  EXPECT_EQ(info.st_blocks, 0) << "half an arena was kept";
  g_fail_at = 0;
  EXPECT_TRUE((*arena)->Populate().ok());
}

TEST_F(ArenaFaultTest, StaysResidentWhenPunchingFails) {
  const auto arena = Make(PageRung::kSmall);
  ASSERT_TRUE(arena.ok()) << arena.status();
  system_->fallocate = FailingFallocate;
  g_errno = EOPNOTSUPP;
  g_fail_at = 1;
  EXPECT_EQ(base::ErrnoOf((*arena)->Punch()), EOPNOTSUPP);
  EXPECT_TRUE((*arena)->resident());
}

TEST_F(ArenaFaultTest, FailsClearlyWhenHugePagesCannotBeProven) {
  system_->fstat = NoStat;
  const auto arena = Make(PageRung::kTmpfsHuge);
  ASSERT_FALSE(arena.ok());
  if (base::ErrnoOf(arena.status()) == EPERM) GTEST_SKIP() << arena.status();
  EXPECT_EQ(base::ErrnoOf(arena.status()), EIO);
  ExpectNextRung("tmpfs huge=always", "fstat staging arena");
}

TEST_F(ArenaFaultTest, WorksWhereProcIsNotMounted) {
  system_->openat = NoReadableFile;
  EXPECT_TRUE(MakeSmall().ok());
}

int LittleMemory(int directory, const char* path, int flags, mode_t mode) {
  // a file without MemAvailable
  if (std::string(path) == "/proc/meminfo") path = "/proc/self/stat";
  if (std::string(path) == "/proc/self/cgroup") {
    const int fd = sys::kKernel.memfd_create("cgroup", MFD_CLOEXEC);
    EXPECT_EQ(pwrite(fd, "0::/\n", 5, 0), 5);
    return fd;
  }
  if (std::string(path) == "/sys/fs/cgroup/memory.max" ||
      std::string(path) == "/sys/fs/cgroup/memory.current") {
    const std::string text = std::string(path).ends_with("max") ? "150000000\n" : "1000\n";
    const int fd = sys::kKernel.memfd_create("limit", MFD_CLOEXEC);
    EXPECT_EQ(pwrite(fd, text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
    return fd;
  }
  return sys::kKernel.openat(directory, path, flags, mode);
}

TEST_F(ArenaFaultTest, StopsBeforeTheControlGroupsKiller) {
  const auto before = Make(PageRung::kSmall);
  ASSERT_TRUE(before.ok()) << before.status();
  ASSERT_TRUE((*before)->Punch().ok());
  system_->openat = LittleMemory;
  const absl::Status status = MakeSmall();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(status.message(), HasSubstr("/sys/fs/cgroup/memory.max"));
  EXPECT_EQ((*before)->Populate().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE((*before)->resident());
}

}  // namespace
}  // namespace holdfast::staging
