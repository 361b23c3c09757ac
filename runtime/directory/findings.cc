#include "runtime/directory/findings.h"

#include <algorithm>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "runtime/base/planted_bugs.h"
#include "runtime/base/status.h"
#include "runtime/directory/entries.h"

namespace holdfast::directory {
namespace {

const char* KindName(EntryKind kind) {
  return WordIn(
      {"nothing", "a file", "a directory", "a symbolic link", "neither a file nor a directory"},
      kind);
}

}  // namespace

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

Finding FindingOf(const absl::Status& status, const std::string& file, const char* reason) {
  const bool io_error = base::ErrnoOf(status) != 0;
  const bool damaged = status.code() == absl::StatusCode::kDataLoss && !io_error;
  // An error of the system proves nothing about the bytes.
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

std::optional<Finding> CheckNamedFile(int directory, const std::string& name, uint64_t bytes) {
  const auto entry = Look(directory, name, /*follow_symlink=*/false);
  if (!entry.ok()) return FindingOf(entry.status(), name, "read");
  if (entry->kind == EntryKind::kNothing) {
    return Incomplete(name, "missing", absl::StrCat(bytes, " bytes"), "nothing");
  }
  if (entry->kind != EntryKind::kFile) {
    return Corrupt(name, "structure", "a file", KindName(entry->kind));
  }
  if (entry->bytes == bytes || base::Planted(base::Bug::kPromoteWithoutSizes)) return std::nullopt;
  Finding finding =
      Corrupt(name, "size", absl::StrCat(bytes, " bytes"), absl::StrCat(entry->bytes, " bytes"));
  finding.fault.begin = std::min(entry->bytes, bytes);
  finding.fault.end = std::max(entry->bytes, bytes);
  return finding;
}

std::vector<Finding> CheckNamedFiles(int directory, const format::Manifest& manifest) {
  std::vector<Finding> findings;
  for (const format::Manifest::File& file : manifest.files) {
    if (auto finding = CheckNamedFile(directory, file.name, file.bytes)) {
      findings.push_back(*std::move(finding));
    }
  }
  return findings;
}

const Finding* Gravest(const std::vector<Finding>& findings) {
  const Finding* gravest = nullptr;
  for (const Finding& finding : findings) {
    const bool graver =
        gravest == nullptr || Worse(gravest->verdict, finding.verdict) != gravest->verdict;
    if (graver) gravest = &finding;
  }
  return gravest;
}

absl::Status ToStatus(const std::vector<Finding>& findings, const std::string& path) {
  const Finding* const gravest = Gravest(findings);
  if (gravest == nullptr) return absl::OkStatus();
  const Fault& fault = gravest->fault;
  absl::Status status(
      gravest->code,
      absl::StrCat(path.empty() ? "" : "open ", path, path.empty() || fault.file.empty() ? "" : "/",
                   fault.file, ": ", fault.reason, ": expected ", fault.expected, ", found ",
                   fault.found,
                   findings.size() > 1 ? absl::StrCat(" (and ", findings.size() - 1, " more)")
                                       : std::string()));
  if (gravest->error_number != 0) {
    status.SetPayload(base::kErrnoPayload, absl::Cord(absl::StrCat(gravest->error_number)));
  }
  return status;
}

}  // namespace holdfast::directory
