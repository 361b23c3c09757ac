#include "runtime/directory/attempt_reader.h"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <limits>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "runtime/base/planted_bugs.h"
#include "runtime/base/status.h"
#include "runtime/digest/digest.h"
#include "runtime/directory/entries.h"
#include "runtime/layout/job.h"

namespace holdfast::directory {
namespace {

std::string HexOr(const std::optional<Digest>& digest) {
  return digest.has_value() ? base::Hex(*digest) : "no replicated file";
}

/// The recorded time. A manifest of version 1 lacks the field: there the manifest's file time.
absl::Time SavedAt(const format::Manifest& manifest, int64_t modified_ns) {
  return FromNanoseconds(manifest.saved_at_ns.value_or(static_cast<uint64_t>(modified_ns)));
}

}  // namespace

absl::Time FromNanoseconds(uint64_t since_1970) {
  const auto bounded = std::min<uint64_t>(since_1970, std::numeric_limits<int64_t>::max());
  return absl::UnixEpoch() + absl::Nanoseconds(static_cast<int64_t>(bounded));
}

void AttemptReader::Read(const NamedManifests& named) {
  if (!named.empty()) info_.world_size = named.front().first.world_size;
  TakeRecord(!named.empty());
  for (const auto& [identity, name] : named) {
    named_.insert(name);
    if (identity.world_size != info_.world_size) {
      Add(Incomplete(name, "world size", absl::StrCat(info_.world_size),
                     absl::StrCat(identity.world_size)));
      continue;
    }
    ranks_.insert(identity.rank);
    // Rank 0 writes the record when all manifests are durable; a rank needs only its own manifest.
    if (TrustsRecord() && identity.rank != options_.keep_rank) continue;
    int64_t modified_ns = 0;
    if (const auto entry = Look(directory_, name, /*follow_symlink=*/false); entry.ok())
      modified_ns = entry->modified_ns;
    modified_ns_ = std::max(modified_ns_, modified_ns);
    ReadManifest(identity, name, modified_ns);
  }
  AddMissingRanks();
  if (framework_attempt_.has_value()) {
    CheckCommitFile();
  } else if (lacks_record() && !options_.uncommitted) {
    // The rename that commits comes after the record.
    Add(MissingRecord());
  }
  if (record_.has_value() && first_seen_ && record_->attempt != info_.attempt) {
    Add(Incomplete(record_name(), "attempt", base::Hex(info_.attempt),
                   base::Hex(record_->attempt)));
  }
}

void AttemptReader::JudgeCommitFile(const std::set<std::string>& committed_by, bool unrecorded) {
  if (!framework_attempt_.has_value() || committed_ || base::Planted(base::Bug::kIgnoreCommitFile))
    return;
  for (const std::string& name : commit_files_) {
    if (committed_by.count(name) == 0) continue;
    return Add(Incomplete(name, "commit", "of this save", "of another save"));
  }
  if (!differs_.has_value()) return;
  // The commit file may be this attempt's; without a record there is no proof.
  if (unrecorded) {
    return Add(Incomplete(differs_->fault.file, "commit", "of this save", "of another save"));
  }
  Add(*std::move(differs_));
}

bool AttemptReader::incomplete() const {
  return std::any_of(findings_.begin(), findings_.end(), [](const Finding& finding) {
    return finding.verdict == Verdict::kIncomplete;
  });
}

bool AttemptReader::NewerThan(const AttemptReader& other) const {
  return std::tie(info_.step, modified_ns_) > std::tie(other.info_.step, other.modified_ns_);
}

bool AttemptReader::Superseded(const std::set<std::string>& named) const {
  return std::any_of(named_.begin(), named_.end(),
                     [&named](const std::string& name) { return named.count(name) != 0; });
}

void AttemptReader::MoveTo(CheckpointFiles* out, std::set<std::string>* named) {
  out->commit_files.insert(commit_files_.begin(), commit_files_.end());
  if (unrecorded()) out->unproven.insert(commit_files_.begin(), commit_files_.end());
  if (!out->record.has_value()) out->record = std::move(record_);
  std::move(manifests_.begin(), manifests_.end(), std::back_inserter(out->manifests));
  std::move(findings_.begin(), findings_.end(), std::back_inserter(out->findings));
  named->merge(named_);
}

void AttemptReader::Add(Finding finding) {
  if (findings_.size() < options_.findings_max) findings_.push_back(std::move(finding));
}

std::string AttemptReader::record_name() const {
  return framework_attempt_.has_value() ? format::CommitRecordName(*framework_attempt_)
                                        : layout::kCommitRecordName;
}

std::string AttemptReader::ManifestName(uint32_t rank) const {
  return framework_attempt_.has_value()
             ? format::ManifestName(rank, info_.world_size, *framework_attempt_)
             : format::ManifestName(rank, info_.world_size);
}

bool AttemptReader::TrustsRecord() const {
  return options_.trust_record && record_.has_value() && !framework_attempt_.has_value();
}

void AttemptReader::TakeRecord(bool any_manifest) {
  named_.insert(record_name());
  auto record = ReadCommitRecord(directory_, record_name());
  if (!record.ok()) {
    return Add(FindingOf(record.status(), record_name(), "commit record"));
  }
  record_ = *std::move(record);
  unrecorded_ = !record_.has_value();
  if (!record_.has_value()) return;
  info_.parent = record_->parent;
  if (!any_manifest) info_.world_size = record_->world_size;
  if (record_->world_size != info_.world_size) {
    Add(Incomplete(record_name(), "world size", absl::StrCat(info_.world_size),
                   absl::StrCat(record_->world_size)));
  }
  if (framework_attempt_.has_value() != record_->commit_file.has_value() ||
      record_->attempt != framework_attempt_.value_or(record_->attempt)) {
    Add(Corrupt(record_name(), "commit record", record_name(),
                format::CommitRecordName(record_->attempt)));
  }
}

void AttemptReader::CompareWithRecord(const std::string& name, uint32_t rank,
                                      const std::string& text) {
  if (!record_.has_value() || rank >= record_->manifests.size()) return;
  const Digest found = digest::Of(text.data(), text.size());
  const Digest recorded = record_->manifests[rank].digest;
  if (found == recorded) return;
  Add(Corrupt(name, "commit record", base::Hex(recorded), base::Hex(found)));
}

void AttemptReader::ReadManifest(const format::ManifestIdentity& identity, const std::string& name,
                                 int64_t modified_ns) {
  auto text = ReadWholeFile(directory_, name, format::kManifestBytesMax);
  if (base::ErrnoOf(text.status()) == ENOENT) {
    // Removed since the listing: the directory is being retired or cleaned up.
    return Add(Incomplete(name, "missing", "a manifest", "nothing"));
  }
  if (!text.ok()) return Add(FindingOf(text.status(), name, "manifest"));
  auto parsed = format::ParseManifest(*text);
  if (!parsed.ok()) return Add(FindingOf(parsed.status(), name, "manifest"));
  CompareWithRecord(name, identity.rank, *text);
  format::Manifest manifest = *std::move(parsed);
  if (manifest.rank != identity.rank || manifest.world_size != identity.world_size ||
      manifest.attempt != identity.attempt.value_or(manifest.attempt)) {
    return Add(
        Corrupt(name, "manifest", name, format::ManifestName(manifest.rank, manifest.world_size)));
  }
  TakeManifest(std::move(manifest), name, modified_ns);
}

void AttemptReader::TakeManifest(format::Manifest manifest, const std::string& name,
                                 int64_t modified_ns) {
  if (!first_seen_) {
    first_seen_ = true;
    info_.attempt = manifest.attempt;
    info_.step = manifest.step;
    recorded_name_ = manifest.checkpoint;
    replicas_ = manifest.replicas;
  }
  if (manifest.rank == 0) {
    info_.saved_at = SavedAt(manifest, modified_ns);
    if (!record_.has_value()) info_.parent = manifest.parent;
    replaces_ = manifest.replaces;
  }
  recorded_version_ |= manifest.Recorded();
  if (manifest.attempt != info_.attempt) {
    Add(Incomplete(name, "attempt", base::Hex(info_.attempt), base::Hex(manifest.attempt)));
  } else if (manifest.step != info_.step) {
    Add(Corrupt(name, "step", absl::StrCat(info_.step), absl::StrCat(manifest.step)));
  } else if (manifest.replicas != replicas_) {
    // Rank 0 has not committed: it compares the replicas of all ranks before.
    Add(Incomplete(name, "replicas", HexOr(replicas_), HexOr(manifest.replicas)));
  }
  for (const format::Manifest::File& file : manifest.files) {
    // Rank 0's manifest is read as well and counts the file.
    if (!manifest.Wrote(file) && !TrustsRecord()) continue;
    info_.bytes += file.bytes;
    if (!named_.insert(file.name).second) {
      Add(Corrupt(file.name, "structure", "named by one manifest",
                  absl::StrCat("named again by ", name)));
    }
    if (auto finding = CheckNamedFile(directory_, file.name, file.bytes)) Add(*std::move(finding));
  }
  for (std::string& file : CommitFileNames(manifest)) {
    possible_commit_files_.insert(std::move(file));
  }
  if (!options_.keep_rank.has_value() || *options_.keep_rank == manifest.rank) {
    manifests_.push_back(std::move(manifest));
  }
}

void AttemptReader::AddMissingRanks() {
  for (uint32_t rank = 0; rank < info_.world_size; ++rank) {
    if (ranks_.count(rank) != 0) continue;
    if (findings_.size() >= options_.findings_max) return;
    Add(Incomplete(ManifestName(rank), "missing", absl::StrCat("the manifest of rank ", rank),
                   "nothing"));
  }
}

void AttemptReader::CheckCommitFile() {
  // A save makes its record before its commit file: the save may have committed since the look.
  if (lacks_record() && NamedByCommitFile()) TakeRecord(/*any_manifest=*/true);
  if (!record_.has_value()) return LookForCommitFile();
  if (!record_->commit_file.has_value()) return;
  const format::CommitFileDigest& recorded = *record_->commit_file;
  commit_files_.insert(recorded.name);
  if (base::Planted(base::Bug::kIgnoreCommitFile)) return;
  // Of another length the file is not read: a sparse file may have terabytes.
  differs_ = CheckNamedFile(directory_, recorded.name, recorded.bytes);
  if (!differs_.has_value()) {
    const auto& found = commit_files_read_->Read(recorded.name);
    if (!found.ok()) {
      differs_ = FindingOf(found.status(), recorded.name, "read");
    } else if (found->digest != recorded.digest) {
      differs_ =
          Corrupt(recorded.name, "digest", base::Hex(recorded.digest), base::Hex(found->digest));
      differs_->fault.end = recorded.bytes;
    }
  }
  committed_ = !differs_.has_value();
}

Finding AttemptReader::MissingRecord() const {
  return Corrupt(record_name(), "missing", "the commit record of the save", "nothing");
}

bool AttemptReader::NamedByCommitFile() const {
  return std::any_of(possible_commit_files_.begin(), possible_commit_files_.end(),
                     [this](const std::string& name) {
                       return NamesAttempt(directory_, name, *framework_attempt_);
                     });
}

bool AttemptReader::ReplacedByAnotherWriter() const {
  if (record_.has_value()) {
    return record_->commit_file.has_value() &&
           IsOfAnotherWriter(directory_, *record_->commit_file, record_->attempt);
  }
  return lacks_record() &&
         std::any_of(commit_files_.begin(), commit_files_.end(), [this](const std::string& name) {
           return IsOfAnotherWriter(directory_, {.name = name}, *framework_attempt_);
         });
}

void AttemptReader::LookForCommitFile() {
  for (const std::string& name : possible_commit_files_) {
    const auto entry = Look(directory_, name, /*follow_symlink=*/false);
    if (!entry.ok() || entry->kind != EntryKind::kNothing) commit_files_.insert(name);
  }
  if (base::Planted(base::Bug::kIgnoreCommitFile)) return;
  if (!possible_commit_files_.empty() && commit_files_.empty()) {
    Add(Incomplete(*possible_commit_files_.begin(), "missing",
                   "the file by which the framework commits", "nothing"));
  } else if (lacks_record() && !commit_files_.empty()) {
    Add(NamedByCommitFile()
            ? MissingRecord()
            : Incomplete(*commit_files_.begin(), "commit", "of this save", "of another save"));
  }
}

}  // namespace holdfast::directory
