#include "runtime/worker/commit_record.h"

#include <fcntl.h>
#include <time.h>

#include <cerrno>
#include <cstring>

#include "runtime/digest/digest.h"
#include "runtime/layout/manifest_slots.h"
#include "runtime/sys/assert.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/retry.h"
#include "runtime/sys/system.h"
#include "runtime/worker/contents.h"
#include "runtime/worker/directory.h"
#include "runtime/worker/manifest.h"

namespace holdfast::worker {
namespace {

/// One rank in the commit record.
struct RankManifest {
  uint64_t bytes = 0;
  uint64_t files_bytes = 0;
  bool says_files_bytes = false;
  Digest digest;
};

bool ReadManifest(JobRun* run, const char* name, RankManifest* out) {
  const int fd = sys::OpenOwned(run->directory, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW, 0);
  if (fd < 0) return FailErrno(run, Operation::kManifest, errno);
  digest::Stream stream;
  int error = 0;
  while (true) {
    const ssize_t got = sys::Uninterrupted([&] {
      return sys::Sys().pread(fd, run->directory_buffer, kDirectoryBufferBytes,
                              static_cast<off_t>(out->bytes));
    });
    if (got < 0) error = errno;
    if (got <= 0) break;
    const size_t length = static_cast<size_t>(got);
    HOLDFAST_ASSERT(length <= kDirectoryBufferBytes);
    if (out->bytes == 0) {
      out->says_files_bytes = FindFilesBytes(run->directory_buffer, length, &out->files_bytes);
    }
    stream.Update(run->directory_buffer, length);
    out->bytes += length;
  }
  sys::CloseOwned(fd);
  if (error != 0) return FailErrno(run, Operation::kManifest, error);
  out->digest = stream.Finish();
  CountStep(run->job);
  return true;
}

bool FillRows(JobRun* run, uint64_t* files_bytes) {
  layout::Job* const job = run->job;
  char* const text = layout::CommitRecord(job);
  const layout::CommitSlots& slots = job->commit_slots;
  for (uint32_t rank = 0; rank < job->world_size; ++rank) {
    if (MustStop(run, true)) return false;
    char name[kNameBytes];
    RankManifestName(*job, rank, name);
    RankManifest manifest;
    if (!ReadManifest(run, name, &manifest)) return false;
    // As for the data: not what another program has put in the manifest's place.
    if (!manifest.says_files_bytes ||
        (rank == job->rank &&
         manifest.digest != digest::Of(layout::Manifest(job), job->manifest_template.bytes)))
      return Fail(run, FailureCode::kDataLoss, Operation::kManifest);
    const uint64_t row = rank * slots.row_bytes;
    HOLDFAST_ASSERT(row + slots.row_bytes <= job->commit_template.bytes);
    layout::FillNumber(text, {slots.manifest_bytes.offset + row, slots.manifest_bytes.width},
                       manifest.bytes);
    digest::ToHex(manifest.digest, text + slots.manifest_digest + row);
    *files_bytes += manifest.files_bytes;
  }
  return true;
}

void FillHead(JobRun* run, uint64_t files_bytes) {
  char* const text = layout::CommitRecord(run->job);
  const layout::CommitSlots& slots = run->job->commit_slots;
  HOLDFAST_ASSERT(slots.self_digest.offset < run->job->commit_template.bytes);
  struct timespec now = {};
  sys::Sys().clock_gettime(CLOCK_REALTIME, &now);
  layout::FillNumber(
      text, slots.committed_at_ns,
      static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec));
  layout::FillNumber(text, slots.bytes, files_bytes);
  digest::ToHex(digest::Of(text, slots.self_digest.offset), text + slots.self_digest.offset);
}

}  // namespace

bool FindFilesBytes(const char* head, size_t length, uint64_t* out) {
  constexpr char kKey[] = "\"files_bytes\":";
  constexpr size_t kKeyBytes = sizeof(kKey) - 1;
  for (size_t at = 0; at + kKeyBytes < length; ++at) {
    if (memcmp(head + at, kKey, kKeyBytes) != 0) continue;
    uint64_t value = 0;
    size_t digit = at + kKeyBytes;
    for (; digit < length && head[digit] >= '0' && head[digit] <= '9'; ++digit) {
      value = value * 10 + static_cast<uint64_t>(head[digit] - '0');
    }
    *out = value;
    return digit > at + kKeyBytes;
  }
  return false;
}

bool MakeMark(JobRun* run) {
  if (run->job->commit_template.bytes == 0) return true;
  HOLDFAST_ASSERT(run->directory >= 0 && !run->record_made);
  const int fd =
      sys::OpenOwned(run->directory, kMarkName,
                     O_CREAT | O_EXCL | O_WRONLY | O_NOFOLLOW | O_CLOEXEC, sys::kFileMode);
  if (fd < 0) return FailErrno(run, Operation::kManifest, errno);
  run->record_made = true;
  sys::CloseOwned(fd);
  return true;
}

bool WriteCommitRecord(JobRun* run) {
  layout::Job* const job = run->job;
  // A recovery that promoted the directory has judged the manifests, and owns the directory now.
  if (job->commit_template.bytes == 0 || run->ranks.promoted) return true;
  uint64_t files_bytes = 0;
  if (!FillRows(run, &files_bytes)) return false;
  FillHead(run, files_bytes);
  HOLDFAST_ASSERT(run->record_made && !run->record_named);
  const int fd = sys::OpenOwned(run->directory, kMarkName, O_WRONLY | O_NOFOLLOW | O_CLOEXEC, 0);
  if (fd < 0) return FailErrno(run, Operation::kManifest, errno);
  // Durable before the commit rename: a checkpoint with an empty record counts as damaged, although
  // the data is complete.
  if (!WriteSynced(run, fd, layout::CommitRecord(job), job->commit_template.bytes)) return false;
  const int error = RenameNew(run, kMarkName, layout::kCommitRecordName);
  run->record_named = error == 0;
  return error == 0 || FailErrno(run, Operation::kManifest, error);
}

}  // namespace holdfast::worker
