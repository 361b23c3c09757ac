#include "runtime/directory/completeness.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "runtime/base/status.h"
#include "runtime/digest/digest.h"
#include "runtime/directory/entries.h"
#include "runtime/directory/planted_bugs.h"
#include "runtime/format/commit_record.h"
#include "runtime/format/directory_names.h"
#include "runtime/format/file_names.h"
#include "runtime/layout/board.h"

namespace holdfast::directory {
namespace {

constexpr size_t kHexDigits = 32;
constexpr uint32_t kNoRank = std::numeric_limits<uint32_t>::max();

std::string Hex(const AttemptId& id) {
  std::string text(kHexDigits, '0');
  digest::ToHex(id, text.data());
  return text;
}

const char* KindName(EntryKind kind) {
  switch (kind) {
    case EntryKind::kNothing:
      return "nothing";
    case EntryKind::kFile:
      return "a file";
    case EntryKind::kDirectory:
      return "a directory";
    case EntryKind::kSymlink:
      return "a symbolic link";
    case EntryKind::kOther:
      return "neither a file nor a directory";
  }
  return "nothing";
}

Finding Incomplete(const std::string& file, const char* reason, std::string expected,
                   std::string found) {
  return {Verdict::kIncomplete, absl::StatusCode::kFailedPrecondition,
          Fault{.file = file,
                .reason = reason,
                .expected = std::move(expected),
                .found = std::move(found)}};
}

Finding Corrupt(const std::string& file, const char* reason, std::string expected,
                std::string found) {
  return {Verdict::kCorrupt, absl::StatusCode::kDataLoss,
          Fault{.file = file,
                .reason = reason,
                .expected = std::move(expected),
                .found = std::move(found)}};
}

/// What keeps one file from being the recorded one.
std::optional<Finding> CheckNamedFile(int directory, const format::Manifest::File& file) {
  const auto entry = Look(directory, file.name, /*follow_symlink=*/false);
  if (!entry.ok()) return FindingOf(entry.status(), file.name, "read");
  if (entry->kind == EntryKind::kNothing) {
    return Incomplete(file.name, "missing", absl::StrCat(file.bytes, " bytes"), "nothing");
  }
  if (entry->kind != EntryKind::kFile) {
    return Corrupt(file.name, "structure", "a file", KindName(entry->kind));
  }
  if (entry->bytes == file.bytes || Planted(Bug::kPromoteWithoutSizes)) return std::nullopt;
  Finding finding = Corrupt(file.name, "size", absl::StrCat(file.bytes, " bytes"),
                            absl::StrCat(entry->bytes, " bytes"));
  finding.fault.begin = std::min(entry->bytes, file.bytes);
  finding.fault.end = std::max(entry->bytes, file.bytes);
  return finding;
}

absl::Time FromNanoseconds(uint64_t since_1970) {
  const auto bounded = std::min<uint64_t>(since_1970, std::numeric_limits<int64_t>::max());
  return absl::UnixEpoch() + absl::Nanoseconds(static_cast<int64_t>(bounded));
}

/// As recorded. Version 1 of the manifest lacks it: there, when the manifest was written.
absl::Time SavedAt(const format::Manifest& manifest, int64_t modified_ns) {
  return FromNanoseconds(manifest.saved_at_ns.value_or(static_cast<uint64_t>(modified_ns)));
}

/// Nothing where there is no record: a save of an earlier version, or files that were adopted.
absl::StatusOr<std::optional<format::CommitRecord>> ReadRecord(int directory) {
  const auto text =
      ReadWholeFile(directory, layout::kCommitRecordName, format::kCommitRecordBytesMax);
  if (base::ErrnoOf(text.status()) == ENOENT) return std::nullopt;
  if (!text.ok()) return text.status();
  HOLDFAST_ASSIGN_OR_RETURN(format::CommitRecord record, format::ParseCommitRecord(*text));
  return record;
}

using NamedManifests = std::vector<std::pair<format::ManifestIdentity, std::string>>;

/// Reads the manifests of one attempt and looks at what they name.
class AttemptReader {
 public:
  AttemptReader(int directory, const ReadCheckpointOptions& options)
      : directory_(directory), options_(options) {}

  void Read(const NamedManifests& named) {
    info_.world_size = named.front().first.world_size;
    // In a framework's directory there is none: nothing there was committed by rank 0.
    if (!named.front().first.attempt.has_value()) TakeRecord();
    for (const auto& [identity, name] : named) {
      named_.insert(name);
      if (identity.world_size != info_.world_size) {
        Add(Incomplete(name, "world size", absl::StrCat(info_.world_size),
                       absl::StrCat(identity.world_size)));
        continue;
      }
      ranks_.insert(identity.rank);
      int64_t modified_ns = 0;
      if (const auto entry = Look(directory_, name, /*follow_symlink=*/false); entry.ok())
        modified_ns = entry->modified_ns;
      modified_ns_ = std::max(modified_ns_, modified_ns);
      ReadManifest(identity, name, modified_ns);
    }
    AddMissingRanks();
    if (record_.has_value() && first_seen_ && record_->attempt != info_.attempt) {
      Add(Incomplete(layout::kCommitRecordName, "attempt", Hex(info_.attempt),
                     Hex(record_->attempt)));
    }
  }

  const std::vector<Finding>& findings() const { return findings_; }
  const CheckpointInfo& info() const { return info_; }
  const std::string& recorded_name() const { return recorded_name_; }

  bool incomplete() const {
    return std::any_of(findings_.begin(), findings_.end(), [](const Finding& finding) {
      return finding.verdict == Verdict::kIncomplete;
    });
  }

  bool NewerThan(const AttemptReader& other) const {
    return std::tie(info_.step, modified_ns_) > std::tie(other.info_.step, other.modified_ns_);
  }

  /// Files of it were written anew by an attempt that names `named`.
  bool Superseded(const std::set<std::string>& named) const {
    return std::any_of(named_.begin(), named_.end(),
                       [&named](const std::string& name) { return named.count(name) != 0; });
  }

  void MoveTo(CheckpointFiles* out, std::set<std::string>* named) {
    std::move(manifests_.begin(), manifests_.end(), std::back_inserter(out->manifests));
    std::move(findings_.begin(), findings_.end(), std::back_inserter(out->findings));
    named->merge(named_);
  }

 private:
  void Add(Finding finding) {
    if (findings_.size() < options_.findings_max) findings_.push_back(std::move(finding));
  }

  void TakeRecord() {
    named_.insert(layout::kCommitRecordName);
    auto record = ReadRecord(directory_);
    if (!record.ok()) {
      return Add(FindingOf(record.status(), layout::kCommitRecordName, "commit record"));
    }
    record_ = *std::move(record);
    if (!record_.has_value()) return;
    info_.parent = record_->parent;
    if (record_->world_size != info_.world_size) {
      Add(Incomplete(layout::kCommitRecordName, "world size", absl::StrCat(info_.world_size),
                     absl::StrCat(record_->world_size)));
    }
  }

  /// The record was made of other bytes than these: one of the two was changed since.
  void CompareWithRecord(const std::string& name, uint32_t rank, const std::string& text) {
    if (!record_.has_value() || rank >= record_->manifests.size()) return;
    const Digest found = digest::Of(text.data(), text.size());
    const Digest recorded = record_->manifests[rank].digest;
    if (found == recorded) return;
    std::string hex[2] = {std::string(kHexDigits, '0'), std::string(kHexDigits, '0')};
    digest::ToHex(recorded, hex[0].data());
    digest::ToHex(found, hex[1].data());
    Add(Corrupt(name, "commit record", std::move(hex[0]), std::move(hex[1])));
  }

  void ReadManifest(const format::ManifestIdentity& identity, const std::string& name,
                    int64_t modified_ns) {
    auto text = ReadWholeFile(directory_, name, format::kManifestBytesMax);
    if (base::ErrnoOf(text.status()) == ENOENT) {
      // Removed since it was listed: the directory is being retired or cleaned up.
      return Add(Incomplete(name, "missing", "a manifest", "nothing"));
    }
    if (!text.ok()) return Add(FindingOf(text.status(), name, "manifest"));
    auto parsed = format::ParseManifest(*text);
    if (!parsed.ok()) return Add(FindingOf(parsed.status(), name, "manifest"));
    CompareWithRecord(name, identity.rank, *text);
    format::Manifest manifest = *std::move(parsed);
    if (manifest.rank != identity.rank || manifest.world_size != identity.world_size ||
        manifest.attempt != identity.attempt.value_or(manifest.attempt)) {
      return Add(Corrupt(name, "manifest", name,
                         format::ManifestName(manifest.rank, manifest.world_size)));
    }
    if (!first_seen_) {
      first_seen_ = true;
      info_.attempt = manifest.attempt;
      info_.step = manifest.step;
      recorded_name_ = manifest.checkpoint;
    }
    if (manifest.rank == 0) info_.saved_at = SavedAt(manifest, modified_ns);
    if (manifest.attempt != info_.attempt) {
      Add(Incomplete(name, "attempt", Hex(info_.attempt), Hex(manifest.attempt)));
    } else if (manifest.step != info_.step) {
      Add(Corrupt(name, "step", absl::StrCat(info_.step), absl::StrCat(manifest.step)));
    }
    for (const format::Manifest::File& file : manifest.files) {
      info_.bytes += file.bytes;
      if (named_.insert(file.name).second) continue;
      Add(Corrupt(file.name, "structure", "named by one manifest",
                  absl::StrCat("named again by ", name)));
    }
    for (Finding& finding : CheckNamedFiles(directory_, manifest)) Add(std::move(finding));
    if (!options_.keep_rank.has_value() || *options_.keep_rank == manifest.rank) {
      manifests_.push_back(std::move(manifest));
    }
  }

  void AddMissingRanks() {
    for (uint32_t rank = 0; rank < info_.world_size; ++rank) {
      if (ranks_.count(rank) != 0) continue;
      if (findings_.size() >= options_.findings_max) return;
      Add(Incomplete(format::ManifestName(rank, info_.world_size), "missing",
                     absl::StrCat("the manifest of rank ", rank), "nothing"));
    }
  }

  const int directory_;
  const ReadCheckpointOptions& options_;
  std::vector<format::Manifest> manifests_;
  std::vector<Finding> findings_;
  bool first_seen_ = false;
  CheckpointInfo info_;  // as the first manifest says; bytes of all
  std::string recorded_name_;
  std::optional<format::CommitRecord> record_;
  int64_t modified_ns_ = 0;  // when its last manifest was written
  std::set<uint32_t> ranks_;
  std::set<std::string> named_;
};

/// What a rank 0 that died in its commit left: the board right after its rename, or a record that
/// it was writing when a recovery took over.
bool IsLeftOfCommit(const std::string& name) {
  return name == layout::kBoardName || name == absl::StrCat(layout::kCommitRecordName, ".tmp");
}

/// All manifests of a directory, one attempt after the other.
void ReadAttempts(int directory, const ReadCheckpointOptions& options, CheckpointFiles* out) {
  std::map<std::string, NamedManifests> attempts;  // those without one in their name together
  for (const std::string& name : out->names) {
    const auto identity = format::ParseManifestName(name);
    if (!identity.has_value()) continue;
    ++out->manifests_found;
    attempts[identity->attempt.has_value() ? Hex(*identity->attempt) : ""].emplace_back(*identity,
                                                                                        name);
  }
  std::vector<AttemptReader> readers;
  for (const auto& [attempt, named] : attempts) {
    readers.emplace_back(directory, options).Read(named);
  }
  const bool any_complete = std::any_of(readers.begin(), readers.end(),
                                        [](const AttemptReader& r) { return !r.incomplete(); });
  // The newest first: a reader opens that one.
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
    if (named.count(name) == 0 && !IsLeftOfCommit(name)) out->unnamed.push_back(name);
  }
}

int Gravity(Verdict verdict) {
  switch (verdict) {
    case Verdict::kSound:
      return 0;
    case Verdict::kIncomplete:
      return 1;
    case Verdict::kUnreadable:
      return 2;
    case Verdict::kCorrupt:
      return 3;
  }
  return 3;
}

Inspection::State StateOf(Verdict verdict) {
  switch (verdict) {
    case Verdict::kSound:
      return Inspection::State::kComplete;
    case Verdict::kIncomplete:
      return Inspection::State::kIncomplete;
    case Verdict::kUnreadable:
      return Inspection::State::kUnreadable;
    case Verdict::kCorrupt:
      return Inspection::State::kDamaged;
  }
  return Inspection::State::kDamaged;
}

const Finding* Gravest(const std::vector<Finding>& findings) {
  const Finding* gravest = nullptr;
  for (const Finding& finding : findings) {
    if (gravest == nullptr || Gravity(finding.verdict) > Gravity(gravest->verdict)) {
      gravest = &finding;
    }
  }
  return gravest;
}

/// The gravest finding, its file below `directory`, if that is not empty.
absl::Status StatusOf(const std::vector<Finding>& findings, const std::string& directory) {
  const Finding* const gravest = Gravest(findings);
  if (gravest == nullptr) return absl::OkStatus();
  const Fault& fault = gravest->fault;
  const char* const slash = directory.empty() || fault.file.empty() ? "" : "/";
  absl::Status status(
      gravest->code,
      absl::StrCat(directory, slash, fault.file, ": ", fault.reason, ": expected ", fault.expected,
                   ", found ", fault.found,
                   findings.size() > 1 ? absl::StrCat(" (and ", findings.size() - 1, " more)")
                                       : std::string()));
  if (gravest->error_number != 0) {
    status.SetPayload(base::kErrnoPayload, absl::Cord(absl::StrCat(gravest->error_number)));
  }
  return status;
}

}  // namespace

#ifdef HOLDFAST_PLANTED_BUGS
Bug g_bug = Bug::kNone;
#endif

absl::StatusOr<CheckpointFiles> ReadCheckpoint(int directory, const std::string& path,
                                               const ReadCheckpointOptions& options) {
  CheckpointFiles out;
  HOLDFAST_ASSIGN_OR_RETURN(out.names, ListNames(directory, path));
  ReadAttempts(directory, options, &out);
  out.partial = format::IsUncommittedName(SplitPath(path).name);
  if (out.partial && out.manifests_found > 0) {
    out.findings.push_back(Incomplete("", "partial", "a committed checkpoint",
                                      "a directory that lacks its final name"));
  }
  return out;
}

Inspection Inspect(int directory) {
  Inspection inspection;
  const auto names = ListNames(directory, "directory");
  if (!names.ok()) {
    // ENOENT: it was removed since it was opened.
    if (base::ErrnoOf(names.status()) != ENOENT) inspection.state = Inspection::State::kUnreadable;
    inspection.reason = names.status();
    return inspection;
  }
  NamedManifests own;
  for (const std::string& name : *names) {
    const auto identity = format::ParseManifestName(name);
    if (identity.has_value() && !identity->attempt.has_value()) own.emplace_back(*identity, name);
    // Alone it says what the directory was.
    if (name == layout::kCommitRecordName) inspection.has_manifest = true;
  }
  if (own.empty()) {
    inspection.reason = absl::FailedPreconditionError("incomplete: it has no rank manifest");
    return inspection;
  }
  inspection.has_manifest = true;
  const ReadCheckpointOptions options = {.keep_rank = kNoRank};
  AttemptReader reader(directory, options);
  reader.Read(own);
  inspection.info = reader.info();
  inspection.recorded_name = reader.recorded_name();
  const Finding* const gravest = Gravest(reader.findings());
  inspection.state = gravest == nullptr ? Inspection::State::kComplete : StateOf(gravest->verdict);
  inspection.reason = StatusOf(reader.findings(), "");
  return inspection;
}

std::optional<Inspection> InspectRecord(int directory) {
  const auto record = ReadRecord(directory);
  if (!record.ok() || !record->has_value()) return std::nullopt;
  const format::CommitRecord& sound = **record;
  Inspection inspection;
  inspection.state = Inspection::State::kComplete;
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

std::vector<Finding> CheckNamedFiles(int directory, const format::Manifest& manifest) {
  std::vector<Finding> findings;
  for (const format::Manifest::File& file : manifest.files) {
    if (auto finding = CheckNamedFile(directory, file)) findings.push_back(*std::move(finding));
  }
  return findings;
}

absl::StatusOr<format::Manifest> FindManifestOf(int directory, const std::string& path,
                                                const std::string& file) {
  HOLDFAST_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListNames(directory, path));
  absl::Status damage = absl::NotFoundError(
      absl::StrCat("open ", path, "/", file, ": no manifest beside it names it"));
  for (const std::string& name : names) {
    if (!format::ParseManifestName(name).has_value()) continue;
    absl::StatusOr<std::string> text = ReadWholeFile(directory, name, format::kManifestBytesMax);
    absl::StatusOr<format::Manifest> manifest =
        text.ok() ? format::ParseManifest(*text) : text.status();
    if (!manifest.ok()) {
      damage = base::Annotate(manifest.status(), absl::StrCat(path, "/", name));
      continue;
    }
    for (const format::Manifest::File& named : manifest->files) {
      if (named.name == file) return manifest;
    }
  }
  return damage;
}

absl::Status ToStatus(const std::vector<Finding>& findings, const std::string& path) {
  return StatusOf(findings, absl::StrCat("open ", path));
}

Verdict Worse(Verdict a, Verdict b) { return Gravity(a) >= Gravity(b) ? a : b; }

Finding FindingOf(const absl::Status& status, const std::string& file, const char* reason) {
  const bool io_error = base::ErrnoOf(status) != 0;
  const bool damaged = status.code() == absl::StatusCode::kDataLoss && !io_error;
  // An error of the system says nothing about the bytes, only that nobody could look at them.
  Finding finding;
  finding.verdict = damaged ? Verdict::kCorrupt : Verdict::kUnreadable;
  finding.code = status.code();
  finding.error_number = base::ErrnoOf(status);
  finding.fault = Fault{.file = file,
                        .reason = damaged ? reason : "read",
                        .expected = damaged ? "a sound file" : "a readable file",
                        .found = std::string(status.message())};
  return finding;
}

}  // namespace holdfast::directory
