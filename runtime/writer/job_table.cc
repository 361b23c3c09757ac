#include "runtime/writer/job_table.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

#include "absl/strings/str_cat.h"
#include "holdfast/watch.h"
#include "runtime/base/check.h"
#include "runtime/base/memfd.h"
#include "runtime/base/status.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"
#include "runtime/sys/text_file.h"

namespace holdfast::writer {
namespace {

constexpr uint64_t kTableAlignment = 64;

/// Counts and offsets of all arrays of one table.
struct Layout {
  uint32_t extents = 0;
  uint32_t pieces = 0;
  layout::Range files, extent_range, piece_range, published, acknowledged, manifest, commit, older,
      trash;
  uint64_t bytes = 0;
};

layout::Range Take(uint64_t bytes, uint64_t* at) {
  const layout::Range range{.offset = *at, .bytes = bytes};
  *at = AlignUp(*at + bytes, kTableAlignment);
  return range;
}

uint32_t ExtentCount(uint64_t file_bytes) {
  return static_cast<uint32_t>((file_bytes + kChunkBytes - 1) / kChunkBytes);
}

Layout LayOut(const format::PackedPlan& plan, uint64_t manifest_bytes, uint64_t commit_bytes,
              uint64_t older_count, uint64_t trash_count) {
  Layout layout;
  for (const format::PackedFile& file : plan.files) layout.extents += ExtentCount(file.bytes);
  layout.pieces = static_cast<uint32_t>(plan.piece_count);
  uint64_t at = AlignUp(sizeof(layout::Job), kTableAlignment);
  layout.files = Take(plan.files.size() * sizeof(layout::File), &at);
  layout.extent_range = Take(uint64_t{layout.extents} * sizeof(layout::Extent), &at);
  layout.piece_range = Take(uint64_t{layout.pieces} * sizeof(layout::Piece), &at);
  layout.published = Take(uint64_t{layout.extents} * sizeof(layout::SharedU32), &at);
  layout.acknowledged = Take(uint64_t{layout.extents} * sizeof(layout::SharedU32), &at);
  layout.manifest = Take(manifest_bytes, &at);
  layout.commit = Take(commit_bytes, &at);
  layout.older = Take(older_count * sizeof(AttemptId), &at);
  layout.trash = Take(trash_count * kNameBytes, &at);
  // Whole pages, as the kernel allocates, so that accounting matches the memory.
  layout.bytes = AlignUp(at, static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)));
  return layout;
}

void CopyName(const std::string& name, char* out, size_t bytes) {
  HOLDFAST_CHECK(name.size() < bytes, "names are checked before a table is built");
  std::memcpy(out, name.data(), name.size());
}

std::string ManifestNameOf(const JobParameters& parameters, const format::PackedPlan& plan) {
  if ((parameters.flags & layout::kSingleFile) != 0) {
    return format::CompanionName({.file = std::string(plan.files[0].name),
                                  .kind = format::CompanionKind::kManifest,
                                  .attempt = parameters.attempt});
  }
  if ((parameters.flags & layout::kFilesOnly) != 0)
    return format::ManifestName(parameters.rank, parameters.world_size, parameters.attempt);
  return format::ManifestName(parameters.rank, parameters.world_size);
}

mode_t CurrentUmask() {
  // umask(2) can only be read by setting it, and another thread's open would see the set value;
  // /proc has no such effect.
  constexpr mode_t kUsual = 022;
  char text[1024];  // the second line holds the mask
  (void)sys::ReadTextFile("/proc/self/status", text, sizeof(text));
  const char* const value = sys::FindField(text, "Umask");
  return value != nullptr ? static_cast<mode_t>(std::strtoul(value, nullptr, 8)) : kUsual;
}

// ftruncate beyond the limit not only fails: it sends SIGXFSZ, which ends the process.
absl::Status CheckFileSizeLimit(uint64_t bytes) {
  rlimit limit{};
  if (sys::Sys().getrlimit(RLIMIT_FSIZE, &limit) != 0 || bytes <= limit.rlim_cur)
    return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("size control memory: ", bytes,
                                                   " bytes are above the file size limit of ",
                                                   limit.rlim_cur, "; raise it (ulimit -f)"));
}

}  // namespace

absl::StatusOr<uint64_t> ControlBytes(const SaveContents& contents, uint64_t older_count) {
  const uint64_t manifest_bytes = format::MeasureManifest(contents.manifest, *contents.plan).bytes;
  HOLDFAST_RETURN_IF_ERROR(format::CheckManifestBytes(manifest_bytes));
  return LayOut(*contents.plan, manifest_bytes, contents.commit.text.size(), older_count, 0).bytes;
}

absl::StatusOr<std::unique_ptr<JobTable>> JobTable::Map(uint64_t bytes) {
  std::unique_ptr<JobTable> table(new JobTable());
  const auto& sys = sys::Sys();
  HOLDFAST_ASSIGN_OR_RETURN(table->fd_, base::CreateMemfd(kJobTableName, "control memory"));
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
  parameters_ = parameters;
  limits_.world_size = parameters.world_size;
  job_->kind = parameters.kind;
  job_->flags = parameters.flags;
  CopyWorkerOptions(parameters, job_);
  job_->umask = CurrentUmask();
  job_->attempt = parameters.attempt;
  job_->step = parameters.step;
  if (parameters.streams) layout::Claim(job_, layout::Written::kReleased);
  job_->time_stalled_max_ns = parameters.time_stalled_max_ns;
  job_->time_ranks_max_ns = parameters.time_ranks_max_ns;
  job_->time_liveness_max_ns = parameters.time_liveness_max_ns;
  CopyName(parameters.target, job_->target, sizeof(job_->target));
  CopyName(parameters.partial, job_->partial, sizeof(job_->partial));
}

absl::StatusOr<std::unique_ptr<JobTable>> JobTable::ForSave(const JobParameters& parameters,
                                                            const SaveContents& contents) {
  const format::PackedPlan& plan = *contents.plan;
  const format::CommitTemplate& commit = contents.commit;
  const format::ManifestPlaces places = format::MeasureManifest(contents.manifest, plan);
  const Layout layout = LayOut(plan, places.bytes, commit.text.size(), parameters.older.size(), 0);
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
  job->slots = places.slots;
  job->commit_template = layout.commit;
  job->commit_slots = commit.slots;
  CopyName(ManifestNameOf(parameters, plan), job->manifest, sizeof(job->manifest));
  CopyName(format::ManifestPrefix(), job->manifest_prefix, sizeof(job->manifest_prefix));
  CopyName(format::ManifestSuffix(parameters.world_size), job->manifest_suffix,
           sizeof(job->manifest_suffix));
  std::memset(layout::At<char>(job, layout.published), 0xff, layout.published.bytes);
  std::memset(layout::At<char>(job, layout.acknowledged), 0xff, layout.acknowledged.bytes);
  std::memcpy(layout::CommitRecord(job), commit.text.data(), commit.text.size());
  std::copy(parameters.older.begin(), parameters.older.end(), layout::Older(job));
  table->plan_ = contents.plan;
  table->manifest_ = contents.manifest;
  table->limits_.file_count = job->file_count;
  table->limits_.tensor_count = job->tensor_count;
  table->shared_extents_ = layout::Extents(job);
  table->shared_pieces_ = layout::Pieces(job);
  table->shared_manifest_ = layout::Manifest(job);
  table->manifest_bytes_ = layout.manifest.bytes;
  table->extents_.resize(layout.extents);
  table->pieces_.reserve(layout.pieces);
  table->FillFiles(contents.sources, places);
  if (layout.extents == 0) table->WriteManifest();
  return table;
}

/// Cuts runs of files at the chunks' borders, in order.
class JobTable::Filler {
 public:
  explicit Filler(JobTable* table) : table_(*table) {}

  void BeginFile(uint32_t extent_first) {
    extent_first_ = extent_first;
    at_ = 0;
  }

  /// Adds the next bytes of the file, of a tensor or of a literal.
  void Add(uint64_t bytes, uint32_t tensor, PieceSource source) {
    while (bytes != 0) {
      layout::Extent& extent = table_.extents_[extent_first_ + at_ / kChunkBytes];
      const auto offset = static_cast<uint32_t>(at_ % kChunkBytes);
      const auto part = static_cast<uint32_t>(std::min<uint64_t>(bytes, kChunkBytes - offset));
      if (offset == 0) extent.piece_first = pieces();
      ++extent.piece_count;
      const bool has_digest = part != extent.bytes;
      table_.shared_pieces_[pieces()] = {.tensor = tensor,
                                         .offset = offset,
                                         .bytes = part,
                                         .has_digest = has_digest ? 1u : 0u,
                                         .digest = {}};
      table_.pieces_.push_back({.data = source.data,
                                .device = source.device,
                                .tensor = tensor,
                                .offset = offset,
                                .bytes = part,
                                .has_digest = has_digest});
      if (source.data != nullptr) source.data += part;
      at_ += part;
      bytes -= part;
    }
  }

  uint32_t pieces() const { return static_cast<uint32_t>(table_.pieces_.size()); }

 private:
  JobTable& table_;
  uint32_t extent_first_ = 0;
  uint64_t at_ = 0;  // in the file
};

void JobTable::FillFiles(const Sources& sources, const format::ManifestPlaces& places) {
  const format::PackedPlan& plan = *plan_;
  Filler filler(this);
  uint32_t extent_at = 0;
  extent_first_.reserve(plan.files.size());
  for (uint32_t f = 0; f < plan.files.size(); ++f) {
    const format::PackedFile& packed = plan.files[f];
    layout::File& file = layout::Files(job_)[f];
    CopyName(packed.name, file.name, sizeof(file.name));
    file.bytes = packed.bytes;
    file.extent_first = extent_at;
    file.extent_count = ExtentCount(packed.bytes);
    file.root_slot = places.file_roots[f];
    file.replicated = packed.replicated ? 1 : 0;
    limits_.bytes += packed.bytes;
    extent_first_.push_back(extent_at);
    for (uint64_t chunk = 0; chunk < file.extent_count; ++chunk, ++extent_at) {
      layout::Extent& extent = extents_[extent_at];
      extent.file = f;
      extent.file_offset = chunk * kChunkBytes;
      extent.bytes =
          static_cast<uint32_t>(std::min<uint64_t>(kChunkBytes, packed.bytes - extent.file_offset));
      extent.digest_slot = places.chunk_digests[f] + chunk * format::kChunkStride;
    }
    filler.BeginFile(file.extent_first);
    for (const format::PackedRun& run : packed.runs) {
      if (run.literal != format::PackedRun::kTensors) {
        filler.Add(plan.literals[run.literal].size(), Failure::kNoIndex,
                   {.data = sources.literals[run.literal], .device = nullptr});
      }
      for (uint32_t i = run.tensor_first; i < run.tensor_first + run.tensor_count; ++i)
        filler.Add(plan.tensors.end(i) - plan.tensors.begin(i), i, sources.tensors[i]);
    }
  }
  HOLDFAST_CHECK(extent_at == job_->extent_count && filler.pieces() == job_->piece_count,
                 "the table's arrays were sized by the same plan");
  std::copy(extents_.begin(), extents_.end(), shared_extents_);
}

/// The digests that the sealers have put into the table.
class JobTable::SealedDigests final : public format::ManifestDigests {
 public:
  explicit SealedDigests(const JobTable& table) : table_(table) {}

  Digest OfChunk(uint32_t file, uint64_t chunk) override {
    return table_.shared_extents_[table_.extent_first_[file] + chunk].sealed;
  }

  Digest OfPart(uint32_t tensor, uint64_t begin) override {
    const std::vector<StagedPiece>& pieces = table_.pieces_;
    // Tensors mostly stand in the files in the order of the table.
    while (next_ < pieces.size() && pieces[next_].tensor == Failure::kNoIndex) ++next_;
    const uint32_t file = table_.plan_->tensors.file(tensor);
    const layout::Extent& extent =
        table_.extents_[table_.extent_first_[file] + begin / kChunkBytes];
    const uint32_t offset = static_cast<uint32_t>(begin % kChunkBytes);
    const uint32_t last = extent.piece_first + extent.piece_count;
    if (next_ < extent.piece_first || next_ >= last || pieces[next_].tensor != tensor ||
        pieces[next_].offset != offset) {
      next_ = static_cast<uint32_t>(
          std::lower_bound(pieces.begin() + extent.piece_first, pieces.begin() + last, offset,
                           [](const StagedPiece& p, uint32_t at) { return p.offset < at; }) -
          pieces.begin());
    }
    return table_.shared_pieces_[next_++].digest;
  }

 private:
  const JobTable& table_;
  uint32_t next_ = 0;
};

void JobTable::WriteManifest() {
  SealedDigests digests(*this);
  const uint64_t bytes = format::WriteManifest(manifest_, *plan_, &digests, shared_manifest_);
  HOLDFAST_CHECK(bytes == manifest_bytes_, "a manifest is as long as was measured");
}

absl::StatusOr<std::unique_ptr<JobTable>> JobTable::ForDelete(
    const JobParameters& parameters, const std::vector<std::string>& names) {
  const Layout layout = LayOut(format::PackedPlan(), 0, 0, 0, names.size());
  HOLDFAST_ASSIGN_OR_RETURN(std::unique_ptr<JobTable> table, Map(layout.bytes));
  table->FillCommon(parameters);
  layout::Job* job = table->job_;
  job->kind = layout::JobKind::kDelete;
  table->limits_.file_count = static_cast<uint32_t>(names.size());
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
