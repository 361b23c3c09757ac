// CheckpointReader: opening a checkpoint, and loading tensors from it.
#include <algorithm>
#include <optional>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "holdfast/load.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "runtime/base/unique_fd.h"
#include "runtime/directory/completeness.h"
#include "runtime/directory/entries.h"
#include "runtime/directory/single_files.h"
#include "runtime/format/directory_names.h"
#include "runtime/format/file_names.h"
#include "runtime/format/manifest.h"
#include "runtime/load/chunk_stream.h"
#include "runtime/load/copy_out.h"
#include "runtime/load/safetensors_file.h"
#include "runtime/load/tensor_reads.h"
#include "runtime/sys/system.h"

namespace holdfast {

using load::CopyOut;
using load::ReadPlan;
using load::StreamBlock;
using load::StreamBuffer;
using load::StreamFile;
using load::WantedTensor;

class CheckpointReader::Impl {
 public:
  std::string directory;                      // that contains the files
  std::optional<directory::Identity> opened;  // the directory that `tensors` are of, if known
  /// Of OpenFile: the file's name, and the identity against a later file of the same name.
  std::pair<std::string, std::optional<directory::Identity>> opened_file;
  bool follow_symlink = false;     // a file named by the caller, not by a manifest
  std::vector<std::string> files;  // names, by file index
  std::vector<PlannedTensor> tensors;
  std::unordered_map<std::string, uint32_t> by_name;
  std::optional<format::Manifest> manifest;                  // of all opened ranks, merged
  std::vector<format::CommitRecord::RankManifest> recorded;  // by rank; empty: no commit record
  base::ForkGuard guard;

  /// Adds a rank's files and tensors. Of two tensors of one name this rank's tensor counts.
  void TakeManifest(format::Manifest read) {
    std::vector<format::Manifest::File> read_files = std::move(read.files);
    std::vector<format::Manifest::Tensor> read_tensors = std::move(read.tensors);
    read.files.clear();
    read.tensors.clear();
    if (!manifest.has_value()) manifest = std::move(read);
    const uint32_t first = static_cast<uint32_t>(files.size());
    for (format::Manifest::File& file : read_files) {
      files.push_back(file.name);
      manifest->files.push_back(std::move(file));
    }
    for (format::Manifest::Tensor& tensor : read_tensors) {
      tensor.file += first;
      const auto [at, is_new] =
          by_name.try_emplace(tensor.name, static_cast<uint32_t>(tensors.size()));
      if (is_new) {
        tensors.emplace_back();
        manifest->tensors.emplace_back();
      }
      tensors[at->second] = {.name = tensor.name,
                             .dtype = tensor.dtype,
                             .shape = tensor.shape,
                             .file = tensor.file,
                             .begin = tensor.begin,
                             .end = tensor.end};
      manifest->tensors[at->second] = std::move(tensor);
    }
  }

  void IndexNames() {
    by_name.reserve(tensors.size());
    for (uint32_t i = 0; i < tensors.size(); ++i) by_name.emplace(tensors[i].name, i);
  }

  absl::Status NoteDirectory(int fd) {
    HOLDFAST_ASSIGN_OR_RETURN(opened, directory::IdentityOf(fd, directory));
    return absl::OkStatus();
  }

  /// Opens the directory of the files. \error kAborted when the path leads to another directory by
  /// now: the places of the tensors are not valid there.
  absl::StatusOr<base::UniqueFd> OpenFiles() const {
    HOLDFAST_ASSIGN_OR_RETURN(base::UniqueFd fd, directory::OpenDirectory(directory));
    if (!opened.has_value()) return fd;
    HOLDFAST_ASSIGN_OR_RETURN(const directory::Identity found,
                              directory::IdentityOf(fd.get(), directory));
    if (found == *opened) return fd;
    return load::ReplacedSince(directory);
  }

  absl::StatusOr<std::vector<WantedTensor>> Find(absl::Span<const TensorTarget> targets) const;
  absl::StatusOr<LoadReport> Load(absl::Span<const TensorTarget> targets,
                                  const LoadOptions& options) const;
  absl::Status Stream(const ReadPlan& plan, absl::Span<const TensorTarget> targets,
                      const LoadOptions& options, LoadReport* report) const;
};

namespace {

/// Registers the buffer with the devices of a load, and drops the registration at the end.
class BufferRegistration {
 public:
  BufferRegistration(absl::Span<const TensorTarget> targets, StreamBuffer* buffer)
      : buffer_(buffer) {
    std::set<Device*> devices;
    for (const TensorTarget& target : targets) {
      if (target.device != nullptr && !target.device->is_host()) devices.insert(target.device);
    }
    for (Device* device : devices) {
      // Registration only adds speed: copies from unregistered memory are correct too.
      if (device->RegisterMemory(buffer->base(), buffer->bytes()).ok()) {
        registered_.push_back(device);
      }
    }
  }
  ~BufferRegistration() {
    for (Device* device : registered_) {
      // After a copy that never ended, the memory stays registered and mapped. So does memory with
      // a failed unregistration.
      if (buffer_->abandoned()) continue;
      if (!device->UnregisterMemory(buffer_->base(), buffer_->bytes()).ok()) buffer_->Abandon();
    }
  }
  BufferRegistration(const BufferRegistration&) = delete;
  BufferRegistration& operator=(const BufferRegistration&) = delete;

 private:
  StreamBuffer* buffer_;
  std::vector<Device*> registered_;
};

absl::Status NoRank(const std::string& path, uint32_t rank, uint32_t ranks) {
  return absl::NotFoundError(absl::StrCat("open ", path, ": it has no rank ", rank, ", only ",
                                          base::Counted(ranks, "rank"), " from 0"));
}

/// A file with an attempt id is of that save alone.
absl::StatusOr<directory::FileOrigin> OriginOf(int directory, const std::string& name) {
  HOLDFAST_ASSIGN_OR_RETURN(const base::UniqueFd fd,
                            directory::OpenFile(directory, name, /*follow_symlink=*/false));
  HOLDFAST_ASSIGN_OR_RETURN(const load::SafetensorsFile file,
                            load::ReadSafetensorsFile(fd.get(), name));
  return directory::FileOrigin{.attempt = file.attempt_id(), .certain = !file.attempt().empty()};
}

/// Returns the file's own manifest, or the rank manifest that names the file.
absl::StatusOr<format::Manifest> FindManifestOf(int directory, const directory::PathParts& file) {
  HOLDFAST_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                            directory::ListNames(directory, file.directory));
  directory::SingleFiles files(directory, names, OriginOf);
  if (files.HasManifest(file.name)) {
    HOLDFAST_ASSIGN_OR_RETURN(auto own, files.Find(file.name));
    // The header of a file says its length: a whole file of another length is another program's.
    if (own.has_value() && own->manifest.files.front().bytes == own->entry.bytes)
      return std::move(own->manifest);
  }
  return directory::FindManifestOf(directory, file.directory, file.name);
}

}  // namespace

absl::StatusOr<std::vector<WantedTensor>> CheckpointReader::Impl::Find(
    absl::Span<const TensorTarget> targets) const {
  std::vector<WantedTensor> wanted;
  std::unordered_set<uint32_t> taken;
  for (uint32_t i = 0; i < targets.size(); ++i) {
    const TensorTarget& target = targets[i];
    const std::string object = absl::StrCat("load tensor \"", target.name, "\"");
    const auto found = by_name.find(target.name);
    if (found == by_name.end()) {
      return absl::NotFoundError(
          absl::StrCat(object, ": there is none of that name in ", directory));
    }
    const PlannedTensor& tensor = tensors[found->second];
    const uint64_t tensor_bytes = tensor.end - tensor.begin;
    if (target.begin.has_value()) {
      if (*target.begin > tensor_bytes || target.bytes > tensor_bytes - *target.begin) {
        return absl::InvalidArgumentError(absl::StrCat(object, ": bytes [", *target.begin, ", ",
                                                       *target.begin + target.bytes,
                                                       ") of the tensor's ", tensor_bytes));
      }
    } else if (target.bytes != tensor_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(object, ": the target has ", target.bytes,
                                                     " bytes, the tensor ", tensor_bytes));
    }
    if (target.data == nullptr && target.bytes != 0) {
      return absl::InvalidArgumentError(absl::StrCat(object, ": the target is null"));
    }
    if (!target.begin.has_value() && !taken.insert(found->second).second) {
      return absl::InvalidArgumentError(absl::StrCat(object, ": it is asked for twice"));
    }
    wanted.push_back({.tensor = found->second,
                      .target = i,
                      .begin = target.begin.value_or(0),
                      .bytes = target.bytes});
  }
  return wanted;
}

absl::StatusOr<LoadReport> CheckpointReader::Impl::Load(absl::Span<const TensorTarget> targets,
                                                        const LoadOptions& options) const {
  if (!guard.InCreator()) {
    return absl::FailedPreconditionError(
        "load: this reader was opened in another process (before a fork); open it anew here");
  }
  HOLDFAST_RETURN_IF_ERROR(load::CheckReadOptions(options.buffer_bytes, options.threads));
  const uint64_t started = sys::NowNs();
  HOLDFAST_ASSIGN_OR_RETURN(const std::vector<WantedTensor> wanted, Find(targets));
  LoadReport report;
  for (const TensorTarget& target : targets) report.bytes += target.bytes;
  report.verified = options.verify && manifest.has_value();
  const ReadPlan plan = load::PlanReads(tensors, wanted, report.verified ? &*manifest : nullptr);
  if (!plan.reads.empty()) {
    HOLDFAST_RETURN_IF_ERROR(Stream(plan, targets, options, &report));
  }
  report.seconds = static_cast<double>(sys::NowNs() - started) / 1e9;
  return report;
}

absl::Status CheckpointReader::Impl::Stream(const ReadPlan& plan,
                                            absl::Span<const TensorTarget> targets,
                                            const LoadOptions& options, LoadReport* report) const {
  HOLDFAST_ASSIGN_OR_RETURN(const base::UniqueFd fd, OpenFiles());
  std::vector<StreamFile> sources;
  std::vector<std::string> paths;
  for (const std::string& name : files) {
    sources.push_back({.directory = fd.get(), .name = name, .follow_symlink = follow_symlink});
    if (name == opened_file.first) sources.back().identity = opened_file.second;
    paths.push_back(absl::StrCat(directory, "/", name));
  }
  HOLDFAST_ASSIGN_OR_RETURN(StreamBuffer buffer, StreamBuffer::Create(load::SlotsFor(
                                                     options.buffer_bytes, plan.reads.size())));
  const BufferRegistration registration(targets, &buffer);
  CopyOut copy_out(plan, report->verified, targets, paths);
  load::StreamOptions stream;
  // No more threads than reads: a small load starts none.
  stream.threads = static_cast<uint32_t>(
      std::min<uint64_t>(load::ThreadsFor(options.threads), plan.reads.size()));
  stream.engine = options.engine;
  stream.direct_io = options.direct_io;
  const auto streamed =
      load::StreamChunks(sources, plan.ranges, stream, &buffer,
                         [&copy_out](const StreamBlock& block) { return copy_out.Sink(block); });
  HOLDFAST_RETURN_IF_ERROR(copy_out.status());
  HOLDFAST_RETURN_IF_ERROR(streamed.status());
  report->bytes_read = streamed->bytes_read;
  report->engine = streamed->engine;
  report->engine_reason = streamed->engine_reason;
  report->direct_io = streamed->direct_io;
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<CheckpointReader>> CheckpointReader::Open(const std::string& path,
                                                                         uint32_t rank) {
  HOLDFAST_ASSIGN_OR_RETURN(const base::UniqueFd fd, directory::OpenDirectory(path));
  HOLDFAST_ASSIGN_OR_RETURN(
      directory::CheckpointFiles checkpoint,
      directory::ReadCheckpoint(fd.get(), path, {.keep_rank = rank, .trust_record = true}));
  if (checkpoint.manifests_found == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("open ", path, ": no manifest is there: no complete checkpoint"));
  }
  HOLDFAST_RETURN_IF_ERROR(directory::ToStatus(checkpoint.findings, path));
  if (checkpoint.manifests.empty()) return NoRank(path, rank, checkpoint.manifests_found);
  auto impl = std::make_unique<Impl>();
  impl->directory = path;
  HOLDFAST_RETURN_IF_ERROR(impl->NoteDirectory(fd.get()));
  impl->TakeManifest(std::move(checkpoint.manifests.front()));
  if (checkpoint.record.has_value()) impl->recorded = std::move(checkpoint.record->manifests);
  return std::unique_ptr<CheckpointReader>(new CheckpointReader(std::move(impl)));
}

absl::Status CheckpointReader::Add(uint32_t rank) {
  if (!impl_->manifest.has_value()) {
    return absl::FailedPreconditionError(
        absl::StrCat("open ", impl_->directory, ": its files have no manifest"));
  }
  const format::Manifest& opened = *impl_->manifest;
  if (rank >= opened.world_size) return NoRank(impl_->directory, rank, opened.world_size);
  HOLDFAST_ASSIGN_OR_RETURN(const base::UniqueFd fd, impl_->OpenFiles());
  std::optional<Digest> digest;
  if (rank < impl_->recorded.size()) digest = impl_->recorded[rank].digest;
  const std::string name = format::ManifestName(rank, opened.world_size);
  HOLDFAST_ASSIGN_OR_RETURN(format::Manifest manifest,
                            directory::ReadManifest(fd.get(), impl_->directory, name, digest));
  if (manifest.attempt != opened.attempt) {
    return absl::FailedPreconditionError(
        absl::StrCat("open ", impl_->directory, "/", name, ": it is of another save"));
  }
  impl_->TakeManifest(std::move(manifest));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<CheckpointReader>> CheckpointReader::OpenFile(
    const std::string& path) {
  const directory::PathParts parts = directory::SplitPath(path);
  HOLDFAST_ASSIGN_OR_RETURN(const base::UniqueFd directory,
                            directory::OpenDirectory(parts.directory));
  HOLDFAST_ASSIGN_OR_RETURN(
      const base::UniqueFd fd,
      directory::OpenFile(directory.get(), parts.name, /*follow_symlink=*/true));
  HOLDFAST_ASSIGN_OR_RETURN(load::SafetensorsFile file, load::ReadSafetensorsFile(fd.get(), path));
  auto impl = std::make_unique<Impl>();
  impl->directory = parts.directory;
  HOLDFAST_RETURN_IF_ERROR(impl->NoteDirectory(directory.get()));
  HOLDFAST_ASSIGN_OR_RETURN(const directory::Identity opened,
                            directory::IdentityOf(fd.get(), path));
  impl->opened_file = {parts.name, opened};
  auto manifest = FindManifestOf(directory.get(), parts);
  const std::string name = directory::NameOf(directory.get(), parts.directory);
  if (manifest.ok() && !format::IsUncommittedName(name)) {
    impl->TakeManifest(*std::move(manifest));
  } else if (!file.attempt().empty()) {
    // Files of a save that never committed are no checkpoint, however complete they look.
    return absl::FailedPreconditionError(absl::StrCat(
        "open ", path, ": written by a save that did not end: ",
        manifest.ok() ? "its directory is partial" : std::string(manifest.status().message())));
  } else {
    impl->follow_symlink = true;
    impl->files.push_back(parts.name);
    impl->tensors = std::move(file.header.tensors);
    impl->IndexNames();
  }
  return std::unique_ptr<CheckpointReader>(new CheckpointReader(std::move(impl)));
}

absl::StatusOr<std::unique_ptr<CheckpointReader>> CheckpointReader::OpenManifest(
    const std::string& path, const std::string& manifest_name,
    const std::optional<Digest>& digest) {
  HOLDFAST_ASSIGN_OR_RETURN(const base::UniqueFd fd, directory::OpenDirectory(path));
  HOLDFAST_ASSIGN_OR_RETURN(format::Manifest manifest,
                            directory::ReadManifest(fd.get(), path, manifest_name, digest));
  auto impl = std::make_unique<Impl>();
  impl->directory = path;
  HOLDFAST_RETURN_IF_ERROR(impl->NoteDirectory(fd.get()));
  impl->TakeManifest(std::move(manifest));
  return std::unique_ptr<CheckpointReader>(new CheckpointReader(std::move(impl)));
}

absl::StatusOr<std::unique_ptr<CheckpointReader>> CheckpointReader::OpenPlaces(
    const std::string& path, std::vector<std::string> files, std::vector<PlannedTensor> tensors) {
  for (const std::string& file : files) {
    const char* const wrong = format::WrongComponent(file);
    if (wrong != nullptr) {
      return absl::InvalidArgumentError(absl::StrCat("open ", path, "/", file, ": ", wrong));
    }
  }
  for (const PlannedTensor& tensor : tensors) {
    if (tensor.file < files.size() && tensor.begin <= tensor.end) continue;
    return absl::InvalidArgumentError(absl::StrCat("open ", path, ": tensor \"", tensor.name,
                                                   "\" is in no file or ends before it begins"));
  }
  auto impl = std::make_unique<Impl>();
  impl->directory = path;
  impl->follow_symlink = true;
  impl->files = std::move(files);
  impl->tensors = std::move(tensors);
  impl->IndexNames();
  if (impl->by_name.size() != impl->tensors.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("open ", path, ": a tensor's name occurs twice"));
  }
  return std::unique_ptr<CheckpointReader>(new CheckpointReader(std::move(impl)));
}

CheckpointReader::CheckpointReader(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CheckpointReader::~CheckpointReader() = default;

const std::vector<PlannedTensor>& CheckpointReader::tensors() const { return impl_->tensors; }

const std::vector<std::string>& CheckpointReader::files() const { return impl_->files; }

uint64_t CheckpointReader::step() const { return impl_->manifest ? impl_->manifest->step : 0; }

uint32_t CheckpointReader::world_size() const {
  return impl_->manifest ? impl_->manifest->world_size : 1;
}

AttemptId CheckpointReader::attempt() const {
  return impl_->manifest ? impl_->manifest->attempt : AttemptId{};
}

absl::StatusOr<LoadReport> CheckpointReader::Load(absl::Span<const TensorTarget> targets,
                                                  const LoadOptions& options) const {
  return impl_->Load(targets, options);
}

}  // namespace holdfast
