// After a crash: promote complete directories, wait for orphans or fence them, then remove the
// rest.
//
// Recovery judges every directory anew under its lock at the moment of the action. No earlier
// result is carried over. So a crash of the recovery itself, at any call, leaves work for the next
// recovery and no wrong state.
#include "holdfast/recovery.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/base/clock.h"
#include "runtime/base/planted_bugs.h"
#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"
#include "runtime/directory/commit_file.h"
#include "runtime/directory/completeness.h"
#include "runtime/directory/entries.h"
#include "runtime/directory/file_system.h"
#include "runtime/directory/listing.h"
#include "runtime/directory/locks.h"
#include "runtime/directory/removal.h"
#include "runtime/directory/rename.h"
#include "runtime/directory/replacement.h"
#include "runtime/format/directory_names.h"
#include "runtime/recovery/single_files.h"
#include "runtime/sys/system.h"

namespace holdfast {
namespace recovery {

using directory::Inspection;
using directory::Owner;
using directory::SyncDirectory;
namespace {

constexpr absl::Duration kOrphanPoll = absl::Milliseconds(20);
// The interval on file systems where each check is a request to a server.
constexpr absl::Duration kPollSilence = absl::Seconds(1);
// Longer than another recovery's removals, which take about 0.25 s/GiB.
constexpr absl::Duration kTurnMax = absl::Minutes(10);

constexpr int kOrphanWaits = 10;

constexpr char kStillAtWork[] =
    "a worker without a trainer is still at work there; recover again later";

/// Waits for an orphan's progress, in all.
absl::Duration LongestWait(const RecoveryOptions& options) {
  return kOrphanWaits * options.wait_for_orphans;
}

/// The times of change of a directory's entries, by name, and of its listing under "".
using Times = std::map<std::string, absl::Time>;

/// Empty when unknown.
Times TimesOf(int directory) {
  struct stat found = {};
  if (sys::Sys().fstat(directory, &found) != 0) return {};
  const auto entries = directory::ListDirectory(directory);
  if (!entries.ok()) return {};
  Times times = {{"", absl::TimeFromTimespec(found.st_mtim)}};
  for (const directory::DirectoryEntry& entry : *entries) {
    if (sys::Sys().fstatat(directory, entry.name.c_str(), &found, AT_SYMLINK_NOFOLLOW) == 0) {
      times[entry.name] = absl::TimeFromTimespec(found.st_mtim);
    }
  }
  return times;
}

/// InfiniteFuture when unknown.
absl::Time LastChange(int directory) {
  const Times times = TimesOf(directory);
  if (times.empty()) return absl::InfiniteFuture();
  const auto earlier = [](const auto& a, const auto& b) { return a.second < b.second; };
  return std::max_element(times.begin(), times.end(), earlier)->second;
}

/// True for a complete checkpoint with the attempt and the name in its directory's name.
bool IsOwn(const Inspection& inspection, const format::DirectoryName& name) {
  return inspection.state == Verdict::kSound &&
         (inspection.info.attempt == name.attempt ||
          base::Planted(base::Bug::kPromoteOtherAttempt)) &&
         inspection.recorded_name == name.checkpoint;
}

class Recovery {
 public:
  Recovery(int parent, const std::string& path, const directory::FileSystem& file_system,
           const RecoveryOptions& options)
      : parent_(parent),
        path_(path),
        file_system_(file_system),
        options_(options),
        probe_(parent, file_system.local) {}

  absl::StatusOr<RecoveryReport> Run();

 private:
  enum class Outcome { kSettled, kOrphan, kNotYetSilent, kKept };
  struct Visit {
    Outcome outcome = Outcome::kSettled;
    std::string why;  // for kNotYetSilent and kKept
  };
  static Visit Keep(std::string why) { return {.outcome = Outcome::kKept, .why = std::move(why)}; }

  void PutLatestFirst(std::vector<std::string>* names) const;
  std::map<std::string, Times> TimesOfAll(const std::vector<std::string>& orphans) const;
  absl::Status PromoteAndAwaitOrphans(std::vector<std::string>* orphans);
  absl::Status Fence(const std::string& name);
  absl::Status CleanUp();
  absl::StatusOr<Visit> Settle(const std::string& name, bool may_remove);
  absl::StatusOr<Visit> SettlePartial(const std::string& name, int directory,
                                      const Inspection& inspection, bool may_remove);
  absl::StatusOr<Visit> Promote(const std::string& name, int directory,
                                const std::string& checkpoint, const Inspection& inspection,
                                bool may_remove);
  absl::StatusOr<Visit> Replace(const std::string& name, int directory,
                                const std::string& checkpoint, const Inspection& inspection,
                                bool may_remove);
  absl::StatusOr<Visit> Promoted(const std::string& checkpoint);
  Visit Remove(const std::string& name, int directory, bool may_remove);
  Visit JudgeByAge(const format::DirectoryName& name, int directory,
                   const Inspection& inspection) const;
  Inspection InspectName(const std::string& checkpoint) const;

  const int parent_;
  const std::string path_;
  const directory::FileSystem file_system_;
  const RecoveryOptions options_;
  const directory::OwnerProbe probe_;
  RecoveryReport report_;
};

absl::StatusOr<RecoveryReport> Recovery::Run() {
  std::vector<std::string> orphans;
  HOLDFAST_RETURN_IF_ERROR(PromoteAndAwaitOrphans(&orphans));
  if (options_.clean_up && !base::Planted(base::Bug::kNoFence)) {
    for (const std::string& name : orphans) HOLDFAST_RETURN_IF_ERROR(Fence(name));
  }
  HOLDFAST_RETURN_IF_ERROR(CleanUp());
  HOLDFAST_RETURN_IF_ERROR(SettleSingleFiles(parent_, path_, file_system_, options_, &report_));
  // A worker may have died between rename and fsync. Callers build on the reported checkpoints,
  // which must survive the next power loss.
  if (!base::Planted(base::Bug::kReportWithoutParentSync)) {
    HOLDFAST_RETURN_IF_ERROR(SyncDirectory(parent_, path_));
  }
  HOLDFAST_ASSIGN_OR_RETURN(directory::Listing listing,
                            directory::ListComplete(parent_, path_, directory::Proof::kFiles));
  report_.complete = std::move(listing.complete);
  std::move(listing.passed_over.begin(), listing.passed_over.end(),
            std::back_inserter(report_.kept_incomplete));
  return std::move(report_);
}

/// Sorts the directories of saves of one name by the time of the save: the latest save gets the
/// name.
void Recovery::PutLatestFirst(std::vector<std::string>* names) const {
  std::map<std::string, int> counts;
  for (const std::string& name : *names) ++counts[format::ParseDirectoryName(name).checkpoint];
  std::map<std::string, absl::Time> saved_at;
  for (const std::string& name : *names) {
    if (counts[format::ParseDirectoryName(name).checkpoint] > 1) {
      const auto directory = directory::OpenDirectory(parent_, name);
      if (!directory.ok()) continue;
      saved_at[name] = directory::InspectUncommitted(directory->get()).info.saved_at;
    }
  }
  const auto time_of = [&saved_at](const std::string& name) {
    const auto found = saved_at.find(name);
    return found == saved_at.end() ? absl::InfinitePast() : found->second;
  };
  std::stable_sort(
      names->begin(), names->end(),
      [&time_of](const std::string& a, const std::string& b) { return time_of(a) > time_of(b); });
}

std::map<std::string, Times> Recovery::TimesOfAll(const std::vector<std::string>& orphans) const {
  std::map<std::string, Times> times;
  for (const std::string& name : orphans) {
    const auto directory = directory::OpenDirectory(parent_, name);
    if (directory.ok()) times[name] = TimesOf(directory->get());
  }
  return times;
}

/// Promotes all complete directories before any removal: a crash in between must leave more
/// checkpoints than before, never fewer.
absl::Status Recovery::PromoteAndAwaitOrphans(std::vector<std::string>* orphans) {
  // The save of an orphan that makes progress is the latest state of the run: it gets more time.
  const absl::Time longest = base::Now() + LongestWait(options_);
  absl::Time deadline = base::Now() + options_.wait_for_orphans;
  std::map<std::string, Times> seen;
  const bool waits = options_.wait_for_orphans > absl::ZeroDuration();
  const absl::Time silence_deadline =
      waits ? base::Now() + options_.silence_without_locks + kPollSilence : base::Now();
  HOLDFAST_ASSIGN_OR_RETURN(std::vector<std::string> names,
                            directory::ListDirectories(parent_, path_, /*committed=*/false));
  PutLatestFirst(&names);
  while (true) {
    orphans->clear();
    std::vector<std::string> not_yet_silent;
    for (const std::string& name : names) {
      HOLDFAST_ASSIGN_OR_RETURN(const Visit visit, Settle(name, /*may_remove=*/false));
      if (visit.outcome == Outcome::kOrphan) orphans->push_back(name);
      if (visit.outcome == Outcome::kNotYetSilent) not_yet_silent.push_back(name);
    }
    auto times = TimesOfAll(*orphans);
    // One that has ended is no progress of the others.
    std::erase_if(seen, [&times](const auto& orphan) { return times.count(orphan.first) == 0; });
    // Any other time is progress: the clock may go back.
    if (times != seen) {
      seen = std::move(times);
      deadline = std::min(longest, base::Now() + options_.wait_for_orphans);
    }
    const bool silence_may_come = !not_yet_silent.empty() && base::Now() < silence_deadline;
    if (!silence_may_come && (orphans->empty() || base::Now() >= deadline)) return absl::OkStatus();
    directory::Pause(orphans->empty() ? kPollSilence : kOrphanPoll);
    names = *orphans;
    names.insert(names.end(), not_yet_silent.begin(), not_yet_silent.end());
  }
}

/// Renames an orphan's directory. The orphan's own rename to the final name then fails, so the
/// orphan cannot commit while training continues from an older checkpoint.
absl::Status Recovery::Fence(const std::string& name) {
  auto directory = directory::OpenDirectory(parent_, name);
  if (!directory.ok()) return absl::OkStatus();  // committed or removed meanwhile
  if (probe_.Look(directory->get()) != Owner::kOrphan) return absl::OkStatus();
  format::DirectoryName fenced = format::ParseDirectoryName(name);
  fenced.kind = format::DirectoryKind::kFenced;
  auto renamed = directory::RenameToFree(parent_, name, fenced);
  if (absl::IsNotFound(renamed.status())) return absl::OkStatus();
  if (!renamed.ok()) return absl::OkStatus();  // CleanUp reports the directory
  report_.fenced.push_back(*std::move(renamed));
  // Power loss must not give the orphan's directory its name back: the directory may look complete
  // then.
  return SyncDirectory(parent_, path_);
}

absl::Status Recovery::CleanUp() {
  // A worker may have died between exchanging an old checkpoint for a new one and the fsync. If the
  // old manifests were removed now, power loss could undo the exchange alone. The final name would
  // then lead to the damaged old checkpoint.
  if (!base::Planted(base::Bug::kRemoveBeforeParentSync) &&
      !base::Planted(base::Bug::kReportWithoutParentSync)) {
    HOLDFAST_RETURN_IF_ERROR(SyncDirectory(parent_, path_));
  }
  HOLDFAST_ASSIGN_OR_RETURN(const std::vector<directory::DirectoryEntry> entries,
                            directory::ListDirectory(parent_, path_));
  for (const directory::DirectoryEntry& entry : entries) {
    if (!format::IsUncommittedName(entry.name)) continue;
    // A repaired file system may give a directory's name to a file.
    HOLDFAST_ASSIGN_OR_RETURN(
        const Visit visit,
        entry.is_directory ? Settle(entry.name, options_.clean_up)
                           : Keep("it is no directory, so it is of no save; remove it yourself"));
    if (visit.outcome == Outcome::kSettled) continue;
    report_.kept_incomplete.push_back(absl::StrCat(
        entry.name, ": ",
        visit.outcome == Outcome::kOrphan ? absl::string_view(kStillAtWork) : visit.why));
  }
  return absl::OkStatus();
}

/// Settles one directory as far as possible now. \error only when the fsync of the parent fails.
absl::StatusOr<Recovery::Visit> Recovery::Settle(const std::string& name, bool may_remove) {
  auto directory = directory::OpenDirectory(parent_, name);
  if (absl::IsNotFound(directory.status())) return Visit{};
  if (!directory.ok()) return Keep(std::string(directory.status().message()));
  const Owner owner = probe_.Look(directory->get());
  // Another directory may have got the name before the lock: a new directory in use.
  if (!directory::NameRefersTo(parent_, name, directory->get())) return Visit{};
  const format::DirectoryKind kind = format::ParseDirectoryName(name).kind;
  if (owner == Owner::kTrainer) return Keep("a save is running there");
  if (owner == Owner::kOrphan) {
    if (kind == format::DirectoryKind::kPartial) return Visit{.outcome = Outcome::kOrphan};
    // Fenced: the orphan still runs. Retired: another process is removing the directory. Recovery
    // waits for neither.
    return Keep(std::string(kStillAtWork));
  }
  // A single look serves two judgments: only a directory found complete is promoted minutes later.
  const bool partial = kind == format::DirectoryKind::kPartial;
  const Inspection inspection =
      partial ? directory::InspectUncommitted(directory->get()) : Inspection{};
  if (owner == Owner::kUnknown) {
    Visit visit = JudgeByAge(format::ParseDirectoryName(name), directory->get(), inspection);
    if (visit.outcome != Outcome::kSettled) return visit;
  }
  if (!partial) return Remove(name, directory->get(), may_remove);
  return SettlePartial(name, directory->get(), inspection, may_remove);
}

/// Returns kSettled when the directory has not changed for long enough. A complete checkpoint needs
/// minutes. Promoting beside a living worker does no harm, because the worker finds its own
/// checkpoint under the final name. A directory to be removed needs a day.
Recovery::Visit Recovery::JudgeByAge(const format::DirectoryName& name, int directory,
                                     const Inspection& inspection) const {
  const absl::Duration age = directory::TimeOnFileSystem(parent_) - LastChange(directory);
  if (age >= options_.age_without_locks) return Visit{};
  const bool promotes =
      options_.promote && name.kind == format::DirectoryKind::kPartial && IsOwn(inspection, name);
  const absl::Duration needed =
      promotes ? options_.silence_without_locks : options_.age_without_locks;
  if (age >= needed) return Visit{};
  return {.outcome = promotes ? Outcome::kNotYetSilent : Outcome::kKept,
          .why = absl::StrCat("locks on ", file_system_.name,
                              " do not tell whether a save is running there, and it changed less "
                              "than ",
                              absl::FormatDuration(needed), " ago; recover again later")};
}

absl::StatusOr<Recovery::Visit> Recovery::SettlePartial(const std::string& name, int directory,
                                                        const Inspection& inspection,
                                                        bool may_remove) {
  const format::DirectoryName parsed = format::ParseDirectoryName(name);
  if (base::Planted(base::Bug::kRemoveBeforePromotion)) return Remove(name, directory, true);
  switch (inspection.state) {
    case Verdict::kUnreadable:
      return Keep(std::string(inspection.reason.message()));
    case Verdict::kIncomplete:
      return Remove(name, directory, may_remove);
    case Verdict::kCorrupt:
    case Verdict::kSound:
      break;
  }
  if (IsOwn(inspection, parsed)) {
    return Promote(name, directory, parsed.checkpoint, inspection, may_remove);
  }
  const Inspection successor = InspectName(parsed.checkpoint);
  const bool replaced = successor.state == Verdict::kSound;
  if (inspection.state == Verdict::kCorrupt) {
    // The attempt of this name has committed: its own files have the final name, and the directory
    // holds the replaced files. Otherwise storage has damaged a manifest, and the directory is kept
    // for inspection.
    if (replaced && successor.info.attempt == parsed.attempt)
      return Remove(name, directory, may_remove);
    return Keep(std::string(inspection.reason.message()));
  }
  // A replaced checkpoint. Without a successor under its name, the old checkpoint may be the only
  // one and is kept. So is a later one: a drain that died had found it at its own exchange.
  if (replaced && successor.info.saved_at < inspection.info.saved_at) {
    return Keep(absl::StrCat("it holds a later save than ", parsed.checkpoint,
                             "; rename one of them, or remove the one that you do not need"));
  }
  if (replaced) return Remove(name, directory, may_remove);
  return Keep("it holds a complete checkpoint of another attempt than its name says");
}

absl::StatusOr<Recovery::Visit> Recovery::Promote(const std::string& name, int directory,
                                                  const std::string& checkpoint,
                                                  const Inspection& inspection, bool may_remove) {
  if (!options_.promote) return Keep("complete, but promotion is switched off");
  // Rank 0 died before its record, by which readers tell a committed checkpoint.
  if (inspection.lacks_record && !base::Planted(base::Bug::kPromoteWithoutRecord)) {
    const absl::Status made =
        directory::WriteCommitRecord(directory, name, inspection.info.world_size);
    if (!made.ok()) return Keep(std::string(made.message()));
  }
  // The last rank's worker may have died between the rename of its manifest and the fsync of this
  // directory. Without this fsync, power loss could leave the final name without a manifest.
  absl::Status synced;
  if (!base::Planted(base::Bug::kPromoteWithoutDirectorySync))
    synced = SyncDirectory(directory, name);
  if (!synced.ok()) return Keep(std::string(synced.message()));
  const absl::Status renamed = directory::RenameNoReplace(parent_, name, checkpoint);
  if (absl::IsNotFound(renamed)) return Visit{};
  if (absl::IsAlreadyExists(renamed))
    return Replace(name, directory, checkpoint, inspection, may_remove);
  if (!renamed.ok()) return Keep(std::string(renamed.message()));
  return Promoted(checkpoint);
}

/// Two complete checkpoints of one name. The newer manifest may list the older attempt as
/// replaceable; otherwise both checkpoints are kept.
absl::StatusOr<Recovery::Visit> Recovery::Replace(const std::string& name, int directory,
                                                  const std::string& checkpoint,
                                                  const Inspection& inspection, bool may_remove) {
  const absl::Status replaced =
      directory::FinishReplace(parent_, name, checkpoint, inspection.replaces);
  if (replaced.ok()) return Promoted(checkpoint);
  const std::string both = absl::StrCat("complete, but ", checkpoint, " exists");
  if (!absl::IsAlreadyExists(replaced)) return Keep(absl::StrCat(both, ": ", replaced.message()));
  const Inspection standing = InspectName(checkpoint);
  const bool newer = standing.state == Verdict::kSound &&
                     (base::Planted(base::Bug::kRemoveUnproven) ||
                      std::find(standing.replaces.begin(), standing.replaces.end(),
                                inspection.info.attempt) != standing.replaces.end());
  if (newer) return Remove(name, directory, may_remove);
  return Keep(absl::StrCat(both, "; remove or rename one of them"));
}

absl::StatusOr<Recovery::Visit> Recovery::Promoted(const std::string& checkpoint) {
  report_.promoted.push_back(checkpoint);
  // A promotion must survive power loss.
  if (base::Planted(base::Bug::kReportWithoutParentSync)) return Visit{};
  HOLDFAST_RETURN_IF_ERROR(SyncDirectory(parent_, path_));
  return Visit{};
}

Recovery::Visit Recovery::Remove(const std::string& name, int directory, bool may_remove) {
  const absl::Status removable = directory::CheckRemovable(directory, name);
  if (!removable.ok()) return Keep(std::string(removable.message()));
  if (!may_remove) return Keep("incomplete");
  const absl::Status removed = directory::RemoveDirectory(parent_, name);
  if (!removed.ok()) return Keep(std::string(removed.message()));
  report_.removed.push_back(name);
  return Visit{};
}

/// Inspects the directory under a final name.
Inspection Recovery::InspectName(const std::string& checkpoint) const {
  auto directory = directory::OpenDirectory(parent_, checkpoint);
  return directory.ok() ? directory::Inspect(directory->get()) : Inspection{};
}

absl::StatusOr<RecoveryReport> RecoverIn(const std::string& directory,
                                         const RecoveryOptions& options) {
  HOLDFAST_ASSIGN_OR_RETURN(const base::UniqueFd parent,
                            directory::OpenDirectory(absl::StrCat(directory, "/.")));
  HOLDFAST_ASSIGN_OR_RETURN(const auto file_system, directory::IdentifyFileSystem(parent.get()));
  HOLDFAST_RETURN_IF_ERROR(
      AwaitSingleFiles(parent.get(), directory, base::Now() + options.wait_for_orphans));
  // Ranks of one job recover at the same time. A recovery must not take another recovery's lock
  // during a removal for an orphan's.
  HOLDFAST_RETURN_IF_ERROR(
      directory::TakeTurn(parent.get(), directory, LongestWait(options) + kTurnMax));
  return Recovery(parent.get(), directory, file_system, options).Run();
}

}  // namespace
}  // namespace recovery

absl::StatusOr<RecoveryReport> Recover(const std::string& directory,
                                       const RecoveryOptions& options) {
  auto report = recovery::RecoverIn(directory, options);
  if (!report.ok()) return base::Annotate(report.status(), absl::StrCat("recover ", directory));
  return report;
}

absl::Status RemoveCheckpoint(const std::string& path, const AttemptId& attempt) {
  const auto [directory, name] = directory::SplitPath(path);
  auto parent = directory::OpenDirectory(absl::StrCat(directory, "/."));
  if (!parent.ok()) return base::Annotate(parent.status(), absl::StrCat("remove ", path));
  CheckpointInfo checkpoint;
  checkpoint.name = name;
  checkpoint.attempt = attempt;
  HOLDFAST_ASSIGN_OR_RETURN(const directory::RetiredCheckpoint retired,
                            directory::RetireCheckpoint(parent->get(), checkpoint));
  return directory::RemoveDirectory(parent->get(), retired.name);
}

absl::StatusOr<SavesAtWork> FindSavesAtWork(const std::string& path) {
  auto opened = directory::OpenDirectory(absl::StrCat(path, "/."));
  if (!opened.ok()) return base::Annotate(opened.status(), absl::StrCat("look at ", path));
  auto file_system = directory::IdentifyFileSystem(opened->get());
  if (!file_system.ok()) return base::Annotate(file_system.status(), path);
  switch (directory::OwnerOfSaves(opened->get(), file_system->local)) {
    case directory::Owner::kNobody:
      return SavesAtWork::kNone;
    case directory::Owner::kTrainer:
      return SavesAtWork::kTrainer;
    case directory::Owner::kOrphan:
      return SavesAtWork::kOrphan;
    case directory::Owner::kUnknown:
      break;
  }
  return SavesAtWork::kUnknown;
}

}  // namespace holdfast
