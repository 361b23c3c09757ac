#include "runtime/staging/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/base/status.h"
#include "runtime/staging/memory_room.h"
#include "runtime/staging/page_source.h"
#include "runtime/staging/prefault.h"
#include "runtime/sys/system.h"

namespace holdfast::staging {
namespace {

constexpr uint64_t kStatBlockBytes = 512;  // unit of st_blocks: stat(2)

std::vector<PageRung> Ladder(PageRung asked) {
  if (asked != PageRung::kAuto) return {asked};
  return {PageRung::kHugetlb, PageRung::kTmpfsHuge, PageRung::kMadviseHuge, PageRung::kSmall};
}

absl::StatusOr<uint64_t> BytesInFile(int fd) {
  struct stat info = {};
  if (sys::Sys().fstat(fd, &info) != 0) return base::ErrnoStatus("fstat", kArenaObject, errno);
  return static_cast<uint64_t>(info.st_blocks) * kStatBlockBytes;
}

// A huge page needs an address and a file offset that agree modulo its size, and older kernels
// place a mapping anywhere. A range that was free a moment ago holds an aligned address for the
// kernel, as a hint. Not MAP_FIXED: a failure, as without huge pages, may leave its range free.
// A removal of the range would take away another thread's mapping that came there since.
absl::StatusOr<char*> MapAligned(int fd, uint64_t bytes, uint64_t alignment) {
  constexpr int kTries = 8;
  const sys::SystemCalls& sys = sys::Sys();
  const uint64_t room = bytes + alignment;
  void* hint = nullptr;
  for (int i = 0; true; ++i) {
    void* const mapped = sys.mmap(hint, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) return base::ErrnoStatus("mmap", kArenaObject, errno);
    // Without alignment the proof of huge pages fails, and the arena takes the next rung.
    if (reinterpret_cast<uintptr_t>(mapped) % alignment == 0 || i == kTries)
      return static_cast<char*>(mapped);
    (void)sys.munmap(mapped, bytes);
    char* const range = static_cast<char*>(
        sys.mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (range == MAP_FAILED) return base::ErrnoStatus("find addresses for", kArenaObject, errno);
    (void)sys.munmap(range, room);
    hint = range + (alignment - reinterpret_cast<uintptr_t>(range) % alignment) % alignment;
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Arena>> Arena::Create(const ArenaOptions& options) {
  if (options.bytes == 0) return absl::InvalidArgumentError("create staging arena: zero bytes");
  std::string passed;  // rungs above, each with its reason
  absl::Status status;
  bool room_checked = false;
  for (const PageRung rung : Ladder(options.pages)) {
    if (rung != PageRung::kHugetlb && !room_checked) {
      // Reserved huge pages have a pool of their own; other pages use the common memory.
      HOLDFAST_RETURN_IF_ERROR(CheckMemoryRoom(options.bytes));
      room_checked = true;
    }
    absl::StatusOr<std::unique_ptr<Arena>> arena = CreateOn(rung, options);
    if (arena.ok()) {
      (*arena)->reason_ = absl::StrCat(passed, NameOf(rung), ": ", (*arena)->reason_);
      return arena;
    }
    status = arena.status();
    absl::StrAppend(&passed, NameOf(rung), ": ", status.message(), "; ");
  }
  return base::Annotate(
      status,
      absl::StrCat("create staging arena on ",
                   options.pages == PageRung::kAuto ? "any kind of page" : NameOf(options.pages)));
}

absl::StatusOr<std::unique_ptr<Arena>> Arena::CreateOn(PageRung rung, const ArenaOptions& options) {
  std::unique_ptr<Arena> arena(new Arena());
  HOLDFAST_ASSIGN_OR_RETURN(PageSource source, OpenPages(rung, options.bytes));
  arena->pages_ = rung;
  arena->page_bytes_ = source.page_bytes;
  arena->threads_ = options.threads == 0 ? 1 : options.threads;
  HOLDFAST_RETURN_IF_ERROR(arena->Map(source));
  arena->fd_ = std::move(source.fd);
  const MappedFile file = {.base = arena->base_, .fd = arena->fd(), .bytes = arena->bytes_};
  switch (rung) {
    case PageRung::kHugetlb:
      arena->reason_ = absl::StrCat("pages of ", arena->page_bytes_ >> 10, " KiB");
      break;
    case PageRung::kMadviseHuge:
      HOLDFAST_RETURN_IF_ERROR(arena->AdviseHuge());
      HOLDFAST_RETURN_IF_ERROR(arena->ProveHuge());
      break;
    case PageRung::kTmpfsHuge:
      HOLDFAST_RETURN_IF_ERROR(arena->ProveHuge());
      break;
    default:
      arena->reason_ = absl::StrCat("pages of ", arena->page_bytes_ >> 10, " KiB");
  }
  HOLDFAST_RETURN_IF_ERROR(PrefaultAll(file, arena->threads_));
  arena->resident_.store(true, std::memory_order_release);
  return arena;
}

absl::Status Arena::Map(const PageSource& source) {
  absl::StatusOr<char*> base = MapAligned(source.fd.get(), source.bytes, source.page_bytes);
  if (!base.ok()) {
    if (pages_ != PageRung::kHugetlb || base::ErrnoOf(base.status()) != ENOMEM)
      return base.status();
    return absl::ResourceExhaustedError(absl::StrCat(
        base.status().message(), ": fewer than ", source.bytes / source.page_bytes,
        " huge pages of ", source.page_bytes >> 20, " MiB are free (raise vm.nr_hugepages)"));
  }
  base_ = *base;
  bytes_ = source.bytes;
  // A child forked by the host (a DataLoader's) must neither keep nor see this memory.
  if (sys::Sys().madvise(base_, bytes_, MADV_DONTFORK) != 0)
    return base::ErrnoStatus("madvise DONTFORK", kArenaObject, errno);
  // Without DONTDUMP a core dump would hold a checkpoint and be slow to write.
  if (sys::Sys().madvise(base_, bytes_, MADV_DONTDUMP) != 0)
    return base::ErrnoStatus("madvise DONTDUMP", kArenaObject, errno);
  return absl::OkStatus();
}

absl::Status Arena::AdviseHuge() {
  if (sys::Sys().madvise(base_, bytes_, MADV_HUGEPAGE) == 0) return absl::OkStatus();
  return base::ErrnoStatus("madvise HUGEPAGE", kArenaObject, errno);
}

// Both rungs fall back to small pages without an error, but the file's size shows the page size:
// one small touch allocates a huge page or a small one. Touch one page first, so that a machine
// without huge pages pays almost nothing; then touch each page's place once and compare the sum.
absl::Status Arena::ProveHuge() {
  const uint64_t touch_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const MappedFile first = {.base = base_, .fd = fd(), .bytes = page_bytes_};
  HOLDFAST_RETURN_IF_ERROR(
      Prefault(first, {.stride_bytes = page_bytes_, .touch_bytes = touch_bytes, .threads = 1}));
  HOLDFAST_ASSIGN_OR_RETURN(const uint64_t first_bytes, BytesInFile(fd()));
  if (first_bytes < page_bytes_) {
    return absl::FailedPreconditionError(
        pages_ == PageRung::kTmpfsHuge
            ? "the first page came small: no huge page is free, or the kernel gives none "
              "(/sys/kernel/mm/transparent_hugepage/shmem_enabled is deny)"
            : "the first page came small: no huge page is free, or the kernel gives none "
              "(set /sys/kernel/mm/transparent_hugepage/shmem_enabled to advise)");
  }
  const MappedFile all = {.base = base_, .fd = fd(), .bytes = bytes_};
  HOLDFAST_RETURN_IF_ERROR(Prefault(
      all, {.stride_bytes = page_bytes_, .touch_bytes = touch_bytes, .threads = threads_}));
  HOLDFAST_ASSIGN_OR_RETURN(const uint64_t huge_bytes, BytesInFile(fd()));
  reason_ = absl::StrCat(huge_bytes >> 20, " of ", bytes_ >> 20, " MiB in pages of ",
                         page_bytes_ >> 10, " KiB");
  return absl::OkStatus();
}

Arena::~Arena() {
  // In a foreign child another mapping may have these addresses.
  if (base_ == nullptr || !guard_.InCreator()) return;
  (void)sys::Sys().munmap(base_, bytes_);  // Cannot fail for a whole mapping.
}

absl::Status Arena::Punch() {
  if (sys::Sys().fallocate(fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                           static_cast<off_t>(bytes_)) != 0) {
    return base::ErrnoStatus("punch", kArenaObject, errno);
  }
  resident_.store(false, std::memory_order_release);
  return absl::OkStatus();
}

absl::Status Arena::Populate() {
  if (resident()) return absl::OkStatus();
  if (pages_ != PageRung::kHugetlb) HOLDFAST_RETURN_IF_ERROR(CheckMemoryRoom(bytes_));
  const absl::Status status = PrefaultAll({.base = base_, .fd = fd(), .bytes = bytes_}, threads_);
  if (!status.ok()) {
    // Return the pages allocated before the failure.
    (void)Punch();
    return base::Annotate(status, "take staging memory again");
  }
  resident_.store(true, std::memory_order_release);
  return absl::OkStatus();
}

}  // namespace holdfast::staging
