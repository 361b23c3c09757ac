// ValidateJob, and the unchecked uses of an accepted table by a worker; and the same table as
// `holdfast top` reads it from another process.
//
// An input names a sound table and lists changes of its bytes. A raw table would hardly ever be
// accepted.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <new>
#include <string>

#include "fuzz/expect.h"
#include "fuzz/input.h"
#include "fuzz/planted.h"
#include "holdfast/watch.h"
#include "runtime/digest/digest.h"
#include "runtime/layout/job.h"
#include "runtime/layout/launcher.h"
#include "runtime/layout/manifest_slots.h"
#include "tests/testing/job_table.h"

namespace {

using namespace holdfast::layout;  // NOLINT: a fuzzer of this namespace
using holdfast::kChunkBytes;
using holdfast::kNameBytes;
using holdfast::fuzz::Input;
using holdfast::testing::JobTable;

constexpr size_t kChangesMax = 16;
constexpr uint32_t kRowsMax = 64;  // of a commit record, from each end

/// A copy that is exactly as long as the table, so that a sanitizer finds every access outside.
class Copy {
 public:
  explicit Copy(JobTable* table) : bytes_(table->bytes()) {
    memory_.reset(new (std::align_val_t{64}) char[bytes_]);
    std::memcpy(memory_.get(), static_cast<const void*>(&table->job()), bytes_);
  }
  void Change(Input* input) {
    const size_t at = input->Below(bytes_);
    std::array<char, 16> bytes;
    const size_t wanted = std::min<size_t>(1 + input->Below(bytes.size()), bytes_ - at);
    const size_t taken = input->Take(bytes.data(), wanted);
    std::memcpy(memory_.get() + at, bytes.data(), taken);
  }
  Job* job() { return reinterpret_cast<Job*>(memory_.get()); }
  char* data() { return memory_.get(); }
  uint64_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(char* memory) const { ::operator delete[](memory, std::align_val_t{64}); }
  };
  std::unique_ptr<char[], Free> memory_;
  uint64_t bytes_;
};

JobTable Table(size_t kind) {
  JobTable table;
  if (kind == 1) table.WithCommitRecord();
  if (kind == 2) table.AsOfTwoRanks();
  if (kind == 3) table.AsSingleFile();
  if (kind == 4) table.AsRemoval();
  // The logs are empty at first, and two extents are in them then.
  if (table.job().kind == JobKind::kSave) {
    std::memset(At<char>(&table.job(), table.job().acknowledged), 0xff,
                table.job().acknowledged.bytes);
  }
  return table;
}

bool IsName(const char* name, uint32_t room) {
  const size_t length = strnlen(name, kNameBytes);
  return length > 0 && length + room < kNameBytes && std::memchr(name, '/', length) == nullptr &&
         std::strcmp(name, ".") != 0 && std::strcmp(name, "..") != 0;
}

void FillDigest(char* at) { holdfast::digest::ToHex(holdfast::Digest{.low = 1, .high = 2}, at); }

/// Fills the manifest's slots as sealers and the worker do.
void FillManifest(Job* job) {
  char* const manifest = Manifest(job);
  const ManifestSlots& slots = job->slots;
  const std::string reason(sizeof(job->completion.reason) - 1, '"');
  for (const Slot& slot : {slots.engine, slots.engine_reason, slots.direct_io}) {
    FillText(manifest, slot, reason.c_str());
  }
  FillBool(manifest, slots.streamed, true);
  for (const Slot& slot :
       {slots.bytes_written, slots.time_writing_ns, slots.time_syncing_ns, slots.time_total_ns}) {
    FillNumber(manifest, slot, UINT64_MAX);
  }
  if (slots.replicas.width != 0) FillDigest(manifest + slots.replicas.offset);
  if (slots.self_digest.width != 0) FillDigest(manifest + slots.self_digest.offset);
}

/// Fills the commit record's rows: the first and the last ones.
void FillCommitRecord(Job* job) {
  char* const record = CommitRecord(job);
  const CommitSlots& slots = job->commit_slots;
  FillNumber(record, slots.committed_at_ns, UINT64_MAX);
  FillNumber(record, slots.bytes, 0);
  for (uint32_t i = 0; i < std::min(job->world_size, 2 * kRowsMax); ++i) {
    const uint64_t rank = i < kRowsMax ? i : job->world_size - 1 - (i - kRowsMax);
    Slot slot = slots.manifest_bytes;
    slot.offset += rank * slots.row_bytes;
    FillNumber(record, slot, rank);
    if (slots.manifest_digest != 0) {
      FillDigest(record + slots.manifest_digest + rank * slots.row_bytes);
    }
  }
  FillDigest(record + slots.self_digest.offset);
}

/// Goes through the files, extents and pieces. Returns the number of extents.
uint32_t WalkFiles(Job* job) {
  uint32_t extents = 0;
  for (uint32_t i = 0; i < job->file_count; ++i) {
    const File& file = Files(job)[i];
    HOLDFAST_EXPECT(IsName(file.name, 4));
    if (file.root_slot != 0) FillDigest(Manifest(job) + file.root_slot);
    uint64_t bytes = 0;
    for (uint32_t k = 0; k < file.extent_count; ++k) {
      HOLDFAST_EXPECT(file.extent_first + k == extents);
      const Extent& extent = Extents(job)[extents++];
      HOLDFAST_EXPECT(extent.file == i && extent.file_offset == bytes);
      HOLDFAST_EXPECT(extent.bytes > 0 && extent.bytes <= kChunkBytes);
      bytes += extent.bytes;
      if (extent.digest_slot != 0) FillDigest(Manifest(job) + extent.digest_slot);
      uint64_t end = 0;
      for (uint32_t p = 0; p < extent.piece_count; ++p) {
        const Piece& piece = Pieces(job)[extent.piece_first + p];
        HOLDFAST_EXPECT(piece.offset >= end);
        end = uint64_t{piece.offset} + piece.bytes;
        HOLDFAST_EXPECT(end <= extent.bytes);
        HOLDFAST_EXPECT(piece.tensor == holdfast::Failure::kNoIndex ||
                        piece.tensor < job->tensor_count);
      }
    }
    HOLDFAST_EXPECT(bytes == file.bytes);
  }
  return extents;
}

void ReadLogs(Job* job) {
  for (const Range& range : {job->published, job->acknowledged}) {
    LogReader reader(At<SharedU32>(job, range), job->extent_count);
    uint32_t index = 0;
    while (reader.Next(&index)) HOLDFAST_EXPECT(index != kEmptyEntry);
    HOLDFAST_EXPECT(reader.taken() <= job->extent_count);
  }
}

void UseAsWorker(Job* job) {
  (void)TraitsOf(job->launcher);
  for (uint32_t i = 0; i < job->qos.cpu_count; ++i) HOLDFAST_EXPECT(job->qos.cpus[i] <= UINT16_MAX);
  if (job->kind == JobKind::kDelete) {
    const char* const names = At<char>(job, job->trash);
    for (uint64_t at = 0; at < job->trash.bytes; at += kNameBytes) {
      HOLDFAST_EXPECT(IsName(names + at, 0));
    }
    return;
  }
  HOLDFAST_EXPECT(job->queue_depth >= 1 && job->queue_depth <= 64 && job->pwrite_threads <= 16);
  HOLDFAST_EXPECT(job->rank < job->world_size && job->world_size <= 100'000);
  if ((job->flags & kFilesOnly) == 0) {
    HOLDFAST_EXPECT(IsName(job->target, 0) && IsName(job->partial, 0));
    HOLDFAST_EXPECT(std::strcmp(job->target, job->partial) != 0);
  }
  (void)IsOlder(job, {.high = 1, .low = 2});
  HOLDFAST_EXPECT(WalkFiles(job) == job->extent_count);
  ReadLogs(job);
  if ((job->flags & kWriteManifest) != 0) {
    HOLDFAST_EXPECT(IsName(job->manifest, 4));
    HOLDFAST_EXPECT(strnlen(job->manifest_prefix, 32) + strnlen(job->manifest_suffix, 64) < 96);
    FillManifest(job);
  }
  if (job->commit_template.bytes != 0) FillCommitRecord(job);
}

void Watch(int fd, const char* verdict, const Job& job) {
  const auto save = holdfast::ReadSaveInFlight(fd);
  if (!save.ok()) {
    HOLDFAST_EXPECT(absl::IsNotFound(save.status()) || absl::IsUnavailable(save.status()) ||
                    absl::IsFailedPrecondition(save.status()));
    HOLDFAST_EXPECT(verdict != nullptr || job.kind == JobKind::kDelete);
    return;
  }
  HOLDFAST_EXPECT(verdict == nullptr && job.kind == JobKind::kSave);
  HOLDFAST_EXPECT(save->name == "." || IsName(save->name.c_str(), 0));
  HOLDFAST_EXPECT(save->name.size() < kNameBytes && save->partial.size() < kNameBytes);
  const holdfast::SaveProgress& progress = save->progress;
  HOLDFAST_EXPECT(progress.bytes_sealed <= progress.bytes_total);
  HOLDFAST_EXPECT(progress.bytes_written <= progress.bytes_total);
  HOLDFAST_EXPECT(save->bytes_held <= progress.bytes_sealed);
  HOLDFAST_EXPECT(save->rank < save->world_size);
}

const char* Verdict(const Job* job, uint64_t bytes) {
  const char* const verdict = ValidateJob(job, bytes);
  // As if no piece were compared with its extent.
  if (holdfast::fuzz::Planted() && verdict != nullptr &&
      std::strstr(verdict, "a piece is") != nullptr) {
    return nullptr;
  }
  return verdict;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  Input input(data, bytes);
  static JobTable tables[] = {Table(0), Table(1), Table(2), Table(3), Table(4)};
  Copy copy(&tables[input.Below(std::size(tables))]);
  for (size_t i = 0; i < kChangesMax && !input.AtEnd(); ++i) copy.Change(&input);
  static const int fd = memfd_create("table", MFD_CLOEXEC);
  HOLDFAST_EXPECT(ftruncate(fd, static_cast<off_t>(copy.bytes())) == 0);
  HOLDFAST_EXPECT(pwrite(fd, copy.data(), copy.bytes(), 0) == static_cast<ssize_t>(copy.bytes()));
  const char* const verdict = Verdict(copy.job(), copy.bytes());
  Watch(fd, ValidateJob(copy.job(), copy.bytes()), *copy.job());
  // Shorter than its head says, or than a head.
  const char* const cut = ValidateJob(copy.job(), input.Below(copy.bytes()));
  HOLDFAST_EXPECT(cut != nullptr || copy.job()->table_bytes < copy.bytes());
  if (verdict == nullptr) UseAsWorker(copy.job());
  return 0;
}
