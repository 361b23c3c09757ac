#include "holdfast/watch.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/base/status.h"
#include "runtime/layout/board.h"
#include "runtime/layout/job.h"
#include "runtime/layout/progress.h"
#include "runtime/sys/retry.h"
#include "runtime/sys/system.h"

namespace holdfast {
namespace {

constexpr char kObject[] = "job table";
constexpr std::align_val_t kAlignment{64};
// A table has 100 bytes for a chunk of 4 MiB, and its manifest: far less in any save.
constexpr uint64_t kTableBytesMax = 1ull << 30;
constexpr uint32_t kSlotsAtOnce = 1024;

struct AlignedDelete {
  void operator()(char* memory) const { ::operator delete(memory, kAlignment); }
};
using Copy = std::unique_ptr<char, AlignedDelete>;

absl::Status Refuse(absl::string_view why) {
  return absl::FailedPreconditionError(absl::StrCat("read ", kObject, ": ", why));
}

/// Reads from `offset` on, up to the end of the file. Returns the number of bytes.
absl::StatusOr<uint64_t> ReadAt(int fd, void* out, uint64_t bytes, uint64_t offset,
                                const char* object) {
  uint64_t at = 0;
  while (at < bytes) {
    const ssize_t got = sys::Uninterrupted([&] {
      return sys::Sys().pread(fd, static_cast<char*>(out) + at, bytes - at,
                              static_cast<off_t>(offset + at));
    });
    if (got < 0) return base::ErrnoStatus("read", object, errno);
    if (got == 0) break;
    at += static_cast<uint64_t>(got);
  }
  return at;
}

/// Copies the first `bytes` of the file.
absl::StatusOr<Copy> CopyOf(int fd, uint64_t bytes) {
  Copy copy(static_cast<char*>(::operator new(bytes, kAlignment)));
  HOLDFAST_ASSIGN_OR_RETURN(const uint64_t got, ReadAt(fd, copy.get(), bytes, 0, kObject));
  if (got < bytes) return Refuse("it is shorter than it was");
  return copy;
}

/// Sums the bytes of the extents in a log of `job`, whose entries the table's check leaves out.
uint64_t BytesIn(layout::Job* job, layout::Range log) {
  const auto* const entries = layout::At<layout::SharedU32>(job, log);
  const layout::Extent* const extents = layout::Extents(job);
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < job->extent_count; ++i) {
    const uint32_t extent = entries[i].load(std::memory_order_relaxed);
    if (extent < job->extent_count) bytes += extents[extent].bytes;
  }
  return bytes;
}

std::string TextOf(const char (&field)[kNameBytes]) {
  return std::string(field, strnlen(field, sizeof(field)));
}

}  // namespace

absl::StatusOr<SaveInFlight> ReadSaveInFlight(int fd) {
  struct stat status = {};
  if (sys::Sys().fstat(fd, &status) != 0) return base::ErrnoStatus("look at", kObject, errno);
  const auto bytes = static_cast<uint64_t>(std::max<off_t>(status.st_size, 0));
  if (bytes < sizeof(layout::Job))
    return absl::UnavailableError(absl::StrCat("read ", kObject, ": it is being laid out"));
  if (bytes > kTableBytesMax) return Refuse("it is too long for one");
  HOLDFAST_ASSIGN_OR_RETURN(const Copy head, CopyOf(fd, sizeof(layout::Job)));
  const auto* const first = reinterpret_cast<const layout::Job*>(head.get());
  if (first->magic != layout::kJobMagic) return Refuse("it is another file");
  if (first->layout_version != layout::kLayoutVersion) {
    return Refuse(absl::StrCat("the process runs another version of Holdfast (tables of version ",
                               first->layout_version, ", not ", layout::kLayoutVersion,
                               "); use its own program"));
  }
  HOLDFAST_ASSIGN_OR_RETURN(const Copy copy, CopyOf(fd, bytes));
  auto* const job = reinterpret_cast<layout::Job*>(copy.get());
  if (const char* const wrong = layout::ValidateJob(job, bytes)) {
    // The trainer fills a table without any sign of its end; a worker checks the finished table.
    return absl::UnavailableError(absl::StrCat("read ", kObject, ": ", wrong));
  }
  if (job->kind != layout::JobKind::kSave)
    return absl::NotFoundError(absl::StrCat("read ", kObject, ": the job removes files"));

  SaveInFlight save;
  const layout::File* const files = layout::Files(job);
  const bool single_file = (job->flags & layout::kSingleFile) != 0;
  save.name = single_file ? TextOf(files[0].name) : TextOf(job->target);
  save.partial = TextOf(job->partial);
  save.attempt = job->attempt;
  save.step = job->step;
  save.rank = job->rank;
  save.world_size = job->world_size;
  save.launcher = job->launcher;
  save.engine = static_cast<EngineRung>(job->engine_used.load(std::memory_order_relaxed));
  save.streams = layout::Streams(*job);
  save.worker_pid = static_cast<int>(job->worker_pid.load(std::memory_order_relaxed));
  SaveProgress& progress = save.progress;
  for (uint32_t i = 0; i < job->file_count; ++i) progress.bytes_total += files[i].bytes;
  progress.bytes_sealed = std::min(BytesIn(job, job->published), progress.bytes_total);
  progress.bytes_written =
      std::min(job->bytes_completed.load(std::memory_order_relaxed), progress.bytes_total);
  progress.phase = job->quarantined.load(std::memory_order_relaxed) != 0
                       ? "quarantined"
                       : layout::PhaseWord(*job, progress.bytes_sealed, progress.bytes_total);
  if (job->staging_released.load(std::memory_order_relaxed) == 0) {
    const uint64_t released = save.streams ? BytesIn(job, job->acknowledged) : 0;
    save.bytes_held = progress.bytes_sealed - std::min(released, progress.bytes_sealed);
  }
  return save;
}

absl::StatusOr<std::vector<uint32_t>> ReadRanksWaitedFor(int fd, const AttemptId& attempt,
                                                         uint32_t world_size) {
  layout::BoardHead head;
  HOLDFAST_ASSIGN_OR_RETURN(const uint64_t got, ReadAt(fd, &head, sizeof(head), 0, "rank board"));
  if (got < sizeof(head) || head.magic != layout::kBoardMagic ||
      head.version != layout::kBoardVersion || head.attempt != attempt ||
      head.world_size != world_size) {
    return absl::FailedPreconditionError("read rank board: it is not that of the save");
  }
  std::vector<uint32_t> ranks;
  std::vector<layout::RankSlot> slots(kSlotsAtOnce);
  for (uint32_t first = 0; first < world_size; first += kSlotsAtOnce) {
    const uint32_t count = std::min(kSlotsAtOnce, world_size - first);
    std::fill(slots.begin(), slots.end(), layout::RankSlot());  // a slot behind the end is empty
    HOLDFAST_RETURN_IF_ERROR(ReadAt(fd, slots.data(), count * sizeof(layout::RankSlot),
                                    layout::SlotAt(first), "rank board")
                                 .status());
    for (uint32_t i = 0; i < count; ++i) {
      // Rank 0 does not vote.
      if (first + i > 0 && StateOf(slots[i]) != layout::RankState::kVoted) {
        ranks.push_back(first + i);
      }
    }
  }
  if (ranks.empty()) ranks.push_back(0);
  return ranks;
}

}  // namespace holdfast
