#include "runtime/directory/listing.h"

#include <fcntl.h>

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

/// Inspects the directory that has a name. A save may replace it meanwhile and remove its files:
/// then its successor is inspected. \error of opening the directory.
absl::StatusOr<Inspection> InspectNamed(int parent, const std::string& name,
                                        Inspection (*inspect)(int directory)) {
  constexpr int kTriesMax = 100;  // a file system may give a directory several inode numbers
  for (int tries = 1;; ++tries) {
    HOLDFAST_ASSIGN_OR_RETURN(const base::UniqueFd directory, OpenDirectory(parent, name));
    Inspection inspection = inspect(directory.get());
    if (inspection.state == Verdict::kSound || tries == kTriesMax ||
        NameRefersTo(parent, name, directory.get())) {
      return inspection;
    }
  }
}

/// Adds an entry of `parent` to the complete checkpoints, or to the entries passed over. Returns
/// whether it is there still.
/// \error of this process.
absl::StatusOr<bool> Add(int parent, const std::string& path, const std::string& name,
                         Inspection (*inspect)(int directory), Listing* listing) {
  auto inspected = InspectNamed(parent, name, inspect);
  if (absl::IsNotFound(inspected.status())) return false;
  Inspection inspection;
  if (inspected.ok()) {
    inspection = *std::move(inspected);
  } else {
    inspection.reason = inspected.status();
  }
  if (inspection.state == Verdict::kSound) {
    inspection.info.name = name;
    inspection.info.path = absl::StrCat(path, "/", name);
    listing->complete.push_back(std::move(inspection.info));
    return true;
  }
  const absl::Status reason = base::Annotate(inspection.reason, absl::StrCat(path, "/", name));
  // The newest checkpoint must not look absent for lack of descriptors or memory. Training would go
  // on from an older one, and a second call may succeed.
  if (IsOfThisProcess(reason)) return reason;
  // A directory that may not be opened (lost+found) is rarely a checkpoint.
  const bool unreadable = inspection.state == Verdict::kUnreadable;
  if (unreadable) listing->unreadable.Update(reason);
  if (unreadable || inspection.has_manifest || !inspected.ok()) {
    listing->passed_over.push_back(absl::StrCat(name, ": ", inspection.reason.message()));
  }
  return true;
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
  const auto inspect = proof == Proof::kRecord ? InspectCommitted : Inspect;
  Listing listing;
  std::vector<std::string> names;
  // A removed checkpoint has made room for a later checkpoint, which the listing may lack.
  for (bool is_old = true; is_old;) {
    HOLDFAST_ASSIGN_OR_RETURN(std::vector<std::string> found,
                              ListDirectories(directory, path, /*committed=*/true));
    // A file system may list a removed directory for a while.
    const bool may_be_old = found != names;
    names = std::move(found);
    listing = {};
    is_old = false;
    for (const std::string& name : names) {
      HOLDFAST_ASSIGN_OR_RETURN(const bool is_there, Add(directory, path, name, inspect, &listing));
      is_old |= !is_there && may_be_old;
    }
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
  const std::string name = directory::SplitPath(path).name;
  if (format::IsUncommittedName(name)) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": incomplete: it does not stand under its final name"));
  }
  // "/.": the path itself may be a symbolic link, for example "latest".
  HOLDFAST_ASSIGN_OR_RETURN(
      directory::Inspection inspection,
      directory::InspectNamed(AT_FDCWD, absl::StrCat(path, "/."), directory::Inspect));
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
  directory::Listing listing;
  directory::Listing proven;
  for (bool is_old = true; is_old;) {
    HOLDFAST_ASSIGN_OR_RETURN(
        listing, directory::ListComplete(opened->get(), directory, directory::Proof::kRecord));
    proven = {};
    is_old = false;
    for (; !is_old && proven.complete.empty() && !listing.complete.empty();
         listing.complete.pop_back()) {
      // The record proves the commit only. The returned checkpoint's files are checked here.
      HOLDFAST_ASSIGN_OR_RETURN(const bool is_there, directory::Add(opened->get(), directory,
                                                                    listing.complete.back().name,
                                                                    directory::Inspect, &proven));
      is_old = !is_there;
    }
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
