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
#include "runtime/verify/file_origin.h"
#include "runtime/verify/verify_foreign.h"
#include "runtime/verify/verify_manifest.h"

namespace holdfast {
namespace verify {
namespace {

using directory::kLooksMax;
using directory::SingleFile;
using directory::SingleFiles;

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

/// Returns the file with the manifest by which it is checked; nothing for a file to be checked by
/// its format.
std::optional<SingleFile> Find(SingleFiles* files, const std::string& name, FaultLog* log,
                               VerifyReport* report) {
  if (!files->HasManifest(name)) return std::nullopt;
  auto file = files->Find(name);
  if (!file.ok()) {
    log->Add(directory::FindingOf(file.status(), name, "manifest"));
    return std::nullopt;
  }
  if (!file->has_value()) {
    AddNote(absl::StrCat("The manifest beside ", name, " is of another file of that name."),
            report);
  }
  return *std::move(file);
}

absl::Status CheckOnce(int directory, const std::vector<format::Manifest>& manifests,
                       const VerifyOptions& options, FaultLog* log, VerifyReport* report) {
  for (const format::Manifest& manifest : manifests) {
    for (const directory::Finding& finding : directory::CheckNamedFiles(directory, manifest))
      log->Add(finding);
  }
  return VerifyManifests(directory, manifests, "", options, log, report);
}

Fault NeverStays(const std::string& name) {
  return {.file = name,
          .reason = "read",
          .expected = "what stays for the time of a check",
          .found = absl::StrCat("saves replaced it ", kLooksMax, " times")};
}

/// Checks a file with faults again for as long as saves replace the file under the check. `entry`:
/// the file that was checked.
absl::Status CheckReplaced(int directory, SingleFiles* files, const std::string& name,
                           directory::Entry entry, const VerifyOptions& options, FaultLog* log) {
  VerifyOptions quiet = options;
  quiet.progress = nullptr;
  for (int look = 1; log->Has(name); ++look) {
    const auto now = directory::Look(directory, name, /*follow_symlink=*/false);
    if (!now.ok() || *now == entry) break;
    log->Forget(name);
    if (look == kLooksMax) {
      log->Add(Verdict::kUnreadable, NeverStays(name));
      break;
    }
    VerifyReport counted;  // The first check has counted the file.
    const auto file = Find(files, name, log, &counted);
    entry = file.has_value() ? file->entry : *now;
    if (file.has_value()) {
      HOLDFAST_RETURN_IF_ERROR(CheckOnce(directory, {file->manifest}, quiet, log, &counted));
    } else if (!log->Has(name)) {
      ForeignCheck check(directory, log, ForeignCheck::Unknown::kFault);
      check.AddFile(name, /*asked_for=*/true);
      HOLDFAST_RETURN_IF_ERROR(check.Run(quiet, &counted));
    }
  }
  return absl::OkStatus();
}

/// Compares files with manifests of their own.
absl::Status CheckSingleFiles(int directory, SingleFiles* files,
                              const std::vector<SingleFile>& found, const VerifyOptions& options,
                              FaultLog* log, VerifyReport* report) {
  if (found.empty()) return absl::OkStatus();
  std::vector<format::Manifest> manifests;
  for (const SingleFile& file : found) manifests.push_back(file.manifest);
  SayWhatWasChecked(manifests, report);
  HOLDFAST_RETURN_IF_ERROR(CheckOnce(directory, manifests, options, log, report));
  for (const SingleFile& file : found) {
    HOLDFAST_RETURN_IF_ERROR(CheckReplaced(directory, files, file.manifest.files.front().name,
                                           file.entry, options, log));
  }
  return absl::OkStatus();
}

/// Returns the files among `names` that have a manifest of their own. `others`: the rest, without
/// companions.
std::vector<SingleFile> FindAll(SingleFiles* files, const std::vector<std::string>& names,
                                FaultLog* log, VerifyReport* report,
                                std::vector<std::string>* others) {
  std::vector<SingleFile> found;
  for (const std::string& name : names) {
    if (format::ParseCompanionName(name).has_value()) continue;
    if (auto file = Find(files, name, log, report)) {
      found.push_back(*std::move(file));
    } else {
      others->push_back(name);
    }
  }
  return found;
}

absl::Status CheckForeignDirectory(int directory, const std::vector<std::string>& names,
                                   const VerifyOptions& options, FaultLog* log,
                                   VerifyReport* report) {
  ForeignCheck check(directory, log, ForeignCheck::Unknown::kFault);
  SingleFiles files(directory, names, OriginOf);
  std::vector<std::string> uncommitted;
  std::vector<std::string> gone;
  for (const directory::FileSave& save : files.saves()) {
    if (save.has_temporary) uncommitted.push_back(save.file);
    const bool is_gone = std::find(names.begin(), names.end(), save.file) == names.end();
    if (save.committed() && is_gone) gone.push_back(save.file);
  }
  std::vector<std::string> others;
  const auto found = FindAll(&files, names, log, report, &others);
  for (const std::string& name : others) {
    if (format::IsDrainLock(name)) continue;
    const auto entry = directory::Look(directory, name, /*follow_symlink=*/true);
    if (entry.ok() && entry->kind == directory::EntryKind::kDirectory) continue;
    check.AddFile(name, /*asked_for=*/false);
  }
  if (!uncommitted.empty()) {
    AddNote(absl::StrCat("Saves under way, or that did not end, of: ", Enumerate(uncommitted), "."),
            report);
  }
  if (!gone.empty()) {
    AddNote(absl::StrCat("Manifests stay of files that are gone: ", Enumerate(gone), "."), report);
  }
  HOLDFAST_RETURN_IF_ERROR(CheckSingleFiles(directory, &files, found, options, log, report));
  if (!found.empty() && check.understood().empty() && log->empty()) {
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
  SingleFiles files(fd->get(), checkpoint->names, OriginOf);
  std::vector<std::string> unnamed;
  const auto own = FindAll(&files, checkpoint->unnamed, log, report, &unnamed);
  HOLDFAST_RETURN_IF_ERROR(CheckSingleFiles(fd->get(), &files, own, options, log, report));
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
  SingleFiles files(fd->get(), names.ok() ? *names : std::vector<std::string>{}, OriginOf);
  if (auto own = Find(&files, parts.name, log, report)) {
    return CheckSingleFiles(fd->get(), &files, {*std::move(own)}, options, log, report);
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
  if (format::IsUncommittedName(directory::NameOf(fd->get(), parts.directory))) {
    log->Add(Verdict::kIncomplete, {.file = parts.name,
                                    .reason = "partial",
                                    .expected = "a committed checkpoint",
                                    .found = "a file of one that lacks its final name"});
  }
  return VerifyManifests(fd->get(), manifests, only, options, log, report);
}

/// A directory is the same also with other entries.
bool IsSame(const directory::Entry& before, const directory::Entry& now) {
  return before.kind == directory::EntryKind::kDirectory
             ? before.kind == now.kind && before.inode == now.inode
             : before == now;
}

/// Checks what `path` names. `entry`: what the name stood for.
absl::Status CheckEntry(const std::string& path, const absl::StatusOr<directory::Entry>& entry,
                        const VerifyOptions& options, FaultLog* log, VerifyReport* report) {
  if (!entry.ok()) {
    log->Add(directory::FindingOf(entry.status(), "", "read"));
    return absl::OkStatus();
  }
  if (entry->kind == directory::EntryKind::kDirectory) {
    return CheckDirectory(path, options, log, report);
  }
  if (entry->kind == directory::EntryKind::kFile) return CheckFile(path, options, log, report);
  const char* found = entry->kind == directory::EntryKind::kNothing
                          ? "nothing of that name"
                          : "neither a file nor a directory";
  log->Add(Verdict::kUnreadable, {.reason = "read", .expected = "a checkpoint", .found = found});
  return absl::OkStatus();
}

}  // namespace
}  // namespace verify

absl::StatusOr<VerifyReport> Verify(const std::string& path, const VerifyOptions& options) {
  HOLDFAST_RETURN_IF_ERROR(load::CheckReadOptions(options.buffer_bytes, options.threads));
  const uint64_t started = sys::NowNs();
  const directory::PathParts parts = directory::SplitPath(path);
  const auto parent = directory::OpenDirectory(parts.directory);
  const auto look = [&]() -> absl::StatusOr<directory::Entry> {
    if (!parent.ok()) return parent.status();
    return directory::Look(parent->get(), parts.name, /*follow_symlink=*/true);
  };
  VerifyReport report;
  auto entry = look();
  for (int looks = 1;; ++looks) {
    report = VerifyReport();
    report.path = path;
    report.checked = "nothing";
    verify::FaultLog log(options.faults_max);
    const absl::Status status = verify::CheckEntry(path, entry, options, &log, &report);
    // No engine, no memory, an unresponsive disk: the state of the bytes is unknown.
    if (!status.ok()) log.Add(directory::FindingOf(status, "", "read"));
    const bool sound = log.empty();
    log.MoveTo(&report);
    if (sound || !entry.ok()) break;
    // A checkpoint that a save replaces, or that retention removes, is no damaged one.
    auto now = look();
    if (!now.ok() || verify::IsSame(*entry, *now)) break;
    if (looks == directory::kLooksMax) {
      report.verdict = Verdict::kUnreadable;
      report.faults = {verify::NeverStays(parts.name)};
      report.faults_total = 1;
      break;
    }
    entry = std::move(now);
  }
  // An uncommitted directory is no checkpoint, regardless of further faults.
  if (format::IsUncommittedName(parts.name) && report.verdict != Verdict::kUnreadable)
    report.verdict = Verdict::kIncomplete;
  report.seconds = static_cast<double>(sys::NowNs() - started) / 1e9;
  return report;
}

}  // namespace holdfast
