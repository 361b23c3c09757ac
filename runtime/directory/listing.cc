#include "runtime/directory/listing.h"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "runtime/base/planted_bugs.h"
#include "runtime/base/status.h"
#include "runtime/directory/commit_file.h"
#include "runtime/directory/completeness.h"
#include "runtime/directory/entries.h"
#include "runtime/format/directory_names.h"

namespace holdfast {
namespace directory {
namespace {

bool IsOfThisProcess(const absl::Status& status) {
  const int error_number = base::ErrnoOf(status);
  return error_number == EMFILE || error_number == ENFILE || error_number == ENOMEM;
}

/// Adds an entry of `parent` to the complete checkpoints, or to the entries passed over.
/// \error of this process.
absl::Status Add(int parent, const std::string& path, const std::string& name,
                 Inspection (*inspect)(int directory), Listing* listing) {
  auto checkpoint = OpenDirectory(parent, name);
  if (absl::IsNotFound(checkpoint.status())) return absl::OkStatus();
  Inspection inspection;
  if (checkpoint.ok()) {
    inspection = inspect(checkpoint->get());
  } else {
    inspection.reason = checkpoint.status();
  }
  if (inspection.state == Verdict::kSound) {
    inspection.info.name = name;
    inspection.info.path = absl::StrCat(path, "/", name);
    listing->complete.push_back(std::move(inspection.info));
    return absl::OkStatus();
  }
  const absl::Status reason = base::Annotate(inspection.reason, absl::StrCat(path, "/", name));
  // The newest checkpoint must not look absent for lack of descriptors or memory. Training would go
  // on from an older one, and a second call may succeed.
  if (IsOfThisProcess(reason)) return reason;
  // A directory that may not be opened (lost+found) is rarely a checkpoint.
  const bool unreadable = inspection.state == Verdict::kUnreadable;
  if (unreadable) listing->unreadable.Update(reason);
  if (unreadable || inspection.has_manifest || !checkpoint.ok()) {
    listing->passed_over.push_back(absl::StrCat(name, ": ", inspection.reason.message()));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ListDirectories(int directory, const std::string& path,
                                                         bool committed) {
  HOLDFAST_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries,
                            ListDirectory(directory, path));
  std::vector<std::string> names;
  for (const DirectoryEntry& entry : entries) {
    if (entry.is_directory && format::IsUncommittedName(entry.name) != committed)
      names.push_back(entry.name);
  }
  return names;
}

bool OlderThan(const CheckpointInfo& a, const CheckpointInfo& b) {
  if (base::Planted(base::Bug::kNewestByStep)) return a.step < b.step;
  return std::tie(a.saved_at, a.step, a.name) < std::tie(b.saved_at, b.step, b.name);
}

absl::StatusOr<Listing> ListComplete(int directory, const std::string& path, Proof proof) {
  HOLDFAST_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                            ListDirectories(directory, path, /*committed=*/true));
  const auto inspect = proof == Proof::kRecord ? InspectCommitted : Inspect;
  Listing listing;
  for (const std::string& name : names) {
    HOLDFAST_RETURN_IF_ERROR(Add(directory, path, name, inspect, &listing));
  }
  std::sort(listing.complete.begin(), listing.complete.end(), OlderThan);
  return listing;
}

Recorded ReadRecorded(int directory) {
  Recorded recorded;
  const auto names = ListDirectories(directory, "directory", /*committed=*/true);
  if (!names.ok()) return recorded;
  for (const std::string& name : *names) {
    const auto checkpoint = OpenDirectory(directory, name);
    if (!checkpoint.ok()) continue;
    std::optional<Inspection> found = InspectRecord(checkpoint->get());
    if (!found.has_value()) {
      recorded.latest_ns = std::max(recorded.latest_ns, LatestFrameworkSaveNs(checkpoint->get()));
      continue;
    }
    found->info.name = name;
    const int64_t saved_at_ns = absl::ToUnixNanos(found->info.saved_at);
    recorded.latest_ns = std::max(recorded.latest_ns, static_cast<uint64_t>(saved_at_ns));
    CheckpointInfo& newest = recorded.newest[format::SeriesOf(name)];
    if (newest.attempt == AttemptId{} || OlderThan(newest, found->info)) newest = found->info;
  }
  return recorded;
}

}  // namespace directory

absl::StatusOr<CheckpointInfo> InspectCheckpoint(const std::string& path) {
  // "/.": the path itself may be a symbolic link, for example "latest".
  auto opened = directory::OpenDirectory(absl::StrCat(path, "/."));
  if (!opened.ok()) return opened.status();
  const std::string name = directory::SplitPath(path).name;
  if (format::IsUncommittedName(name)) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": incomplete: it does not stand under its final name"));
  }
  directory::Inspection inspection = directory::Inspect(opened->get());
  if (inspection.state != Verdict::kSound) {
    return base::Annotate(inspection.reason, path);
  }
  inspection.info.name = name;
  inspection.info.path = path;
  return inspection.info;
}

namespace {

absl::StatusOr<std::vector<CheckpointInfo>> List(const std::string& directory,
                                                 directory::Proof proof,
                                                 std::vector<std::string>* passed_over) {
  auto opened = directory::OpenDirectory(absl::StrCat(directory, "/."));
  if (!opened.ok()) return base::Annotate(opened.status(), absl::StrCat("list ", directory));
  HOLDFAST_ASSIGN_OR_RETURN(directory::Listing listing,
                            directory::ListComplete(opened->get(), directory, proof));
  // An empty list would make training begin anew.
  if (listing.complete.empty() && !listing.unreadable.ok()) return listing.unreadable;
  if (passed_over != nullptr) *passed_over = std::move(listing.passed_over);
  return std::move(listing.complete);
}

}  // namespace

absl::StatusOr<std::vector<CheckpointInfo>> ListCheckpoints(const std::string& directory,
                                                            std::vector<std::string>* passed_over) {
  return List(directory, directory::Proof::kFiles, passed_over);
}

absl::StatusOr<std::vector<CheckpointInfo>> ListRecorded(const std::string& directory,
                                                         std::vector<std::string>* passed_over) {
  return List(directory, directory::Proof::kRecord, passed_over);
}

absl::StatusOr<CheckpointInfo> FindNewest(const std::string& directory,
                                          std::vector<std::string>* passed_over) {
  auto opened = directory::OpenDirectory(absl::StrCat(directory, "/."));
  if (!opened.ok()) return base::Annotate(opened.status(), absl::StrCat("list ", directory));
  HOLDFAST_ASSIGN_OR_RETURN(
      directory::Listing listing,
      directory::ListComplete(opened->get(), directory, directory::Proof::kRecord));
  directory::Listing proven;
  for (; proven.complete.empty() && !listing.complete.empty(); listing.complete.pop_back()) {
    // The record proves the commit only. The returned checkpoint's files are checked here.
    HOLDFAST_RETURN_IF_ERROR(directory::Add(opened->get(), directory, listing.complete.back().name,
                                            directory::Inspect, &proven));
  }
  std::move(proven.passed_over.begin(), proven.passed_over.end(),
            std::back_inserter(listing.passed_over));
  if (proven.complete.empty()) {
    listing.unreadable.Update(proven.unreadable);
    // An empty answer would make training begin anew.
    if (!listing.unreadable.ok()) return listing.unreadable;
    return absl::NotFoundError(absl::StrCat(directory, ": no complete checkpoint",
                                            listing.passed_over.empty() ? "" : "; passed over ",
                                            absl::StrJoin(listing.passed_over, "; ")));
  }
  if (passed_over != nullptr) *passed_over = std::move(listing.passed_over);
  return std::move(proven.complete.back());
}

}  // namespace holdfast
