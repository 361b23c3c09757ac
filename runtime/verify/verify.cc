// Verify: selects the checks that apply to a path.
#include "holdfast/verify.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"
#include "runtime/directory/completeness.h"
#include "runtime/directory/entries.h"
#include "runtime/format/directory_names.h"
#include "runtime/format/file_names.h"
#include "runtime/load/chunk_stream.h"
#include "runtime/sys/system.h"
#include "runtime/verify/fault_log.h"
#include "runtime/verify/single_files.h"
#include "runtime/verify/verify_foreign.h"
#include "runtime/verify/verify_manifest.h"

namespace holdfast {
namespace verify {
namespace {

constexpr char kDigestsOfSeal[] = "XXH3-128 digests of the seal";
constexpr char kDigestsOfAdoption[] = "XXH3-128 digests of the time of adoption";

void SayWhatWasChecked(const std::vector<format::Manifest>& manifests, VerifyReport* report) {
  const bool adopted =
      std::any_of(manifests.begin(), manifests.end(),
                  [](const format::Manifest& manifest) { return manifest.adopted; });
  report->checked = manifests.empty() ? "nothing" : adopted ? kDigestsOfAdoption : kDigestsOfSeal;
  if (adopted) {
    AddNote("Adopted: the digests are of what was on disk then; damage from before is not seen.",
            report);
  }
}

/// Returns the manifest by which a file is checked; nothing for a file to be checked by its format.
std::optional<format::Manifest> ManifestOf(const SingleFiles& files, const std::string& name,
                                           FaultLog* log, VerifyReport* report) {
  if (!files.HasManifest(name)) return std::nullopt;
  auto manifest = files.ManifestOf(name);
  if (!manifest.ok()) {
    log->Add(directory::FindingOf(manifest.status(), name, "manifest"));
    return std::nullopt;
  }
  if (!manifest->has_value()) {
    AddNote(absl::StrCat("The manifest beside ", name, " is of another file of that name."),
            report);
  }
  return *std::move(manifest);
}

/// Compares files with manifests of their own.
absl::Status CheckSingleFiles(int directory, const std::vector<format::Manifest>& manifests,
                              const VerifyOptions& options, FaultLog* log, VerifyReport* report) {
  if (manifests.empty()) return absl::OkStatus();
  SayWhatWasChecked(manifests, report);
  for (const format::Manifest& manifest : manifests) {
    for (const directory::Finding& finding : directory::CheckNamedFiles(directory, manifest))
      log->Add(finding);
  }
  return VerifyManifests(directory, manifests, "", options, log, report);
}

/// Returns the manifests of the files among `names` that have a manifest of their own. `others`:
/// the rest, without companions.
std::vector<format::Manifest> OwnManifests(const SingleFiles& files,
                                           const std::vector<std::string>& names, FaultLog* log,
                                           VerifyReport* report, std::vector<std::string>* others) {
  std::vector<format::Manifest> manifests;
  for (const std::string& name : names) {
    if (format::ParseCompanionName(name).has_value()) continue;
    if (auto manifest = ManifestOf(files, name, log, report)) {
      manifests.push_back(*std::move(manifest));
    } else {
      others->push_back(name);
    }
  }
  return manifests;
}

absl::Status CheckForeignDirectory(int directory, const std::vector<std::string>& names,
                                   const VerifyOptions& options, FaultLog* log,
                                   VerifyReport* report) {
  ForeignCheck check(directory, log, ForeignCheck::Unknown::kFault);
  const SingleFiles files(directory, names);
  std::vector<std::string> uncommitted;
  for (const directory::FileSave& save : files.saves()) {
    if (save.has_temporary) uncommitted.push_back(save.file);
  }
  std::vector<std::string> others;
  const auto manifests = OwnManifests(files, names, log, report, &others);
  for (const std::string& name : others) {
    const auto entry = directory::Look(directory, name, /*follow_symlink=*/true);
    if (entry.ok() && entry->kind == directory::EntryKind::kDirectory) continue;
    check.AddFile(name, /*asked_for=*/false);
  }
  if (!uncommitted.empty()) {
    AddNote(absl::StrCat("Saves under way, or that did not end, of: ", Enumerate(uncommitted), "."),
            report);
  }
  HOLDFAST_RETURN_IF_ERROR(CheckSingleFiles(directory, manifests, options, log, report));
  if (!manifests.empty() && check.understood().empty() && log->empty()) {
    if (!check.passed_over().empty()) {
      AddNote(absl::StrCat("Not looked at: ", Enumerate(check.passed_over()), "."), report);
    }
    return absl::OkStatus();
  }
  if (check.understood().empty() && log->empty()) {
    log->Add(Verdict::kIncomplete,
             {.reason = "missing",
              .expected = "a manifest, or files of a known format",
              .found = names.empty() ? "an empty directory" : Enumerate(names)});
  }
  return check.Run(options, report);
}

absl::Status CheckDirectory(const std::string& path, const VerifyOptions& options, FaultLog* log,
                            VerifyReport* report) {
  const auto fd = directory::OpenDirectory(path);
  if (!fd.ok()) {
    log->Add(directory::FindingOf(fd.status(), "", "read"));
    return absl::OkStatus();
  }
  const auto checkpoint = directory::ReadCheckpoint(fd->get(), path, {});
  if (!checkpoint.ok()) {
    log->Add(directory::FindingOf(checkpoint.status(), "", "read"));
    return absl::OkStatus();
  }
  if (checkpoint->manifests_found == 0 && checkpoint->findings.empty()) {
    if (checkpoint->partial) {
      log->Add(Verdict::kIncomplete, {.reason = "partial",
                                      .expected = "a committed checkpoint",
                                      .found = "a save that did not end; it has no manifest"});
      return absl::OkStatus();
    }
    return CheckForeignDirectory(fd->get(), checkpoint->names, options, log, report);
  }
  for (const directory::Finding& finding : checkpoint->findings) log->Add(finding);
  // Beside the files of the ranks: what a framework adds by saves of single files.
  const SingleFiles files(fd->get(), checkpoint->names);
  std::vector<std::string> unnamed;
  const auto own = OwnManifests(files, checkpoint->unnamed, log, report, &unnamed);
  HOLDFAST_RETURN_IF_ERROR(CheckSingleFiles(fd->get(), own, options, log, report));
  SayWhatWasChecked(checkpoint->manifests, report);
  if (!checkpoint->unproven.empty()) {
    AddNote(
        absl::StrCat("Not proven: the save made no commit record, so that nothing has a digest "
                     "of the file by which the framework commits, ",
                     Enumerate({checkpoint->unproven.begin(), checkpoint->unproven.end()}), "."),
        report);
  }
  if (!unnamed.empty()) {
    AddNote(absl::StrCat("Not part of the checkpoint, because no manifest names them: ",
                         Enumerate(unnamed), "."),
            report);
  }
  if (checkpoint->partial && checkpoint->findings.size() == 1) {
    AddNote("All its manifests are there: recovery would give it its final name.", report);
  }
  return VerifyManifests(fd->get(), checkpoint->manifests, "", options, log, report);
}

/// Checks one file of a checkpoint by its manifest. For a manifest's path, checks all files of its
/// rank.
absl::Status CheckFile(const std::string& path, const VerifyOptions& options, FaultLog* log,
                       VerifyReport* report) {
  const directory::PathParts parts = directory::SplitPath(path);
  const auto fd = directory::OpenDirectory(parts.directory);
  if (!fd.ok()) {
    log->Add(directory::FindingOf(fd.status(), parts.name, "read"));
    return absl::OkStatus();
  }
  if (const auto companion = format::ParseCompanionName(parts.name)) {
    return CheckFile(absl::StrCat(parts.directory, "/", companion->file), options, log, report);
  }
  const auto names = directory::ListNames(fd->get(), parts.directory);
  const SingleFiles files(fd->get(), names.ok() ? *names : std::vector<std::string>{});
  if (auto own = ManifestOf(files, parts.name, log, report)) {
    return CheckSingleFiles(fd->get(), {*std::move(own)}, options, log, report);
  }
  const bool is_manifest = format::ParseManifestName(parts.name).has_value();
  absl::StatusOr<format::Manifest> manifest = absl::UnknownError("");
  if (is_manifest) {
    const auto text = directory::ReadWholeFile(fd->get(), parts.name, format::kManifestBytesMax);
    manifest = text.ok() ? format::ParseManifest(*text) : text.status();
  } else {
    manifest = directory::FindManifestOf(fd->get(), parts.directory, parts.name);
  }
  if (!manifest.ok()) {
    if (is_manifest || manifest.status().code() != absl::StatusCode::kNotFound) {
      log->Add(directory::FindingOf(manifest.status(), is_manifest ? parts.name : "", "manifest"));
    }
    if (is_manifest) return absl::OkStatus();
    ForeignCheck check(fd->get(), log, ForeignCheck::Unknown::kFault);
    check.AddFile(parts.name, /*asked_for=*/true);
    return check.Run(options, report);
  }
  AddNote(is_manifest ? "Only the files of this rank were checked."
                      : "Only this file of its checkpoint was checked.",
          report);
  std::vector<format::Manifest> manifests;
  manifests.push_back(*std::move(manifest));
  SayWhatWasChecked(manifests, report);
  const std::string only = is_manifest ? "" : parts.name;
  for (const directory::Finding& finding :
       directory::CheckNamedFiles(fd->get(), manifests.front())) {
    if (only.empty() || finding.fault.file == only) log->Add(finding);
  }
  if (format::IsUncommittedName(directory::SplitPath(parts.directory).name)) {
    log->Add(Verdict::kIncomplete, {.file = parts.name,
                                    .reason = "partial",
                                    .expected = "a committed checkpoint",
                                    .found = "a file of one that lacks its final name"});
  }
  return VerifyManifests(fd->get(), manifests, only, options, log, report);
}

}  // namespace
}  // namespace verify

absl::StatusOr<VerifyReport> Verify(const std::string& path, const VerifyOptions& options) {
  HOLDFAST_RETURN_IF_ERROR(load::CheckReadOptions(options.buffer_bytes, options.threads));
  const uint64_t started = sys::NowNs();
  VerifyReport report;
  report.path = path;
  report.checked = "nothing";
  verify::FaultLog log(options.faults_max);
  const directory::PathParts parts = directory::SplitPath(path);
  absl::Status status;
  const auto parent = directory::OpenDirectory(parts.directory);
  const auto entry = parent.ok()
                         ? directory::Look(parent->get(), parts.name, /*follow_symlink=*/true)
                         : absl::StatusOr<directory::Entry>(parent.status());
  if (!entry.ok()) {
    log.Add(directory::FindingOf(entry.status(), "", "read"));
  } else if (entry->kind == directory::EntryKind::kDirectory) {
    status = verify::CheckDirectory(path, options, &log, &report);
  } else if (entry->kind == directory::EntryKind::kFile) {
    status = verify::CheckFile(path, options, &log, &report);
  } else {
    const char* found = entry->kind == directory::EntryKind::kNothing
                            ? "nothing of that name"
                            : "neither a file nor a directory";
    log.Add(Verdict::kUnreadable, {.reason = "read", .expected = "a checkpoint", .found = found});
  }
  // No engine, no memory, an unresponsive disk: the state of the bytes is unknown.
  if (!status.ok()) log.Add(directory::FindingOf(status, "", "read"));
  const bool partial = format::IsUncommittedName(parts.name);
  log.MoveTo(&report);
  // An uncommitted directory is no checkpoint, regardless of further faults.
  if (partial && report.verdict != Verdict::kUnreadable) report.verdict = Verdict::kIncomplete;
  report.seconds = static_cast<double>(sys::NowNs() - started) / 1e9;
  return report;
}

}  // namespace holdfast
