#include "runtime/checkpointer/inspect.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "runtime/base/status.h"
#include "runtime/checkpointer/directory_access.h"
#include "runtime/checkpointer/planted_bugs.h"
#include "runtime/format/directory_names.h"
#include "runtime/format/manifest.h"
#include "runtime/load/checkpoint_files.h"
#include "runtime/sys/system.h"

namespace holdfast {
namespace checkpointer {
namespace {

using State = Inspection::State;

Inspection Not(State state, absl::Status reason) {
  Inspection inspection;
  inspection.state = state;
  inspection.reason = std::move(reason);
  inspection.has_manifest = true;
  return inspection;
}

/// An error with an errno says nothing about the checkpoint, except that something is not there.
Inspection NotReadable(const absl::Status& status) {
  const int error_number = base::ErrnoOf(status);
  if (error_number == ENOENT) {
    return Not(State::kIncomplete, absl::FailedPreconditionError(status.message()));
  }
  if (error_number == 0 || error_number == ELOOP) {
    return Not(State::kDamaged, absl::DataLossError(status.message()));
  }
  return Not(State::kUnreadable, status);
}

/// Holds the files of one manifest against what is on disk. kComplete if they are as recorded.
Inspection CheckFiles(int directory, const format::Manifest& manifest,
                      std::set<std::string>* claimed) {
  for (const format::Manifest::File& file : manifest.files) {
    if (!claimed->insert(file.name).second) {
      return Not(State::kDamaged,
                 absl::DataLossError(absl::StrCat(file.name, " is claimed by two ranks")));
    }
    struct stat found = {};
    if (sys::Sys().fstatat(directory, file.name.c_str(), &found, AT_SYMLINK_NOFOLLOW) != 0) {
      return NotReadable(base::ErrnoStatus("stat", file.name, errno));
    }
    if (!S_ISREG(found.st_mode)) {
      return Not(State::kDamaged,
                 absl::DataLossError(absl::StrCat(file.name, " is not a regular file")));
    }
    if (static_cast<uint64_t>(found.st_size) != file.bytes && !Planted(Bug::kPromoteWithoutSizes)) {
      return Not(State::kIncomplete, absl::FailedPreconditionError(absl::StrCat(
                                         "incomplete: ", file.name, " has ", found.st_size,
                                         " bytes, its manifest says ", file.bytes)));
    }
  }
  Inspection sound;
  sound.state = State::kComplete;
  return sound;
}

}  // namespace

bool IsManifestName(absl::string_view name) {
  return absl::StartsWith(name, "rank-") && absl::EndsWith(name, ".manifest.json");
}

Inspection Inspect(int directory) {
  auto entries = ListDirectory(directory);
  if (!entries.ok()) return NotReadable(entries.status());
  Inspection inspection;
  std::set<std::string> claimed;
  uint64_t ranks_seen = 0;
  for (const DirectoryEntry& entry : *entries) {
    if (!IsManifestName(entry.name)) continue;
    // A framework owns the directory: its own last file says whether it is complete.
    const auto identity = load::ParseManifestName(entry.name);
    if (identity.has_value() && identity->attempt.has_value()) continue;
    const auto text = ReadFile(directory, entry.name, format::kManifestBytesMax);
    if (!text.ok()) return NotReadable(text.status());
    const auto manifest = format::ParseManifest(absl::string_view(text->data(), text->size()));
    if (!manifest.ok()) {
      return Not(State::kDamaged, base::Annotate(manifest.status(), entry.name));
    }
    if (entry.name != format::ManifestName(manifest->rank, manifest->world_size)) {
      return Not(State::kDamaged,
                 absl::DataLossError(absl::StrCat(entry.name, " is the manifest of another rank")));
    }
    CheckpointInfo& info = inspection.info;
    if (!inspection.has_manifest) {
      inspection.has_manifest = true;
      inspection.recorded_name = manifest->checkpoint;
      info.step = manifest->step;
      info.attempt = manifest->attempt;
      info.world_size = manifest->world_size;
    }
    // Two attempts in one directory: one of them was never finished, and which of the files are
    // whose cannot be told.
    if (manifest->attempt != info.attempt || manifest->world_size != info.world_size ||
        manifest->step != info.step || manifest->checkpoint != inspection.recorded_name) {
      return Not(State::kIncomplete,
                 absl::FailedPreconditionError(absl::StrCat(
                     "incomplete: ", entry.name, " belongs to another attempt than the others")));
    }
    Inspection files = CheckFiles(directory, *manifest, &claimed);
    if (files.state != State::kComplete) return files;
    for (const format::Manifest::File& file : manifest->files) info.bytes += file.bytes;
    ++ranks_seen;
  }
  if (ranks_seen == 0) {
    inspection.reason = absl::FailedPreconditionError("incomplete: it has no rank manifest");
    return inspection;
  }
  if (ranks_seen != inspection.info.world_size) {
    inspection.reason =
        absl::FailedPreconditionError(absl::StrCat("incomplete: manifests of ", ranks_seen, " of ",
                                                   inspection.info.world_size, " ranks are there"));
    return inspection;
  }
  inspection.state = State::kComplete;
  return inspection;
}

absl::StatusOr<std::vector<CheckpointInfo>> ListComplete(int directory, const std::string& path,
                                                         std::vector<std::string>* incomplete) {
  auto entries = ListDirectory(directory);
  if (!entries.ok()) return base::Annotate(entries.status(), path);
  std::vector<CheckpointInfo> complete;
  for (const DirectoryEntry& entry : *entries) {
    if (!entry.is_directory) continue;
    if (format::ParseDirectoryName(entry.name).kind != format::DirectoryKind::kFinal) continue;
    auto checkpoint = OpenDirectory(directory, entry.name);
    if (absl::IsNotFound(checkpoint.status())) continue;
    if (base::ErrnoOf(checkpoint.status()) == EACCES) continue;  // somebody else's
    // Any other error must not make the newest checkpoint look absent: training would silently go
    // on from an older one.
    if (!checkpoint.ok()) return base::Annotate(checkpoint.status(), path);
    Inspection inspection = Inspect(checkpoint->get());
    if (inspection.state == State::kUnreadable) {
      return base::Annotate(inspection.reason, absl::StrCat(path, "/", entry.name));
    }
    if (inspection.state != State::kComplete) {
      if (incomplete != nullptr && inspection.has_manifest) {
        incomplete->push_back(absl::StrCat(entry.name, ": ", inspection.reason.message()));
      }
      continue;
    }
    inspection.info.name = entry.name;
    inspection.info.path = absl::StrCat(path, "/", entry.name);
    complete.push_back(std::move(inspection.info));
  }
  // Equal steps keep the order of their names.
  std::stable_sort(
      complete.begin(), complete.end(),
      [](const CheckpointInfo& a, const CheckpointInfo& b) { return a.step < b.step; });
  return complete;
}

}  // namespace checkpointer

namespace {

using checkpointer::Inspection;
using format::DirectoryKind;

std::string LastComponent(const std::string& path) {
  const size_t end = path.find_last_not_of('/');
  if (end == std::string::npos) return path;
  const size_t slash = path.find_last_of('/', end);
  return path.substr(slash == std::string::npos ? 0 : slash + 1,
                     end - (slash == std::string::npos ? 0 : slash + 1) + 1);
}

}  // namespace

absl::StatusOr<CheckpointInfo> InspectCheckpoint(const std::string& path) {
  // "/.": the path itself may be a symbolic link, as "latest" often is.
  auto directory = checkpointer::OpenDirectory(AT_FDCWD, absl::StrCat(path, "/."));
  if (!directory.ok()) return directory.status();
  const std::string name = LastComponent(path);
  if (format::ParseDirectoryName(name).kind != format::DirectoryKind::kFinal) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": incomplete: it does not stand under its final name"));
  }
  Inspection inspection = checkpointer::Inspect(directory->get());
  if (inspection.state != Inspection::State::kComplete) {
    return base::Annotate(inspection.reason, path);
  }
  inspection.info.name = name;
  inspection.info.path = path;
  return inspection.info;
}

absl::StatusOr<std::vector<CheckpointInfo>> ListCheckpoints(const std::string& directory) {
  auto opened = checkpointer::OpenDirectory(AT_FDCWD, absl::StrCat(directory, "/."));
  if (!opened.ok()) return base::Annotate(opened.status(), absl::StrCat("list ", directory));
  return checkpointer::ListComplete(opened->get(), directory, nullptr);
}

absl::StatusOr<CheckpointInfo> FindNewest(const std::string& directory) {
  auto complete = ListCheckpoints(directory);
  if (!complete.ok()) return complete.status();
  if (complete->empty()) {
    return absl::NotFoundError(absl::StrCat(directory, ": no complete checkpoint"));
  }
  return complete->back();
}

}  // namespace holdfast
