// The arena on every rung of this machine: pages, visibility, and return of the pages.
#include "runtime/staging/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace holdfast::staging {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kBytes = 32 * kMiB;

// Returns the lines of /proc/self/smaps for the mapping at `base`; empty without a mapping.
std::string Smaps(const void* base) {
  std::ostringstream start;
  start << std::hex << reinterpret_cast<uintptr_t>(base) << "-";
  std::ifstream in("/proc/self/smaps");
  std::string line, text;
  bool inside = false;
  while (std::getline(in, line)) {
    const bool header = line.find('-') != std::string::npos && line.find("VmFlags") != 0 &&
                        std::isxdigit(static_cast<unsigned char>(line[0])) != 0 &&
                        line.find(':') > line.find(' ');
    if (header) inside = line.rfind(start.str(), 0) == 0;
    if (inside) text += line + "\n";
  }
  return text;
}

uint64_t SmapsBytes(const std::string& smaps, const std::string& key) {
  const size_t at = smaps.find("\n" + key + ":");
  return at == std::string::npos ? 0 : std::stoull(smaps.substr(at + key.size() + 2)) * 1024;
}

uint64_t BytesInFile(const Arena& arena) {
  struct stat info = {};
  EXPECT_EQ(fstat(arena.fd(), &info), 0);
  // hugetlbfs counts pages in the inode too.
  return static_cast<uint64_t>(info.st_blocks) * 512;
}

class ArenaTest : public ::testing::TestWithParam<PageRung> {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<Arena>> arena =
        Arena::Create({.bytes = kBytes, .pages = GetParam(), .threads = 3});
    if (!arena.ok() && GetParam() != PageRung::kSmall && GetParam() != PageRung::kAuto)
      GTEST_SKIP() << "this machine cannot: " << arena.status();
    ASSERT_TRUE(arena.ok()) << arena.status();
    arena_ = *std::move(arena);
  }

  std::unique_ptr<Arena> arena_;
};

INSTANTIATE_TEST_SUITE_P(Rungs, ArenaTest,
                         ::testing::Values(PageRung::kAuto, PageRung::kHugetlb,
                                           PageRung::kTmpfsHuge, PageRung::kMadviseHuge,
                                           PageRung::kSmall),
                         [](const auto& rung) {
                           return std::string(std::array{"Auto", "Hugetlb", "TmpfsHuge",
                                                         "MadviseHuge",
                                                         "Small"}[static_cast<int>(rung.param)]);
                         });

TEST_P(ArenaTest, IsThereZeroedAndWritable) {
  EXPECT_GE(arena_->bytes(), kBytes);
  EXPECT_EQ(arena_->bytes() % arena_->page_bytes(), 0u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(arena_->base()) % arena_->page_bytes(), 0u);
  EXPECT_TRUE(arena_->resident());
  EXPECT_GE(BytesInFile(*arena_), arena_->bytes());
  EXPECT_TRUE(
      std::all_of(arena_->base(), arena_->base() + arena_->bytes(), [](char c) { return c == 0; }));
  std::memset(arena_->base(), 0x5a, arena_->bytes());
}

TEST_P(ArenaTest, IsFaultedInAlready) {
  std::vector<unsigned char> resident(arena_->bytes() / static_cast<uint64_t>(getpagesize()));
  ASSERT_EQ(mincore(arena_->base(), arena_->bytes(), resident.data()), 0);
  EXPECT_TRUE(std::all_of(resident.begin(), resident.end(), [](auto c) { return (c & 1) != 0; }));
  const std::string smaps = Smaps(arena_->base());
  const uint64_t mapped = SmapsBytes(smaps, "Rss") + SmapsBytes(smaps, "Shared_Hugetlb") +
                          SmapsBytes(smaps, "Private_Hugetlb");
  EXPECT_EQ(mapped, arena_->bytes()) << smaps;
}

TEST_P(ArenaTest, ReportsItsPagesCorrectly) {
  const std::string smaps = Smaps(arena_->base());
  switch (arena_->pages()) {
    case PageRung::kHugetlb:
      EXPECT_EQ(SmapsBytes(smaps, "KernelPageSize"), arena_->page_bytes()) << smaps;
      break;
    case PageRung::kTmpfsHuge:
    case PageRung::kMadviseHuge: {
      // The reason begins with a number, confirmed here by the kernel.
      std::ostringstream expected;
      expected << SmapsBytes(smaps, "ShmemPmdMapped") / kMiB << " of " << arena_->bytes() / kMiB
               << " MiB in pages of 2048 KiB";
      EXPECT_THAT(arena_->reason(), HasSubstr(expected.str())) << smaps;
      EXPECT_GE(SmapsBytes(smaps, "ShmemPmdMapped"), 2 * kMiB);
      break;
    }
    default:
      EXPECT_EQ(SmapsBytes(smaps, "ShmemPmdMapped"), 0u) << smaps;
      EXPECT_EQ(arena_->page_bytes(), static_cast<uint64_t>(getpagesize()));
  }
  EXPECT_THAT(arena_->reason(), HasSubstr(NameOf(arena_->pages())));
}

TEST_P(ArenaTest, IsNeitherForkedNorDumped) {
  const std::string smaps = Smaps(arena_->base());
  EXPECT_THAT(smaps, HasSubstr(" dc")) << "VM_DONTCOPY";
  EXPECT_THAT(smaps, HasSubstr(" dd")) << "VM_DONTDUMP";
}

TEST_P(ArenaTest, IsNotInAForeignChild) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const bool mapped = !Smaps(arena_->base()).empty();
    const bool fd_open = fcntl(arena_->fd(), F_GETFD) >= 0;
    // The child's mapping at that address must survive the destructor.
    void* own = mmap(arena_->base(), 4096, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    const bool free_address = own == arena_->base();
    arena_.reset();
    const bool kept = free_address && !Smaps(own).empty();
    _exit((mapped ? 1 : 0) | (fd_open ? 2 : 0) | (free_address ? 0 : 4) | (kept ? 0 : 8));
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0) << "1: mapped, 2: fd open, 4: address taken, 8: unmapped";
}

TEST_P(ArenaTest, ClosesItsFdOnExec) {
  EXPECT_EQ(fcntl(arena_->fd(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
}

TEST_P(ArenaTest, CanBeAttachedByItsFd) {
  void* second =
      mmap(nullptr, arena_->bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, arena_->fd(), 0);
  ASSERT_NE(second, MAP_FAILED);
  arena_->base()[kBytes - 1] = 'x';
  EXPECT_EQ(static_cast<char*>(second)[kBytes - 1], 'x');
  EXPECT_EQ(munmap(second, arena_->bytes()), 0);
}

TEST_P(ArenaTest, CannotBeShrunkOrGrownWhereItIsSealed) {
  if (arena_->pages() == PageRung::kTmpfsHuge) {
    EXPECT_EQ(fcntl(arena_->fd(), F_ADD_SEALS, F_SEAL_SHRINK), -1) << "it has by now: use them";
    GTEST_SKIP() << "this rung has no seals";
  }
  for (const off_t bytes : {off_t{0}, static_cast<off_t>(2 * arena_->bytes())}) {
    EXPECT_EQ(ftruncate(arena_->fd(), bytes), -1);
    EXPECT_EQ(errno, EPERM);
  }
  EXPECT_EQ(fcntl(arena_->fd(), F_ADD_SEALS, F_SEAL_WRITE), -1) << "a third party could block us";
}

TEST_P(ArenaTest, GivesItsMemoryBackAndTakesItAgain) {
  std::memset(arena_->base(), 0x5a, arena_->bytes());
  ASSERT_TRUE(arena_->Punch().ok());
  EXPECT_FALSE(arena_->resident());
  EXPECT_EQ(BytesInFile(*arena_), 0u);
  EXPECT_EQ(SmapsBytes(Smaps(arena_->base()), "Rss"), 0u);
  ASSERT_TRUE(arena_->Punch().ok()) << "twice is no error";
  const absl::Status again = arena_->Populate();
  ASSERT_TRUE(again.ok()) << again;
  EXPECT_TRUE(arena_->resident());
  EXPECT_GE(BytesInFile(*arena_), arena_->bytes());
  EXPECT_TRUE(
      std::all_of(arena_->base(), arena_->base() + arena_->bytes(), [](char c) { return c == 0; }));
  EXPECT_TRUE(arena_->Populate().ok()) << "twice is no error";
}

TEST_P(ArenaTest, FreesEverythingAtItsEnd) {
  char* const base = arena_->base();
  const int fd = arena_->fd();
  arena_.reset();
  EXPECT_EQ(Smaps(base), "");
  EXPECT_EQ(fcntl(fd, F_GETFD), -1);
}

TEST(Arena, RoundsUpToItsPages) {
  const auto arena = Arena::Create({.bytes = kBytes + 1, .pages = PageRung::kSmall});
  ASSERT_TRUE(arena.ok()) << arena.status();
  EXPECT_EQ((*arena)->bytes(), kBytes + static_cast<uint64_t>(getpagesize()));
}

TEST(Arena, RefusesToBeEmpty) {
  EXPECT_EQ(Arena::Create({.bytes = 0}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(Arena, AsksForNoMoreThanTheMachineHas) {
  const auto arena = Arena::Create({.bytes = uint64_t{1} << 50});
  EXPECT_EQ(arena.status().code(), absl::StatusCode::kResourceExhausted) << arena.status();
  EXPECT_THAT(arena.status().message(), HasSubstr("arena_bytes"));
}

}  // namespace
}  // namespace holdfast::staging
