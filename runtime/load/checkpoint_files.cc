#include "runtime/load/checkpoint_files.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "runtime/base/status.h"
#include "runtime/digest/digest.h"
#include "runtime/format/directory_names.h"
#include "runtime/load/directory.h"

namespace holdfast::load {
namespace {

constexpr size_t kHexDigits = 32;

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
  if (entry->bytes == file.bytes) return std::nullopt;
  Finding finding = Corrupt(file.name, "size", absl::StrCat(file.bytes, " bytes"),
                            absl::StrCat(entry->bytes, " bytes"));
  finding.fault.begin = std::min(entry->bytes, file.bytes);
  finding.fault.end = std::max(entry->bytes, file.bytes);
  return finding;
}

using NamedManifests = std::vector<std::pair<ManifestIdentity, std::string>>;

/// Reads the manifests of one attempt and looks at what they name.
class AttemptReader {
 public:
  AttemptReader(int directory, const ReadCheckpointOptions& options)
      : directory_(directory), options_(options) {}

  void Read(const NamedManifests& named) {
    world_size_ = named.front().first.world_size;
    for (const auto& [identity, name] : named) {
      named_.insert(name);
      if (identity.world_size != world_size_) {
        Add(Incomplete(name, "world size", absl::StrCat(world_size_),
                       absl::StrCat(identity.world_size)));
        continue;
      }
      ranks_.insert(identity.rank);
      if (const auto entry = Look(directory_, name, /*follow_symlink=*/false); entry.ok())
        modified_ns_ = std::max(modified_ns_, entry->modified_ns);
      ReadManifest(identity, name);
    }
    AddMissingRanks();
  }

  bool incomplete() const {
    return std::any_of(findings_.begin(), findings_.end(), [](const Finding& finding) {
      return finding.verdict == Verdict::kIncomplete;
    });
  }

  bool NewerThan(const AttemptReader& other) const {
    return std::tie(step_, modified_ns_) > std::tie(other.step_, other.modified_ns_);
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

  void ReadManifest(const ManifestIdentity& identity, const std::string& name) {
    auto text = ReadWholeFile(directory_, name, format::kManifestBytesMax);
    if (!text.ok()) return Add(FindingOf(text.status(), name, "manifest"));
    auto parsed = format::ParseManifest(*text);
    if (!parsed.ok()) return Add(FindingOf(parsed.status(), name, "manifest"));
    format::Manifest manifest = *std::move(parsed);
    if (manifest.rank != identity.rank || manifest.world_size != identity.world_size ||
        manifest.attempt != identity.attempt.value_or(manifest.attempt)) {
      return Add(Corrupt(name, "manifest", name,
                         format::ManifestName(manifest.rank, manifest.world_size)));
    }
    if (!first_seen_) {
      first_seen_ = true;
      attempt_ = manifest.attempt;
      step_ = manifest.step;
    }
    if (manifest.attempt != attempt_) {
      Add(Incomplete(name, "attempt", Hex(attempt_), Hex(manifest.attempt)));
    } else if (manifest.step != step_) {
      Add(Corrupt(name, "step", absl::StrCat(step_), absl::StrCat(manifest.step)));
    }
    for (const format::Manifest::File& file : manifest.files) {
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
    for (uint32_t rank = 0; rank < world_size_; ++rank) {
      if (ranks_.count(rank) != 0) continue;
      if (findings_.size() >= options_.findings_max) return;
      Add(Incomplete(format::ManifestName(rank, world_size_), "missing",
                     absl::StrCat("the manifest of rank ", rank), "nothing"));
    }
  }

  const int directory_;
  const ReadCheckpointOptions& options_;
  std::vector<format::Manifest> manifests_;
  std::vector<Finding> findings_;
  uint32_t world_size_ = 0;
  bool first_seen_ = false;
  AttemptId attempt_;
  uint64_t step_ = 0;
  int64_t modified_ns_ = 0;  // when its last manifest was written
  std::set<uint32_t> ranks_;
  std::set<std::string> named_;
};

/// All manifests of a directory, one attempt after the other.
void ReadAttempts(int directory, const ReadCheckpointOptions& options, CheckpointFiles* out) {
  std::map<std::string, NamedManifests> attempts;  // those without one in their name together
  for (const std::string& name : out->names) {
    const auto identity = ParseManifestName(name);
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
    if (named.count(name) == 0) out->unnamed.push_back(name);
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

}  // namespace

absl::StatusOr<CheckpointFiles> ReadCheckpoint(int directory, const std::string& path,
                                               const ReadCheckpointOptions& options) {
  CheckpointFiles out;
  HOLDFAST_ASSIGN_OR_RETURN(out.names, ListDirectory(directory, path));
  ReadAttempts(directory, options, &out);
  out.partial = IsUncommittedName(SplitPath(path).name);
  if (out.partial && out.manifests_found > 0) {
    out.findings.push_back(Incomplete("", "partial", "a committed checkpoint",
                                      "a directory that lacks its final name"));
  }
  return out;
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
  HOLDFAST_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectory(directory, path));
  absl::Status damage = absl::NotFoundError(
      absl::StrCat("open ", path, "/", file, ": no manifest beside it names it"));
  for (const std::string& name : names) {
    if (!ParseManifestName(name).has_value()) continue;
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

std::optional<ManifestIdentity> ParseManifestName(const std::string& name) {
  constexpr size_t kDigitsAt = 5;  // after "rank-"
  if (!absl::StartsWith(name, format::ManifestPrefix())) return std::nullopt;
  const size_t of = name.find("-of-", kDigitsAt);
  const size_t dot = name.find('.', kDigitsAt);
  if (of == std::string::npos || dot == std::string::npos || dot < of) return std::nullopt;
  const size_t dash = std::min(name.find('-', of + 4), dot);
  ManifestIdentity identity;
  if (!absl::SimpleAtoi(name.substr(kDigitsAt, of - kDigitsAt), &identity.rank) ||
      !absl::SimpleAtoi(name.substr(of + 4, dash - of - 4), &identity.world_size)) {
    return std::nullopt;
  }
  if (dash < dot) {
    const std::string hex = name.substr(dash + 1, dot - dash - 1);
    AttemptId attempt;
    if (hex.size() != kHexDigits || !digest::FromHex(hex.c_str(), &attempt)) return std::nullopt;
    identity.attempt = attempt;
  }
  // Only the canonical spelling is a manifest: "rank-1-of-2..." and "rank-00001.tmp" are not.
  if (identity.world_size == 0 || identity.rank >= identity.world_size) return std::nullopt;
  const std::string canonical =
      identity.attempt.has_value()
          ? format::ManifestName(identity.rank, identity.world_size, *identity.attempt)
          : format::ManifestName(identity.rank, identity.world_size);
  if (canonical != name) return std::nullopt;
  return identity;
}

bool IsUncommittedName(const std::string& name) {
  return format::ParseDirectoryName(name).kind != format::DirectoryKind::kFinal;
}

absl::Status ToStatus(const std::vector<Finding>& findings, const std::string& path) {
  const Finding* gravest = nullptr;
  for (const Finding& finding : findings) {
    if (gravest == nullptr || Gravity(finding.verdict) > Gravity(gravest->verdict)) {
      gravest = &finding;
    }
  }
  if (gravest == nullptr) return absl::OkStatus();
  const Fault& fault = gravest->fault;
  const std::string object = fault.file.empty() ? path : absl::StrCat(path, "/", fault.file);
  return absl::Status(
      gravest->code,
      absl::StrCat("open ", object, ": ", fault.reason, ": expected ", fault.expected, ", found ",
                   fault.found,
                   findings.size() > 1 ? absl::StrCat(" (and ", findings.size() - 1, " more)")
                                       : std::string()));
}

Verdict Worse(Verdict a, Verdict b) { return Gravity(a) >= Gravity(b) ? a : b; }

Finding FindingOf(const absl::Status& status, const std::string& file, const char* reason) {
  const bool io_error = base::ErrnoOf(status) != 0;
  const bool damaged = status.code() == absl::StatusCode::kDataLoss && !io_error;
  // An error of the system says nothing about the bytes, only that nobody could look at them.
  Finding finding;
  finding.verdict = damaged ? Verdict::kCorrupt : Verdict::kUnreadable;
  finding.code = status.code();
  finding.fault = Fault{.file = file,
                        .reason = damaged ? reason : "read",
                        .expected = damaged ? "a sound file" : "a readable file",
                        .found = std::string(status.message())};
  return finding;
}

}  // namespace holdfast::load
