#include "runtime/writer/job_table.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "absl/strings/str_cat.h"
#include "runtime/base/check.h"
#include "runtime/base/memfd.h"
#include "runtime/base/status.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"

namespace holdfast::writer {
namespace {

constexpr uint64_t kTableAlignment = 64;

/// Counts, and the place of every array, for one table.
struct Layout {
  uint32_t extents = 0;
  uint32_t pieces = 0;
  layout::Range files, extent_range, piece_range, published, acknowledged, manifest, commit, older,
      trash;
  uint64_t bytes = 0;
};

layout::Range Take(uint64_t bytes, uint64_t* at) {
  const layout::Range range{.offset = *at, .bytes = bytes};
  *at = layout::AlignUp(*at + bytes, kTableAlignment);
  return range;
}

uint32_t ExtentCount(uint64_t file_bytes) {
  return static_cast<uint32_t>((file_bytes + kChunkBytes - 1) / kChunkBytes);
}

/// Pieces of a segment: one per chunk that it touches.
uint32_t PieceCount(const Segment& segment) {
  if (segment.bytes == 0) return 0;
  const uint64_t first = segment.file_offset / kChunkBytes;
  const uint64_t last = (segment.file_offset + segment.bytes - 1) / kChunkBytes;
  return static_cast<uint32_t>(last - first + 1);
}

Layout LayOut(const SavePlan& plan, uint64_t manifest_bytes, uint64_t commit_bytes,
              uint64_t older_count, uint64_t trash_count) {
  Layout layout;
  for (const PlannedFile& file : plan.files) {
    layout.extents += ExtentCount(file.bytes);
    for (const Segment& segment : file.segments) layout.pieces += PieceCount(segment);
  }
  uint64_t at = layout::AlignUp(sizeof(layout::Job), kTableAlignment);
  layout.files = Take(plan.files.size() * sizeof(layout::File), &at);
  layout.extent_range = Take(uint64_t{layout.extents} * sizeof(layout::Extent), &at);
  layout.piece_range = Take(uint64_t{layout.pieces} * sizeof(layout::Piece), &at);
  layout.published = Take(uint64_t{layout.extents} * sizeof(layout::SharedU32), &at);
  layout.acknowledged = Take(uint64_t{layout.extents} * sizeof(layout::SharedU32), &at);
  layout.manifest = Take(manifest_bytes, &at);
  layout.commit = Take(commit_bytes, &at);
  layout.older = Take(older_count * sizeof(AttemptId), &at);
  layout.trash = Take(trash_count * kNameBytes, &at);
  // Whole pages, as the kernel gives them: what is accounted is what is taken.
  layout.bytes = layout::AlignUp(at, static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)));
  return layout;
}

void CopyName(const std::string& name, char* out, size_t bytes) {
  HOLDFAST_CHECK(name.size() < bytes, "names are checked before a table is built");
  std::memcpy(out, name.data(), name.size());
}

mode_t CurrentUmask() {
  // umask(2) can only be read by setting it, which another thread's open would see; /proc tells it
  // without.
  constexpr mode_t kUsual = 022;
  const base::UniqueFd status(
      sys::OpenOwned(AT_FDCWD, "/proc/self/status", O_RDONLY | O_CLOEXEC, 0));
  if (!status.valid()) return kUsual;
  char text[1024];  // it is the second line
  const ssize_t bytes = sys::Sys().read(status.get(), text, sizeof(text) - 1);
  if (bytes <= 0) return kUsual;
  text[bytes] = '\0';
  const char* const line = std::strstr(text, "\nUmask:");
  unsigned value = kUsual;
  if (line != nullptr) (void)std::sscanf(line, "\nUmask: %o", &value);
  return static_cast<mode_t>(value);
}

// ftruncate beyond the limit does not only fail, it sends SIGXFSZ, which ends the process.
absl::Status CheckFileSizeLimit(uint64_t bytes) {
  rlimit limit{};
  if (sys::Sys().getrlimit(RLIMIT_FSIZE, &limit) != 0 || bytes <= limit.rlim_cur)
    return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("size control memory: ", bytes,
                                                   " bytes are above the file size limit of ",
                                                   limit.rlim_cur, "; raise it (ulimit -f)"));
}

}  // namespace

uint64_t ControlBytes(const SavePlan& plan, const format::ManifestTemplate& manifest,
                      const format::CommitTemplate& commit, uint64_t older_count) {
  return LayOut(plan, manifest.text.size(), commit.text.size(), older_count, 0).bytes;
}

absl::StatusOr<std::unique_ptr<JobTable>> JobTable::Map(uint64_t bytes) {
  std::unique_ptr<JobTable> table(new JobTable());
  const auto& sys = sys::Sys();
  HOLDFAST_ASSIGN_OR_RETURN(table->fd_, base::CreateMemfd("holdfast-job", "control memory"));
  HOLDFAST_RETURN_IF_ERROR(CheckFileSizeLimit(bytes));
  if (sys.ftruncate(table->fd(), static_cast<off_t>(bytes)) != 0) {
    return base::ErrnoStatus("size", "control memory", errno);
  }
  // A shrunk file would turn the worker's next access into a SIGBUS.
  if (sys.fcntl(table->fd(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return base::ErrnoStatus("seal", "control memory", errno);
  }
  void* memory = sys.mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, table->fd(), 0);
  if (memory == MAP_FAILED) return base::ErrnoStatus("map", "control memory", errno);
  table->bytes_ = bytes;
  table->job_ = new (memory) layout::Job();
  sys.madvise(memory, bytes, MADV_DONTFORK);
  table->job_->table_bytes = bytes;
  return table;
}

JobTable::~JobTable() {
  // In a foreign child something else may be mapped there by now.
  if (job_ != nullptr && guard_.InCreator()) sys::Sys().munmap(job_, bytes_);
}

void JobTable::FillCommon(const JobParameters& parameters) {
  job_->kind = parameters.kind;
  job_->flags = parameters.flags;
  job_->launcher = parameters.launcher;
  job_->engine = parameters.engine;
  job_->queue_depth = parameters.queue_depth;
  job_->pwrite_threads = parameters.pwrite_threads;
  job_->umask = CurrentUmask();
  job_->attempt = parameters.attempt;
  job_->rank = parameters.rank;
  job_->world_size = parameters.world_size;
  job_->step = parameters.step;
  job_->arena_bytes = parameters.arena_bytes;
  job_->qos = parameters.qos;
  if (parameters.streams) layout::Claim(job_, layout::Written::kReleased);
  job_->time_stalled_max_ns = parameters.time_stalled_max_ns;
  job_->time_ranks_max_ns = parameters.time_ranks_max_ns;
  job_->time_liveness_max_ns = parameters.time_liveness_max_ns;
  CopyName(parameters.target, job_->target, sizeof(job_->target));
  CopyName(parameters.partial, job_->partial, sizeof(job_->partial));
}

absl::StatusOr<std::unique_ptr<JobTable>> JobTable::ForSave(
    const JobParameters& parameters, const SavePlan& plan, const format::ManifestTemplate& manifest,
    const format::CommitTemplate& commit) {
  const Layout layout =
      LayOut(plan, manifest.text.size(), commit.text.size(), parameters.older.size(), 0);
  HOLDFAST_ASSIGN_OR_RETURN(std::unique_ptr<JobTable> table, Map(layout.bytes));
  table->FillCommon(parameters);
  layout::Job* job = table->job_;
  job->file_count = static_cast<uint32_t>(plan.files.size());
  job->extent_count = layout.extents;
  job->piece_count = layout.pieces;
  job->tensor_count = static_cast<uint32_t>(plan.tensors.size());
  job->files = layout.files;
  job->extents = layout.extent_range;
  job->pieces = layout.piece_range;
  job->published = layout.published;
  job->acknowledged = layout.acknowledged;
  job->manifest_template = layout.manifest;
  job->older = layout.older;
  job->trash = layout.trash;
  job->slots = manifest.slots;
  job->commit_template = layout.commit;
  job->commit_slots = commit.slots;
  const bool files_only = (parameters.flags & layout::kFilesOnly) != 0;
  CopyName(files_only
               ? format::ManifestName(parameters.rank, parameters.world_size, parameters.attempt)
               : format::ManifestName(parameters.rank, parameters.world_size),
           job->manifest, sizeof(job->manifest));
  CopyName(format::ManifestPrefix(), job->manifest_prefix, sizeof(job->manifest_prefix));
  CopyName(format::ManifestSuffix(parameters.world_size), job->manifest_suffix,
           sizeof(job->manifest_suffix));
  std::memset(layout::At<char>(job, layout.published), 0xff, layout.published.bytes);
  std::memset(layout::At<char>(job, layout.acknowledged), 0xff, layout.acknowledged.bytes);
  std::memcpy(layout::Manifest(job), manifest.text.data(), manifest.text.size());
  std::memcpy(layout::CommitRecord(job), commit.text.data(), commit.text.size());
  std::copy(parameters.older.begin(), parameters.older.end(), layout::Older(job));
  table->sources_.reserve(layout.pieces);
  table->FillFiles(plan, manifest);
  return table;
}

void JobTable::FillFiles(const SavePlan& plan, const format::ManifestTemplate& manifest) {
  uint32_t extent_at = 0;
  uint32_t piece_at = 0;
  for (uint32_t f = 0; f < plan.files.size(); ++f) {
    const PlannedFile& planned = plan.files[f];
    layout::File& file = layout::Files(job_)[f];
    CopyName(planned.name, file.name, sizeof(file.name));
    file.bytes = planned.bytes;
    file.extent_first = extent_at;
    file.extent_count = ExtentCount(planned.bytes);
    file.root_slot = f < manifest.file_roots.size() ? manifest.file_roots[f] : 0;
    auto segment = planned.segments.begin();
    for (uint32_t chunk = 0; chunk < file.extent_count; ++chunk, ++extent_at) {
      layout::Extent& extent = layout::Extents(job_)[extent_at];
      const uint64_t begin = uint64_t{chunk} * kChunkBytes;
      const uint64_t end = std::min<uint64_t>(begin + kChunkBytes, planned.bytes);
      extent.file = f;
      extent.file_offset = begin;
      extent.bytes = static_cast<uint32_t>(end - begin);
      extent.piece_first = piece_at;
      extent.digest_slot = f < manifest.chunk_digests.size() ? manifest.chunk_digests[f][chunk] : 0;
      // Segments are in order and without gaps: walk on until one reaches past this chunk.
      while (segment != planned.segments.end() && segment->file_offset < end) {
        const uint64_t from = std::max(begin, segment->file_offset);
        const uint64_t to = std::min(end, segment->file_offset + segment->bytes);
        if (to > from) {
          layout::Piece& piece = layout::Pieces(job_)[piece_at++];
          const bool literal = segment->tensor == Segment::kLiteral;
          piece.tensor = literal ? Failure::kNoIndex : segment->tensor;
          piece.offset = static_cast<uint32_t>(from - begin);
          piece.bytes = static_cast<uint32_t>(to - from);
          piece.has_digest = piece.bytes != extent.bytes ? 1 : 0;
          if (!literal && piece.has_digest != 0 && segment->tensor < manifest.tensors.size()) {
            const PlannedTensor& tensor = plan.tensors[segment->tensor];
            const format::TensorSlots& slots = manifest.tensors[segment->tensor];
            piece.digest_slot = tensor.begin / kChunkBytes == chunk ? slots.head : slots.tail;
          }
          const char* data =
              literal ? segment->literal.data() : static_cast<const char*>(segment->data);
          Device* device =
              segment->device != nullptr && !segment->device->is_host() ? segment->device : nullptr;
          if (data != nullptr) data += from - segment->file_offset;
          sources_.push_back({.data = data, .device = literal ? nullptr : device});
        }
        if (segment->file_offset + segment->bytes > end) break;
        ++segment;
      }
      extent.piece_count = piece_at - extent.piece_first;
    }
  }
  HOLDFAST_CHECK(extent_at == job_->extent_count && piece_at == job_->piece_count,
                 "the table's arrays were sized by the same plan");
}

absl::StatusOr<std::unique_ptr<JobTable>> JobTable::ForDelete(
    const JobParameters& parameters, const std::vector<std::string>& names) {
  const Layout layout = LayOut(SavePlan(), 0, 0, 0, names.size());
  HOLDFAST_ASSIGN_OR_RETURN(std::unique_ptr<JobTable> table, Map(layout.bytes));
  table->FillCommon(parameters);
  layout::Job* job = table->job_;
  job->kind = layout::JobKind::kDelete;
  job->files = layout.files;
  job->extents = layout.extent_range;
  job->pieces = layout.piece_range;
  job->published = layout.published;
  job->acknowledged = layout.acknowledged;
  job->manifest_template = layout.manifest;
  job->older = layout.older;
  job->trash = layout.trash;
  char* trash = layout::At<char>(job, layout.trash);
  for (size_t i = 0; i < names.size(); ++i) CopyName(names[i], trash + i * kNameBytes, kNameBytes);
  return table;
}

}  // namespace holdfast::writer
