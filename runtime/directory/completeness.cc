#include "runtime/directory/completeness.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/base/status.h"
#include "runtime/digest/digest.h"
#include "runtime/directory/attempt_reader.h"
#include "runtime/directory/commit_file.h"
#include "runtime/directory/entries.h"
#include "runtime/format/directory_names.h"
#include "runtime/format/file_names.h"
#include "runtime/layout/board.h"

namespace holdfast::directory {
namespace {

constexpr uint32_t kNoRank = std::numeric_limits<uint32_t>::max();

/// The leftovers of a rank 0 that died in its commit: the board right after the rename, or a record
/// being written when a recovery took over.
bool IsLeftOfCommit(const std::string& name) {
  return name == layout::kBoardName || name == absl::StrCat(layout::kCommitRecordName, ".tmp");
}

/// Of several saves with one commit file at most one is committed: the other saves are incomplete.
void JudgeCommitFiles(std::vector<AttemptReader>* readers) {
  std::set<std::string> committed_by;
  bool unrecorded = false;
  for (const AttemptReader& reader : *readers) {
    committed_by.insert(reader.committed_by());
    unrecorded |= reader.unrecorded();
  }
  for (AttemptReader& reader : *readers) reader.JudgeCommitFile(committed_by, unrecorded);
}

/// True if another program's save has replaced the commit file of all attempts. Of a directory with
/// a committed attempt no file is read: its commit file was read once, and may change.
bool AllReplacedByAnotherWriter(const std::vector<AttemptReader>& readers) {
  const auto is_committed = [](const AttemptReader& reader) {
    return !reader.committed_by().empty();
  };
  const auto is_replaced = [](const AttemptReader& reader) {
    return reader.ReplacedByAnotherWriter();
  };
  return !readers.empty() && std::none_of(readers.begin(), readers.end(), is_committed) &&
         std::all_of(readers.begin(), readers.end(), is_replaced);
}

/// All manifests of a directory, one attempt after the other.
void ReadAttempts(int directory, const ReadCheckpointOptions& options, CheckpointFiles* out) {
  struct Attempt {
    std::optional<AttemptId> id;
    NamedManifests named;
  };
  // Manifests without an attempt in their name are grouped under 0.
  std::map<std::pair<uint64_t, uint64_t>, Attempt> attempts;
  for (const std::string& name : out->names) {
    // A record announces manifests even if all manifests are missing.
    if (const auto recorded = format::ParseCommitRecordName(name)) {
      attempts[{recorded->high, recorded->low}].id = recorded;
    } else if (name == layout::kCommitRecordName) {
      attempts.try_emplace({0, 0});
    }
    const auto identity = format::ParseManifestName(name);
    if (!identity.has_value()) continue;
    ++out->manifests_found;
    const AttemptId id = identity->attempt.value_or(AttemptId{});
    Attempt& attempt = attempts[{id.high, id.low}];
    attempt.id = identity->attempt;
    attempt.named.emplace_back(*identity, name);
  }
  CommitFiles commit_files(directory);
  std::vector<AttemptReader> readers;
  for (const auto& [id, attempt] : attempts) {
    readers.emplace_back(directory, options, attempt.id, &commit_files).Read(attempt.named);
  }
  JudgeCommitFiles(&readers);
  if (AllReplacedByAnotherWriter(readers)) {
    // All manifests are stale: the directory is checked as one without.
    out->manifests_found = 0;
    return;
  }
  const bool any_complete = std::any_of(readers.begin(), readers.end(),
                                        [](const AttemptReader& r) { return !r.incomplete(); });
  // The newest first: a reader opens the newest.
  std::vector<AttemptReader*> newest_first;
  for (AttemptReader& reader : readers) newest_first.push_back(&reader);
  std::stable_sort(newest_first.begin(), newest_first.end(),
                   [](const AttemptReader* a, const AttemptReader* b) { return a->NewerThan(*b); });
  std::set<std::string> named;
  for (AttemptReader* reader : newest_first) {
    const bool left_out = (any_complete && reader->incomplete()) || reader->Superseded(named);
    if (!left_out) reader->MoveTo(out, &named);
  }
  if (attempts.empty()) return;
  for (const std::string& name : out->names) {
    if (named.count(name) != 0 || out->commit_files.count(name) != 0) continue;
    if (!IsLeftOfCommit(name)) out->unnamed.push_back(name);
  }
}

}  // namespace

absl::StatusOr<CheckpointFiles> ReadCheckpoint(int directory, const std::string& path,
                                               const ReadCheckpointOptions& options) {
  CheckpointFiles out;
  HOLDFAST_ASSIGN_OR_RETURN(out.names, ListNames(directory, path));
  out.partial = format::IsUncommittedName(NameOf(directory, path));
  ReadCheckpointOptions judged = options;
  judged.uncommitted = out.partial;
  ReadAttempts(directory, judged, &out);
  if (out.partial && out.manifests_found > 0) {
    out.findings.push_back(Incomplete("", "partial", "a committed checkpoint",
                                      "a directory that lacks its final name"));
  }
  return out;
}

namespace {

Inspection InspectManifests(int directory, bool uncommitted) {
  Inspection inspection;
  const auto names = ListNames(directory, "directory");
  if (!names.ok()) {
    // ENOENT: the directory was removed since it was opened.
    if (base::ErrnoOf(names.status()) != ENOENT) inspection.state = Verdict::kUnreadable;
    inspection.reason = names.status();
    return inspection;
  }
  NamedManifests own;
  for (const std::string& name : *names) {
    const auto identity = format::ParseManifestName(name);
    if (identity.has_value() && !identity->attempt.has_value()) own.emplace_back(*identity, name);
    // A commit record alone proves that the directory was a checkpoint.
    if (name == layout::kCommitRecordName) inspection.has_manifest = true;
  }
  if (own.empty()) {
    inspection.reason = absl::FailedPreconditionError("incomplete: it has no rank manifest");
    return inspection;
  }
  inspection.has_manifest = true;
  const ReadCheckpointOptions options = {.keep_rank = kNoRank, .uncommitted = uncommitted};
  AttemptReader reader(directory, options, std::nullopt, nullptr);
  reader.Read(own);
  inspection.info = reader.info();
  inspection.recorded_name = reader.recorded_name();
  inspection.replaces = reader.replaces();
  const Finding* const gravest = Gravest(reader.findings());
  inspection.state = gravest == nullptr ? Verdict::kSound : gravest->verdict;
  inspection.reason = ToStatus(reader.findings(), "");
  inspection.lacks_record = reader.lacks_record();
  return inspection;
}

}  // namespace

Inspection Inspect(int directory) { return InspectManifests(directory, /*uncommitted=*/false); }

Inspection InspectUncommitted(int directory) {
  return InspectManifests(directory, /*uncommitted=*/true);
}

std::optional<Inspection> InspectRecord(int directory) {
  const auto record = ReadCommitRecord(directory, layout::kCommitRecordName);
  if (!record.ok() || !record->has_value()) return std::nullopt;
  const format::CommitRecord& sound = **record;
  Inspection inspection;
  inspection.state = Verdict::kSound;
  inspection.has_manifest = true;
  inspection.recorded_name = sound.checkpoint;
  inspection.info.step = sound.step;
  inspection.info.saved_at = FromNanoseconds(sound.saved_at_ns);
  inspection.info.attempt = sound.attempt;
  inspection.info.parent = sound.parent;
  inspection.info.world_size = sound.world_size;
  inspection.info.bytes = sound.bytes;
  return inspection;
}

Inspection InspectCommitted(int directory) {
  std::optional<Inspection> by_record = InspectRecord(directory);
  return by_record.has_value() ? *std::move(by_record) : Inspect(directory);
}

absl::StatusOr<format::Manifest> ReadManifest(int directory, const std::string& path,
                                              const std::string& name,
                                              const std::optional<Digest>& digest) {
  HOLDFAST_ASSIGN_OR_RETURN(const std::string text,
                            ReadWholeFile(directory, name, format::kManifestBytesMax));
  absl::StatusOr<format::Manifest> manifest = format::ParseManifest(text);
  if (!manifest.ok()) {
    return base::Annotate(manifest.status(), absl::StrCat("open ", path, "/", name));
  }
  if (digest.has_value() && *digest != digest::Of(text.data(), text.size())) {
    return absl::DataLossError(
        absl::StrCat("open ", path, "/", name, ": it is not as the save's commit record has it"));
  }
  const auto identity = format::ParseManifestName(name);
  if (identity.has_value() &&
      (manifest->rank != identity->rank || manifest->world_size != identity->world_size ||
       manifest->attempt != identity->attempt.value_or(manifest->attempt))) {
    return absl::DataLossError(absl::StrCat("open ", path, "/", name, ": it is another rank's"));
  }
  HOLDFAST_RETURN_IF_ERROR(ToStatus(CheckNamedFiles(directory, *manifest), path));
  return manifest;
}

absl::StatusOr<format::Manifest> FindManifestOf(int directory, const std::string& path,
                                                const std::string& file) {
  HOLDFAST_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListNames(directory, path));
  const auto names_file = [&file](const format::Manifest& manifest) {
    return std::any_of(manifest.files.begin(), manifest.files.end(),
                       [&file](const auto& named) { return named.name == file; });
  };
  // Of one save: no other manifest has to be read.
  for (const std::string& name : names) {
    const auto identity = format::ParseManifestName(name);
    if (!identity.has_value() || identity->attempt.has_value()) continue;
    const auto text = ReadWholeFile(directory, name, format::kManifestBytesMax);
    auto manifest = text.ok() ? format::ParseManifest(*text) : text.status();
    if (manifest.ok() && names_file(*manifest)) return manifest;
  }
  HOLDFAST_ASSIGN_OR_RETURN(CheckpointFiles checkpoint, ReadCheckpoint(directory, path, {}));
  for (format::Manifest& manifest : checkpoint.manifests) {
    if (names_file(manifest)) return std::move(manifest);
  }
  for (const Finding& finding : checkpoint.findings) {
    const bool of_manifest = format::ParseManifestName(finding.fault.file).has_value();
    if (of_manifest && finding.verdict != Verdict::kIncomplete) return ToStatus({finding}, path);
  }
  return absl::NotFoundError(
      absl::StrCat("open ", path, "/", file, ": no manifest beside it names it"));
}

}  // namespace holdfast::directory
