#include "runtime/worker/manifest.h"

#include <fcntl.h>

#include <cerrno>
#include <cstring>

#include "runtime/digest/digest.h"
#include "runtime/layout/manifest_slots.h"
#include "runtime/sys/assert.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/retry.h"
#include "runtime/sys/system.h"
#include "runtime/worker/directory.h"
#include "runtime/worker/planted_bugs.h"

namespace holdfast::worker {

#ifdef HOLDFAST_PLANTED_BUGS
namespace testing {
bool g_never_compare_replicas = false;
}  // namespace testing
#endif

namespace {

// The attempt id and the digest of the replicas stand before all fields of variable length.
constexpr size_t kHeadBytes = 512;

/// Compares the table's two copies of a chunk's digest: the manifest's text, and the binary digest
/// that proved the bytes. A manifest with another digest would condemn a sound file later.
bool SlotSays(const layout::Job& job, const char* manifest, uint64_t slot, const Digest& digest) {
  if (slot == 0 || job.manifest_template.bytes == 0) return true;
  char hex[digest::kHexDigits];
  digest::ToHex(digest, hex);
  return memcmp(manifest + slot, hex, digest::kHexDigits) == 0;
}

void FillSlots(JobRun* run) {
  layout::Job* const job = run->job;
  char* const text = layout::Manifest(job);
  const layout::ManifestSlots& slots = job->slots;
  const layout::JobTimes& times = run->times;
  HOLDFAST_ASSERT(times.last_complete >= times.first_submit);
  layout::FillText(text, slots.engine, layout::ManifestWord(run->figures.engine));
  layout::FillText(text, slots.engine_reason, run->queue->reason());
  layout::FillText(text, slots.direct_io, layout::ManifestWord(run->figures.direct_io));
  layout::FillBool(text, slots.streamed, layout::Streams(*job));
  layout::FillNumber(text, slots.bytes_written, run->figures.bytes_written);
  layout::FillNumber(text, slots.time_writing_ns, times.last_complete - times.first_submit);
  layout::FillNumber(text, slots.time_syncing_ns, run->time_syncing_ns);
  layout::FillNumber(text, slots.time_total_ns, sys::NowNs() - times.started);
  if (slots.self_digest.width == digest::kHexDigits) {
    // Last, because the digest covers all text before its own digits.
    digest::ToHex(digest::Of(text, slots.self_digest.offset), text + slots.self_digest.offset);
  }
}

bool FailManifest(JobRun* run, int error_number) {
  return FailErrno(run, Operation::kManifest, error_number);
}

}  // namespace

bool ComputeRoots(JobRun* run) {
  layout::Job* const job = run->job;
  digest::ReplicaStream replicas(job->attempt);
  const char* const text = layout::Manifest(job);
  for (uint32_t i = 0; i < job->file_count; ++i) {
    layout::File& file = layout::Files(job)[i];
    HOLDFAST_ASSERT(uint64_t{file.extent_first} + file.extent_count <= job->extent_count);
    digest::RootStream root({.attempt = job->attempt,
                             .rank = job->rank,
                             .world_size = job->world_size,
                             .file = i,
                             .file_bytes = file.bytes});
    const bool replicated = file.replicated != 0;
    if (replicated) replicas.AddFile(file.name, strnlen(file.name, sizeof(file.name)), file.bytes);
    for (uint32_t k = 0; k < file.extent_count; ++k) {
      const layout::Extent& extent = layout::Extents(job)[file.extent_first + k];
      if (!SlotSays(*job, text, extent.digest_slot, extent.sealed)) {
        return Fail(run, FailureCode::kInternal, Operation::kManifest, i);
      }
      root.Add(extent.sealed);
      if (replicated) replicas.Add(extent.sealed);
    }
    file.root = root.Finish();
    if (file.root_slot != 0 && job->manifest_template.bytes != 0) {
      digest::ToHex(file.root, layout::Manifest(job) + file.root_slot);
    }
  }
  if (job->slots.replicas.width == digest::kHexDigits) {
    digest::ToHex(replicas.Finish(), layout::Manifest(job) + job->slots.replicas.offset);
  }
  return true;
}

bool WriteSynced(JobRun* run, int fd, const char* text, uint64_t bytes) {
  HOLDFAST_ASSERT(fd >= 0 && run->directory >= 0);
  const int error = sys::WriteAll(fd, text, bytes);
  bool ok = error == 0 || FailManifest(run, error);
  const uint64_t begin = sys::NowNs();
  // Without the fsync a crash after the rename leaves a file of length 0 under the name. The
  // checkpoint is lost then, although all its data is present.
  if (ok && sys::Sys().fsync(fd) != 0) ok = FailManifest(run, errno);
  if (sys::CloseOwned(fd) != 0 && ok && errno != EINTR) ok = FailManifest(run, errno);
  run->time_syncing_ns += sys::NowNs() - begin;
  return ok;
}

bool WriteManifest(JobRun* run) {
  HOLDFAST_ASSERT(run->staging_released && !run->manifest_made && !run->voted);
  SetPhase(run, layout::Phase::kWritingManifest);
  FillSlots(run);
  char temporary[kNameBytes];
  TemporaryName(run->job->manifest, temporary);
  constexpr int kFlags = O_CREAT | O_EXCL | O_WRONLY | O_NOFOLLOW | O_CLOEXEC;
  int fd = sys::OpenOwned(run->directory, temporary, kFlags, sys::kFileMode);
  if (fd < 0 && errno == EEXIST && run->Has(layout::kFilesOnly)) {
    // An attempt that was killed may have left the file.
    if (sys::Sys().unlinkat(run->directory, temporary, 0) != 0 && errno != ENOENT) {
      return FailManifest(run, errno);
    }
    fd = sys::OpenOwned(run->directory, temporary, kFlags, sys::kFileMode);
  }
  if (fd < 0) return FailManifest(run, errno);
  run->manifest_made = true;
  bool ok = WriteSynced(run, fd, layout::Manifest(run->job), run->job->manifest_template.bytes);
  const uint64_t begin = sys::NowNs();
  // The rename makes the manifest appear whole or not at all.
  if (ok) {
    // From the rename on rank 0 may see the vote and commit. This rank must not remove its files
    // any more, even if a later step fails.
    run->voted = !run->Decides() && !run->Has(layout::kFilesOnly);
    int error = RenameNew(run, temporary, run->job->manifest);
    if (error == 0) run->manifest_named = true;
    if (error != 0) run->voted = false;
    if (error != 0) ok = FailManifest(run, error);
  }
  // Without the fsync a crash after "durable" was reported loses the name, and with it the
  // checkpoint.
  if (ok && sys::Sys().fsync(run->directory) != 0) {
    ok = FailErrno(run, Operation::kSyncDirectory, errno);
  }
  const uint64_t end = sys::NowNs();
  run->time_syncing_ns += end - begin;
  if (ok) run->times.manifest_synced = end;
  return ok;
}

void RankManifestName(const layout::Job& job, uint32_t rank, char (&out)[kNameBytes]) {
  HOLDFAST_ASSERT(rank < job.world_size);
  constexpr uint32_t kDigits = 5;
  size_t at = strlen(job.manifest_prefix);
  memcpy(out, job.manifest_prefix, at);
  for (uint32_t digit = kDigits; digit-- > 0; rank /= 10) {
    out[at + digit] = static_cast<char>('0' + rank % 10);
  }
  at += kDigits;
  memcpy(out + at, job.manifest_suffix, strlen(job.manifest_suffix) + 1);
}

namespace {

/// The first bytes of a manifest.
struct Head {
  char text[kHeadBytes];
  size_t length = 0;

  /// Returns the 32 digits behind `"KEY":"`, or null if the head lacks the key.
  const char* DigitsOf(const char* key) const {
    const size_t key_bytes = strlen(key);
    for (size_t at = 0; at + key_bytes + 1 + digest::kHexDigits <= length; ++at) {
      if (memcmp(text + at, key, key_bytes) != 0) continue;
      size_t value = at + key_bytes;
      while (value < length && (text[value] == ' ' || text[value] == ':')) ++value;
      return value + 1 + digest::kHexDigits <= length && text[value] == '"' ? text + value + 1
                                                                            : nullptr;
    }
    return nullptr;
  }
};

/// Returns kYes when the head was read; otherwise as FindManifest.
Found ReadHead(int directory, const char* name, Head* head, int* error_number) {
  const int fd = sys::OpenOwned(directory, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW, 0);
  if (fd < 0) {
    *error_number = errno;
    // ESTALE: a network file system saw the name and lost it in between.
    const bool absent = errno == ENOENT || errno == ENOTDIR || errno == ESTALE;
    return absent ? Found::kNo : Found::kFailed;
  }
  const ssize_t got =
      sys::Uninterrupted([&] { return sys::Sys().pread(fd, head->text, sizeof(head->text), 0); });
  *error_number = got < 0 ? errno : 0;
  sys::CloseOwned(fd);
  head->length = got < 0 ? 0 : static_cast<size_t>(got);
  HOLDFAST_ASSERT(head->length <= sizeof(head->text));
  return got < 0 ? Found::kFailed : Found::kYes;
}

bool IsOfAttempt(const layout::Job& job, const Head& head) {
  char expected[digest::kHexDigits];
  digest::ToHex(job.attempt, expected);
  const char* const digits = head.DigitsOf("\"attempt\"");
  return digits != nullptr && memcmp(digits, expected, digest::kHexDigits) == 0;
}

/// Compares the digest of the other rank's replicated files with this rank's.
bool HasSameReplicas(layout::Job* job, const Head& head) {
#ifdef HOLDFAST_PLANTED_BUGS
  if (testing::g_never_compare_replicas) return true;
#endif
  const char* const theirs = head.DigitsOf("\"replicas\"");
  if (job->slots.replicas.width != digest::kHexDigits) return theirs == nullptr;
  const char* const ours = layout::Manifest(job) + job->slots.replicas.offset;
  return theirs != nullptr && memcmp(theirs, ours, digest::kHexDigits) == 0;
}

}  // namespace

Found FindVote(const JobRun& run, uint32_t rank, int* error_number) {
  char name[kNameBytes];
  RankManifestName(*run.job, rank, name);
  Head head;
  const Found found = ReadHead(run.directory, name, &head, error_number);
  if (found != Found::kYes) return found;
  if (!IsOfAttempt(*run.job, head)) return Found::kOther;
  return HasSameReplicas(run.job, head) ? Found::kYes : Found::kDiffers;
}

Found FindManifest(const JobRun& run, int directory, const char* name, int* error_number) {
  Head head;
  const Found found = ReadHead(directory, name, &head, error_number);
  if (found != Found::kYes) return found;
  return IsOfAttempt(*run.job, head) ? Found::kYes : Found::kOther;
}

}  // namespace holdfast::worker
