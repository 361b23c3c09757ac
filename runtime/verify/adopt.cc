// Adopt: a manifest for another program's files, made from their bytes on disk.
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "holdfast/checkpointer.h"
#include "holdfast/verify.h"
#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"
#include "runtime/directory/entries.h"
#include "runtime/directory/rename.h"
#include "runtime/format/directory_names.h"
#include "runtime/format/file_names.h"
#include "runtime/format/manifest.h"
#include "runtime/format/text.h"
#include "runtime/load/chunk_stream.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/retry.h"
#include "runtime/sys/system.h"
#include "runtime/verify/fault_log.h"
#include "runtime/verify/manifest_fill.h"
#include "runtime/verify/read_faults.h"
#include "runtime/verify/verify_foreign.h"

namespace holdfast {
namespace verify {
namespace {

using load::StreamBlock;
using load::StreamVerdict;

/// Refuses an entry that is a checkpoint's directory: with a manifest beside it, the directory
/// above would count as one checkpoint, and hide those inside.
absl::Status CheckIsNone(int directory, const std::string& name) {
  HOLDFAST_ASSIGN_OR_RETURN(const base::UniqueFd inside, directory::OpenDirectory(directory, name));
  HOLDFAST_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                            directory::ListNames(inside.get(), name));
  if (std::none_of(names.begin(), names.end(), format::IsCommitFile)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("it holds checkpoints (", format::Quoted(name),
                   "); name the directory of one, or move other files into a directory of theirs"));
}

/// Returns the files to adopt: regular files, with names that a manifest allows. `only`: that one.
absl::StatusOr<std::vector<std::string>> FilesToAdopt(int directory, const std::string& path,
                                                      const std::vector<std::string>& names,
                                                      const std::string& only) {
  std::vector<std::string> files;
  for (const std::string& name : names) {
    if (format::ParseCompanionName(name).has_value() || format::IsDrainLock(name)) continue;
    const std::string object = absl::StrCat("adopt ", path, "/", format::Quoted(name));
    HOLDFAST_ASSIGN_OR_RETURN(const directory::Entry entry,
                              directory::Look(directory, name, /*follow_symlink=*/false));
    if (entry.kind == directory::EntryKind::kDirectory) {
      HOLDFAST_RETURN_IF_ERROR(
          base::Annotate(CheckIsNone(directory, name), absl::StrCat("adopt ", path)));
      continue;
    }
    if (!only.empty() && name != only) continue;
    if (entry.kind != directory::EntryKind::kFile) {
      return absl::FailedPreconditionError(absl::StrCat(
          object, ": not a regular file; a manifest names only what lies in its own directory"));
    }
    if (!format::IsUtf8(name)) {
      return absl::FailedPreconditionError(absl::StrCat(object, ": its name is not UTF-8"));
    }
    files.push_back(name);
  }
  if (files.empty()) {
    return absl::FailedPreconditionError(absl::StrCat("adopt ", path, ": no file is there"));
  }
  return files;
}

/// Refuses damaged files: a digest of damaged bytes would declare them right.
absl::Status CheckForeign(const std::string& path, ForeignCheck* check, FaultLog* log) {
  VerifyReport report;
  HOLDFAST_RETURN_IF_ERROR(check->Run(VerifyOptions{}, &report));
  if (!check->orphans().empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("adopt ", path, ": ", Enumerate(check->orphans()),
                     " was written by a save that did not end (it carries an attempt id and has no "
                     "manifest); adopting it would make a partial checkpoint look complete"));
  }
  log->MoveTo(&report);
  if (report.faults.empty()) return absl::OkStatus();
  const Fault& fault = report.faults.front();
  return absl::Status(report.verdict == Verdict::kCorrupt ? absl::StatusCode::kDataLoss
                                                          : absl::StatusCode::kFailedPrecondition,
                      absl::StrCat("adopt ", path, "/", fault.file, ": ", fault.reason,
                                   ": expected ", fault.expected, ", found ", fault.found));
}

absl::StatusOr<SavePlan> PlanOf(int directory, const std::vector<std::string>& files,
                                const ForeignCheck& check) {
  SavePlan plan;
  std::set<std::string> taken;
  for (uint32_t i = 0; i < files.size(); ++i) {
    HOLDFAST_ASSIGN_OR_RETURN(const directory::Entry entry,
                              directory::Look(directory, files[i], false));
    plan.files.push_back({.name = files[i], .bytes = entry.bytes, .segments = {}});
    for (const ForeignCheck::Understood& understood : check.understood()) {
      if (understood.name != files[i]) continue;
      for (PlannedTensor tensor : understood.tensors) {
        // Shards of one model have different tensors; torch zips all have "archive/data/0".
        if (!taken.insert(tensor.name).second) {
          tensor.name = absl::StrCat(files[i], ":", tensor.name);
          if (!taken.insert(tensor.name).second) continue;  // the bytes have chunk digests anyway
        }
        tensor.file = i;
        plan.tensors.push_back(std::move(tensor));
      }
    }
  }
  return plan;
}

absl::StatusOr<std::string> DigestFiles(int directory, const SavePlan& plan,
                                        const format::ManifestInput& input) {
  ManifestFill fill(input, plan);
  std::vector<load::StreamFile> files;
  std::vector<load::StreamRange> ranges;
  for (uint32_t i = 0; i < plan.files.size(); ++i) {
    files.push_back({.directory = directory, .name = plan.files[i].name});
    load::AppendRanges(i, 0, plan.files[i].bytes, 0, &ranges);
  }
  FaultLog log(1);
  VerifyReport report;
  HOLDFAST_RETURN_IF_ERROR(StreamAll(
      files, ranges, VerifyOptions{},
      [&](const StreamBlock& block) {
        if (AddReadFault(block, files[block.range.file].name, &log)) return StreamVerdict::kStop;
        fill.AddChunk(block.range.file, block.range.offset / kChunkBytes, block.data,
                      block.range.bytes);
        return StreamVerdict::kContinue;
      },
      &report));
  log.MoveTo(&report);
  if (!report.faults.empty()) {
    return absl::DataLossError(
        absl::StrCat("adopt ", report.faults[0].file, ": ", report.faults[0].found));
  }
  return fill.Finish(report.engine, "adopted", report.direct_io);
}

absl::Status Sync(int directory, const std::string& name) {
  HOLDFAST_ASSIGN_OR_RETURN(const base::UniqueFd fd, directory::OpenFile(directory, name, false));
  if (sys::Sys().fsync(fd.get()) != 0) return base::ErrnoStatus("fsync", name, errno);
  return absl::OkStatus();
}

/// Writes the manifest beside its files, atomically.
absl::Status Commit(int directory, const SavePlan& plan, const std::string& text) {
  HOLDFAST_RETURN_IF_ERROR(format::CheckManifestBytes(text.size()));
  const std::string name = format::ManifestName(0, 1);
  const std::string temporary = absl::StrCat(".", name, ".adopting");
  // The files first: a manifest that survives a power loss must not name lost bytes.
  for (const PlannedFile& file : plan.files) {
    HOLDFAST_RETURN_IF_ERROR(Sync(directory, file.name));
  }
  base::UniqueFd fd(sys::OpenOwned(directory, temporary.c_str(),
                                   O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666));
  if (!fd.valid()) return base::ErrnoStatus("create", temporary, errno);
  auto remove =
      absl::MakeCleanup([&] { (void)sys::Sys().unlinkat(directory, temporary.c_str(), 0); });
  const int error = sys::WriteAll(fd.get(), text.data(), text.size());
  if (error != 0) return base::ErrnoStatus("write", temporary, error);
  // The bytes before the name: otherwise a crash could leave an empty manifest of that name.
  if (sys::Sys().fsync(fd.get()) != 0) return base::ErrnoStatus("fsync", temporary, errno);
  HOLDFAST_RETURN_IF_ERROR(directory::RenameNoReplace(directory, temporary, name));
  std::move(remove).Cancel();
  // The name itself: without the fsync a crash could undo the rename after the report of success.
  return directory::SyncDirectory(directory, absl::StrCat("of ", name));
}

absl::Status AdoptFiles(const std::string& directory_path, const std::string& only) {
  HOLDFAST_ASSIGN_OR_RETURN(const base::UniqueFd fd, directory::OpenDirectory(directory_path));
  HOLDFAST_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                            directory::ListNames(fd.get(), directory_path));
  for (const std::string& name : names) {
    if (!format::ParseManifestName(name).has_value()) continue;
    return absl::AlreadyExistsError(
        absl::StrCat("adopt ", directory_path, ": ", name, " is there already"));
  }
  const std::string checkpoint = directory::SplitPath(directory::AbsolutePath(directory_path)).name;
  if (format::IsUncommittedName(checkpoint)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "adopt ", directory_path, ": a save that did not end; it cannot be made complete"));
  }
  // Before all bytes are read.
  if (const char* const wrong = format::WrongComponent(checkpoint)) {
    return absl::FailedPreconditionError(
        absl::StrCat("adopt ", directory_path, ": the name of its directory: ", wrong));
  }
  HOLDFAST_ASSIGN_OR_RETURN(const std::vector<std::string> files,
                            FilesToAdopt(fd.get(), directory_path, names, only));
  for (const std::string& name : files) {
    if (const char* const wrong = format::WrongDataFileName(name)) {
      return absl::FailedPreconditionError(
          absl::StrCat("adopt ", directory_path, ": ", name, ": ", wrong, "; rename or remove it"));
    }
  }
  FaultLog log(1);
  ForeignCheck check(fd.get(), &log, ForeignCheck::Unknown::kPassOver);
  for (const std::string& name : files) check.AddFile(name, /*asked_for=*/!only.empty());
  HOLDFAST_RETURN_IF_ERROR(CheckForeign(directory_path, &check, &log));
  HOLDFAST_ASSIGN_OR_RETURN(const SavePlan plan, PlanOf(fd.get(), files, check));
  format::ManifestInput input;
  input.checkpoint = checkpoint;
  input.adopted = true;
  input.attempt = NewAttemptId();
  // The state was saved by the program that wrote the files: use the newest file time.
  for (const PlannedFile& file : plan.files) {
    HOLDFAST_ASSIGN_OR_RETURN(const directory::Entry entry,
                              directory::Look(fd.get(), file.name, false));
    input.saved_at_ns =
        std::max(input.saved_at_ns, static_cast<uint64_t>(std::max<int64_t>(entry.modified_ns, 0)));
  }
  HOLDFAST_ASSIGN_OR_RETURN(const std::string text, DigestFiles(fd.get(), plan, input));
  const auto parsed = format::ParseManifest(text);
  if (!parsed.ok()) {
    return base::Annotate(parsed.status(), absl::StrCat("adopt ", directory_path));
  }
  return Commit(fd.get(), plan, text);
}

}  // namespace
}  // namespace verify

absl::Status Adopt(const std::string& path) {
  const directory::PathParts parts = directory::SplitPath(path);
  HOLDFAST_ASSIGN_OR_RETURN(const base::UniqueFd parent, directory::OpenDirectory(parts.directory));
  HOLDFAST_ASSIGN_OR_RETURN(const directory::Entry entry,
                            directory::Look(parent.get(), parts.name, /*follow_symlink=*/true));
  if (entry.kind == directory::EntryKind::kDirectory) return verify::AdoptFiles(path, "");
  if (entry.kind == directory::EntryKind::kNothing) {
    return absl::NotFoundError(absl::StrCat("adopt ", path, ": nothing of that name"));
  }
  return verify::AdoptFiles(parts.directory, parts.name);
}

}  // namespace holdfast
