// Searches the text of the other rank's manifest for this rank's digests. The replicated files of
// both ranks have one layout, so that no JSON has to be parsed: a digest of this rank that the
// other manifest lacks belongs to bytes that differ.
#include "runtime/worker/replicas.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstring>

#include "runtime/digest/digest.h"
#include "runtime/sys/assert.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"
#include "runtime/worker/manifest.h"
#include "runtime/worker/ranks.h"

namespace holdfast::worker {
namespace {

// Line feeds stand between the elements and never within a JSON string.
constexpr char kTensors[] = "\n\"tensors\":[";
constexpr char kName[] = "{\"name\":\"";
constexpr char kDtype[] = "\",\"dtype\":";

struct Text {
  const char* begin = nullptr;
  size_t bytes = 0;

  const char* end() const { return begin + bytes; }
  const char* Find(const char* from, const char* what, size_t what_bytes) const {
    return static_cast<const char*>(
        memmem(from, static_cast<size_t>(end() - from), what, what_bytes));
  }
  bool Has(const Digest& digest) const {
    char digits[digest::kHexDigits];
    digest::ToHex(digest, digits);
    return Find(begin, digits, sizeof(digits)) != nullptr;
  }
};

/// A manifest, read into memory. A mapping of the file would end the process by SIGBUS where a page
/// cannot be read.
class OtherManifest {
 public:
  OtherManifest(int directory, const char* name) {
    const int fd = sys::OpenOwned(directory, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW, 0);
    if (fd < 0) return;
    struct stat status = {};
    if (sys::Sys().fstat(fd, &status) == 0 && status.st_size > 0) {
      room_ = static_cast<size_t>(status.st_size);
      void* const memory = sys::Sys().mmap(nullptr, room_, PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory != MAP_FAILED) Read(fd, static_cast<char*>(memory));
    }
    sys::CloseOwned(fd);
  }
  ~OtherManifest() {
    if (text_.begin != nullptr) sys::Sys().munmap(const_cast<char*>(text_.begin), room_);
  }
  OtherManifest(const OtherManifest&) = delete;
  OtherManifest& operator=(const OtherManifest&) = delete;
  /// As much of it as can be read.
  const Text& text() const { return text_; }

 private:
  void Read(int fd, char* memory) {
    text_ = {memory, 0};
    while (text_.bytes < room_) {
      const ssize_t got = sys::Sys().pread(fd, memory + text_.bytes, room_ - text_.bytes,
                                           static_cast<off_t>(text_.bytes));
      if (got <= 0) return;
      HOLDFAST_ASSERT(static_cast<size_t>(got) <= room_ - text_.bytes);
      text_.bytes += static_cast<size_t>(got);
    }
  }

  Text text_;
  size_t room_ = 0;
};

/// Returns the tensor of the first part of `extent` that the other rank has not, or kNoIndex.
uint32_t DifferingTensor(layout::Job* job, const layout::Extent& extent, const Text& theirs) {
  HOLDFAST_ASSERT(uint64_t{extent.piece_first} + extent.piece_count <= job->piece_count);
  const layout::Piece* const pieces = layout::Pieces(job) + extent.piece_first;
  if (extent.piece_count == 1) return pieces[0].tensor;
  for (uint32_t i = 0; i < extent.piece_count; ++i) {
    if (pieces[i].tensor == Failure::kNoIndex) continue;
    if (pieces[i].has_digest != 0 && !theirs.Has(pieces[i].digest)) return pieces[i].tensor;
  }
  return Failure::kNoIndex;
}

/// Writes `tensor "NAME"` into the record, with the name as this rank's manifest spells it. Returns
/// false when the manifest lacks the tensor.
bool NameTensor(layout::Job* job, uint32_t tensor, layout::RankFailure* failure) {
  HOLDFAST_ASSERT(tensor < job->tensor_count);
  const Text own = {layout::Manifest(job), job->manifest_template.bytes};
  const char* at = own.Find(own.begin, kTensors, sizeof(kTensors) - 1);
  if (at != nullptr) at += sizeof(kTensors) - 1;
  for (uint32_t i = 0; at != nullptr && i <= tensor; ++i) {
    at = own.Find(at, "\n", 1);
    if (at != nullptr) ++at;
  }
  if (at == nullptr) return false;
  const char* const name = own.Find(at, kName, sizeof(kName) - 1);
  const char* const end = own.Find(at, kDtype, sizeof(kDtype) - 1);
  if (name != at || end == nullptr) return false;
  constexpr char kWord[] = "tensor \"";
  char text[sizeof(failure->text)] = {};
  memcpy(text, kWord, sizeof(kWord) - 1);
  size_t length = static_cast<size_t>(end - name) - (sizeof(kName) - 1);
  const size_t room = sizeof(text) - sizeof(kWord) - 1;
  if (length > room) length = room;
  memcpy(text + sizeof(kWord) - 1, name + sizeof(kName) - 1, length);
  text[sizeof(kWord) - 1 + length] = '"';
  SetText(failure, text);
  return true;
}

void NameDifference(JobRun* run, uint32_t rank, layout::RankFailure* failure) {
  layout::Job* const job = run->job;
  HOLDFAST_ASSERT(rank < job->world_size && rank != job->rank);
  SetText(failure, "the number or the layout of the replicated files");
  char name[kNameBytes];
  RankManifestName(*job, rank, name);
  const OtherManifest manifest(run->directory, name);
  const Text& theirs = manifest.text();
  if (theirs.begin == nullptr) return;
  for (uint32_t f = 0; f < job->file_count; ++f) {
    const layout::File& file = layout::Files(job)[f];
    HOLDFAST_ASSERT(uint64_t{file.extent_first} + file.extent_count <= job->extent_count);
    for (uint32_t k = 0; file.replicated != 0 && k < file.extent_count; ++k) {
      const layout::Extent& extent = layout::Extents(job)[file.extent_first + k];
      if (theirs.Has(extent.sealed)) continue;
      const uint32_t tensor = DifferingTensor(job, extent, theirs);
      if (tensor == Failure::kNoIndex || !NameTensor(job, tensor, failure)) {
        SetText(failure, file.name);
      }
      return;
    }
  }
}

}  // namespace

bool FailReplicas(JobRun* run, uint32_t rank) {
  layout::RankFailure& seen = run->ranks.seen;
  seen = layout::RankFailure{};
  seen.rank = rank;
  seen.kind = static_cast<uint32_t>(layout::RankFailureKind::kDiffers);
  NameDifference(run, rank, &seen);
  run->ranks.found_here = true;
  return FailAsSeen(run);
}

}  // namespace holdfast::worker
