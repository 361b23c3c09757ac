#include "runtime/directory/commit_file.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "runtime/base/clock.h"
#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"
#include "runtime/digest/digest.h"
#include "runtime/directory/entries.h"
#include "runtime/directory/rename.h"
#include "runtime/format/file_names.h"
#include "runtime/layout/job.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/retry.h"
#include "runtime/sys/system.h"
#include "runtime/worker/commit_record.h"
#include "runtime/worker/contents.h"

namespace holdfast::directory {
namespace {

constexpr size_t kBufferBytes = size_t{1} << 20;
constexpr char kDcpCommitFile[] = ".metadata";
// What a whole pickle of PyTorch's metadata has.
constexpr absl::string_view kPickleBegin = "\x80";
constexpr absl::string_view kPickleEnd = ".";
constexpr absl::string_view kDcpMetadataClass = "torch.distributed.checkpoint.metadata";
constexpr absl::string_view kDcpDataPrefix = "__";
constexpr absl::string_view kDcpDataSuffix = ".distcp";

absl::StatusOr<std::string> ReadManifestText(int directory, const std::string& path,
                                             const std::string& name) {
  auto text = ReadWholeFile(directory, name, format::kManifestBytesMax);
  if (!text.ok()) return base::Annotate(text.status(), absl::StrCat("commit ", path));
  return text;
}

absl::StatusOr<format::CommitFileDigest> DigestOfFile(int directory, const std::string& name) {
  HOLDFAST_ASSIGN_OR_RETURN(const base::UniqueFd fd,
                            OpenFile(directory, name, /*follow_symlink=*/false));
  std::string buffer(kBufferBytes, '\0');
  digest::Stream stream;
  for (uint64_t at = 0;;) {
    const ssize_t got = sys::Uninterrupted([&] {
      return sys::Sys().pread(fd.get(), buffer.data(), buffer.size(), static_cast<off_t>(at));
    });
    if (got < 0) return base::ErrnoStatus("read", name, errno);
    if (got == 0) {
      return format::CommitFileDigest{.name = name, .bytes = at, .digest = stream.Finish()};
    }
    stream.Update(buffer.data(), static_cast<size_t>(got));
    at += static_cast<uint64_t>(got);
  }
}

bool HasId(absl::string_view text, const AttemptId& attempt) {
  char id[digest::kHexDigits];
  digest::ToHex(attempt, id);
  return absl::StrContains(text, absl::string_view(id, sizeof(id)));
}

/// Returns the commit record of the manifests of all ranks. `attempt`: the attempt in their names;
/// none in a directory that Holdfast owns. `input` has the world size, and where a framework
/// commits the parent and the commit file; the rest is in rank 0's manifest.
absl::StatusOr<std::string> RecordOf(int directory, const std::string& path,
                                     format::CommitInput input,
                                     const std::optional<AttemptId>& attempt) {
  uint64_t bytes = 0;
  std::vector<format::CommitRecord::RankManifest> manifests;
  for (uint32_t rank = 0; rank < input.world_size; ++rank) {
    const std::string name = attempt.has_value()
                                 ? format::ManifestName(rank, input.world_size, *attempt)
                                 : format::ManifestName(rank, input.world_size);
    HOLDFAST_ASSIGN_OR_RETURN(const std::string text, ReadManifestText(directory, path, name));
    uint64_t files_bytes = 0;
    if (!worker::FindFilesBytes(text.data(), text.size(), &files_bytes)) {
      return absl::DataLossError(
          absl::StrCat("commit ", path, "/", name, ": it has no files_bytes"));
    }
    bytes += files_bytes;
    manifests.push_back({text.size(), digest::Of(text.data(), text.size())});
    if (rank != 0) continue;
    const auto manifest = format::ParseManifest(text);
    if (!manifest.ok()) {
      return base::Annotate(manifest.status(), absl::StrCat("commit ", path, "/", name));
    }
    input.checkpoint = manifest->checkpoint;
    input.attempt = manifest->attempt;
    if (!attempt.has_value()) input.parent = manifest->parent;
    input.step = manifest->step;
    input.saved_at_ns = manifest->saved_at_ns.value_or(0);
  }
  return format::CompleteCommitRecord(input, base::WallNs(), bytes, manifests);
}

/// \error kDataLoss if the manifests of `attempt` say that the save made a commit record.
absl::Status RefuseMissingRecord(int directory, const std::string& path, const AttemptId& attempt) {
  HOLDFAST_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListNames(directory, path));
  for (const std::string& name : names) {
    const auto identity = format::ParseManifestName(name);
    if (!identity.has_value() || identity->attempt != attempt) continue;
    HOLDFAST_ASSIGN_OR_RETURN(const std::string text, ReadManifestText(directory, path, name));
    const auto manifest = format::ParseManifest(text);
    if (!manifest.ok() || !manifest->Recorded()) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat("open ", path, "/", format::CommitRecordName(attempt),
                                            ": missing: the commit record of the save"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::optional<format::CommitRecord>> ReadCommitRecord(int directory,
                                                                     const std::string& name) {
  const auto text = ReadWholeFile(directory, name, format::kCommitRecordBytesMax);
  if (base::ErrnoOf(text.status()) == ENOENT) return std::nullopt;
  if (!text.ok()) return text.status();
  HOLDFAST_ASSIGN_OR_RETURN(format::CommitRecord record, format::ParseCommitRecord(*text));
  return record;
}

absl::Status WriteCommitRecord(int directory, const std::string& path, uint32_t world_size) {
  HOLDFAST_ASSIGN_OR_RETURN(const std::string text,
                            RecordOf(directory, path, {.world_size = world_size}, std::nullopt));
  // A file made anew: where locks tell nothing, a rank 0 may still have the save's own open.
  const int removed = sys::Sys().unlinkat(directory, worker::kMarkName, 0);
  if (removed != 0 && errno != ENOENT) return base::ErrnoStatus("remove", worker::kMarkName, errno);
  base::UniqueFd fd(sys::OpenOwned(directory, worker::kMarkName,
                                   O_CREAT | O_EXCL | O_WRONLY | O_NOFOLLOW | O_CLOEXEC,
                                   sys::kFileMode));
  if (!fd.valid()) return base::ErrnoStatus("create", worker::kMarkName, errno);
  const int error = sys::WriteAll(fd.get(), text.data(), text.size());
  if (error != 0) return base::ErrnoStatus("write", worker::kMarkName, error);
  // Before the name: a crash must not leave an empty record.
  if (sys::Sys().fsync(fd.get()) != 0) return base::ErrnoStatus("fsync", worker::kMarkName, errno);
  const absl::Status named =
      RenameNoReplace(directory, worker::kMarkName, layout::kCommitRecordName);
  return absl::IsAlreadyExists(named) ? absl::OkStatus() : named;
}

uint64_t LatestFrameworkSaveNs(int directory) {
  uint64_t latest = 0;
  // Only a framework's directory is listed: others may have any number of entries.
  const auto holds = [directory](const std::string& name) {
    const auto entry = Look(directory, name, /*follow_symlink=*/false);
    return entry.ok() && entry->kind == EntryKind::kFile;
  };
  if (!holds(kDcpCommitFile) && !holds(absl::StrCat(kDcpDataPrefix, 0, kDcpCommitFile))) {
    return latest;
  }
  const auto names = ListNames(directory, "directory");
  if (!names.ok()) return latest;
  for (const std::string& name : *names) {
    if (!format::ParseCommitRecordName(name).has_value()) continue;
    const auto record = ReadCommitRecord(directory, name);
    if (!record.ok() || !record->has_value()) continue;
    latest = std::max(latest, (*record)->saved_at_ns);
  }
  return latest;
}

std::vector<std::string> CommitFileNames(const format::Manifest& manifest) {
  for (const format::Manifest::File& file : manifest.files) {
    absl::string_view rank = file.name;
    if (!absl::ConsumePrefix(&rank, kDcpDataPrefix) ||
        !absl::ConsumeSuffix(&rank, kDcpDataSuffix)) {
      continue;
    }
    std::vector<std::string> names = {kDcpCommitFile};
    // A rank that saves without collectives commits by its own file.
    rank = rank.substr(0, rank.find('_'));
    uint32_t number = 0;
    if (manifest.world_size == 1 && absl::SimpleAtoi(rank, &number)) {
      names.push_back(absl::StrCat(kDcpDataPrefix, number, kDcpCommitFile));
    }
    return names;
  }
  return {};
}

bool NamesAttempt(int directory, const std::string& name, const AttemptId& attempt) {
  const auto text = ReadWholeFile(directory, name, format::kManifestBytesMax);
  return text.ok() && HasId(*text, attempt);
}

bool IsOfAnotherWriter(int directory, const format::CommitFileDigest& recorded,
                       const AttemptId& attempt) {
  const auto text = ReadWholeFile(directory, recorded.name, format::kManifestBytesMax);
  if (!text.ok() || text->size() == recorded.bytes) return false;
  return absl::StartsWith(*text, kPickleBegin) && absl::EndsWith(*text, kPickleEnd) &&
         absl::StrContains(*text, kDcpMetadataClass) && !HasId(*text, attempt);
}

const absl::StatusOr<format::CommitFileDigest>& CommitFiles::Read(const std::string& name) {
  const auto found = read_.find(name);
  if (found != read_.end()) return found->second;
  return read_.emplace(name, DigestOfFile(directory_, name)).first->second;
}

}  // namespace holdfast::directory

namespace holdfast {

absl::StatusOr<CommitRecordFile> MakeCommitRecord(const std::string& path,
                                                  const FrameworkSave& save,
                                                  const CommitFile& file) {
  HOLDFAST_ASSIGN_OR_RETURN(const base::UniqueFd fd, directory::OpenDirectory(path));
  format::CommitInput input = {.parent = save.parent, .world_size = save.world_size};
  input.commit_file = {.name = file.name,
                       .bytes = file.contents.size(),
                       .digest = digest::Of(file.contents.data(), file.contents.size())};
  HOLDFAST_ASSIGN_OR_RETURN(std::string text,
                            directory::RecordOf(fd.get(), path, std::move(input), save.attempt));
  return CommitRecordFile{format::CommitRecordName(save.attempt), std::move(text)};
}

absl::StatusOr<std::optional<std::vector<Digest>>> CheckCommitFile(const std::string& path,
                                                                   const AttemptId& attempt,
                                                                   const CommitFile& file) {
  HOLDFAST_ASSIGN_OR_RETURN(const base::UniqueFd fd, directory::OpenDirectory(path));
  const std::string name = format::CommitRecordName(attempt);
  const auto record = directory::ReadCommitRecord(fd.get(), name);
  if (!record.ok()) {
    return base::Annotate(record.status(), absl::StrCat("open ", path, "/", name));
  }
  if (!record->has_value()) {
    HOLDFAST_RETURN_IF_ERROR(directory::RefuseMissingRecord(fd.get(), path, attempt));
    return std::nullopt;
  }
  const auto& recorded = (*record)->commit_file;
  if ((*record)->attempt != attempt || !recorded.has_value() || recorded->name != file.name ||
      recorded->bytes != file.contents.size() ||
      recorded->digest != digest::Of(file.contents.data(), file.contents.size())) {
    return absl::DataLossError(absl::StrCat("open ", path, "/", file.name,
                                            ": it is not as the save's commit record has it"));
  }
  std::vector<Digest> manifests;
  for (const auto& manifest : (*record)->manifests) manifests.push_back(manifest.digest);
  return manifests;
}

}  // namespace holdfast
