#include "tests/crash/campaigns.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "holdfast/recovery.h"
#include "runtime/directory/entries.h"
#include "runtime/directory/locks.h"
#include "runtime/directory/removal.h"
#include "runtime/format/directory_names.h"
#include "runtime/layout/job.h"
#include "tests/crash/kill_switch.h"
#include "tests/crash/power_model.h"
#include "tests/crash/real_writer.h"
#include "tests/testing/small_checkpoint.h"

namespace holdfast::testing {
namespace {

namespace fs = std::filesystem;
using format::DirectoryKind;

constexpr RecoveryOptions kAtOnce = {.wait_for_orphans = absl::ZeroDuration()};
constexpr int kCallsMax = 1000;

SmallRank Previous() {
  return {.checkpoint = "step-1",
          .attempt = {.high = 5, .low = 1},
          .world_size = 2,
          .step = 1,
          .recorded = true};
}
SmallRank Old() {
  return {.checkpoint = "step-7",
          .attempt = {.high = 5, .low = 6},
          .world_size = 2,
          .step = 7,
          .recorded = true};
}
SmallRank New() {
  return {.checkpoint = "step-7",
          .attempt = {.high = 5, .low = 7},
          .world_size = 2,
          .step = 7,
          .replaces = {Old().attempt},
          .recorded = true};
}
std::string NewPartial() { return format::PartialName("step-7", New().attempt); }

std::set<std::string> NamesIn(const std::string& directory) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory)) names.insert(entry.path().filename());
  return names;
}

/// Judged by the files' bytes, without code under test.
bool IsWhole(const std::string& directory, const SmallRank& like) {
  for (uint32_t rank = 0; rank < like.world_size; ++rank) {
    SmallRank one = like;
    one.rank = rank;
    if (!fs::exists(directory + "/" + one.manifest_name())) return false;
  }
  return HasBytesOf(directory, like);
}

/// Runs `body` in a child that is killed before its `call`th call. Returns true if the call was
/// reached.
bool KilledAt(int call, const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    ArmKillSwitch(call);
    body();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status);
}

class Judge {
 public:
  Judge(Outcome* outcome, std::string when) : outcome_(outcome), when_(std::move(when)) {}

  void Expect(bool holds, const std::string& what) {
    if (!holds) outcome_->violations.push_back(absl::StrCat(when_, ": ", what));
  }

  /// Only whole, sealed checkpoints are listed, and earlier checkpoints stay listed.
  void SoundListing(const std::string& directory) {
    const auto complete = ListCheckpoints(directory);
    Expect(complete.ok(), "listing failed");
    if (!complete.ok()) return;
    for (const CheckpointInfo& info : *complete) {
      const bool sound = (info.attempt == New().attempt && IsWhole(info.path, New())) ||
                         (info.attempt == Old().attempt && IsWhole(info.path, Old())) ||
                         (info.name == "step-1" && IsWhole(info.path, Previous()));
      Expect(sound, absl::StrCat(info.name, " is listed but is not what was sealed"));
    }
    Expect(std::any_of(complete->begin(), complete->end(),
                       [](const CheckpointInfo& info) { return info.name == "step-1"; }),
           "the previous checkpoint is gone");
  }

  /// Recovers a directory in which nobody is at work any more, and holds the result against the
  /// promises.
  void Recovered(const std::string& directory, const CommitCase& commit, bool acknowledged) {
    ++outcome_->states;
    const WithoutExchange without(!commit.exchange);
    const std::string final_path = directory + "/step-7";
    const bool was_promotable = IsWhole(directory + "/" + NewPartial(), New());
    const auto report = Recover(directory, kAtOnce);
    Expect(report.ok(), "recovery failed");
    if (!report.ok()) return;
    SoundListing(directory);
    const auto found = InspectCheckpoint(final_path);
    if (acknowledged) {
      Expect(found.ok() && found->attempt == New().attempt, "an acknowledged save is lost");
    }
    if (was_promotable) {
      Expect(found.ok() && found->attempt == New().attempt, "a complete partial was thrown away");
    }
    if (commit.replace) {
      Expect(found.ok(), "neither the old nor the new one of a replacement is left");
    }
    std::set<std::string> expected = {"step-1"};
    if (found.ok()) expected.insert("step-7");
    Expect(report->kept_incomplete.empty(), "something is left beside the complete checkpoints");
    Expect(NamesIn(directory) == expected,
           absl::StrCat("left behind: ", absl::StrJoin(NamesIn(directory), " ")));
    const auto again = Recover(directory, kAtOnce);
    Expect(again.ok() && again->promoted.empty() && again->removed.empty() &&
               NamesIn(directory) == expected,
           "a second recovery changed something");
  }

 private:
  Outcome* outcome_;
  std::string when_;
};

void Prepare(const std::string& directory, const CommitCase& commit) {
  WriteSmallCheckpoint(directory + "/step-1", Previous());
  if (commit.replace) WriteSmallCheckpoint(directory + "/step-7", Old());
}

}  // namespace

Outcome KillCommits(const CommitCase& commit) {
  Outcome outcome;
  for (int call = 1; call < kCallsMax; ++call) {
    const TemporaryDirectory directory(Scratch());
    Prepare(directory.path(), commit);
    int pipe_fds[2];
    if (pipe(pipe_fds) != 0) abort();
    const bool killed = KilledAt(call, [&] {
      SaveRanks({.directory = directory.path(),
                 .like = New(),
                 .replace = commit.replace,
                 .exchange = commit.exchange,
                 .acknowledge = [&] {
                   if (::write(pipe_fds[1], "a", 1) != 1) abort();
                 }});
    });
    close(pipe_fds[1]);
    char byte = 0;
    const bool acknowledged = ::read(pipe_fds[0], &byte, 1) == 1;
    close(pipe_fds[0]);
    Judge(&outcome, absl::StrCat("killed before call ", call))
        .Recovered(directory.path(), commit, acknowledged);
    if (!killed) {
      if (!acknowledged) outcome.violations.push_back("the save never came to its end");
      return outcome;
    }
  }
  outcome.violations.push_back("the save has no end");
  return outcome;
}

Outcome KillRecoveries(bool exchange) {
  Outcome outcome;
  const std::set<std::string> settled = {"step-1", "step-4", "step-5", "step-7", "step-8"};
  for (int call = 1; call < kCallsMax; ++call) {
    const TemporaryDirectory directory(Scratch());
    const std::string path = directory.path();
    WriteSmallCheckpoint(path + "/step-1", Previous());
    // To be promoted.
    WriteSmallCheckpoint(path + "/" + NewPartial(), New(), /*record=*/false);
    // To be given the place of an older one, ...
    SmallRank newer = New();
    SmallRank older = Old();
    newer.checkpoint = older.checkpoint = "step-5";
    WriteSmallCheckpoint(path + "/" + format::PartialName("step-5", newer.attempt), newer);
    WriteSmallCheckpoint(path + "/step-5", older);
    // ... and the other way round.
    SmallRank stands = New();
    SmallRank late = Old();
    stands.checkpoint = late.checkpoint = "step-4";
    WriteSmallCheckpoint(path + "/step-4", stands);
    WriteSmallCheckpoint(path + "/" + format::PartialName("step-4", late.attempt), late);
    // To be removed: one that is incomplete, ...
    SmallRank half = New();
    half.checkpoint = "step-6";
    half.Write(path + "/" + format::PartialName("step-6", half.attempt));
    // ... a checkpoint replaced by an exchange, ...
    SmallRank successor = New();
    successor.checkpoint = "step-8";
    WriteSmallCheckpoint(path + "/step-8", successor);
    SmallRank replaced = Old();
    replaced.checkpoint = "step-8";
    WriteSmallCheckpoint(path + "/" + format::PartialName("step-8", successor.attempt), replaced);
    // ... a checkpoint retired by retention, and a fenced checkpoint of an orphan.
    for (DirectoryKind kind : {DirectoryKind::kRetired, DirectoryKind::kFenced}) {
      WriteSmallCheckpoint(path + "/" +
                               format::FormatDirectoryName(
                                   {.checkpoint = "step-0", .kind = kind, .attempt = {1, 1}}),
                           Old());
    }
    // An orphan still works in a further directory, which is fenced.
    auto parent = directory::OpenDirectory(AT_FDCWD, path);
    auto orphan = directory::MakePartialDirectory(
        parent->get(), format::PartialName("step-9", {.high = 9, .low = 9}));
    if (!orphan.ok()) abort();
    orphan->trainer.Reset();

    const bool killed = KilledAt(call, [&] {
      const WithoutExchange without(!exchange);
      Recover(path, kAtOnce).status().IgnoreError();
    });
    Judge judge(&outcome, absl::StrCat("recovery killed before call ", call));
    judge.SoundListing(path);
    judge.Expect(IsWhole(path + "/step-7", New()) || IsWhole(path + "/" + NewPartial(), New()),
                 "the complete partial is lost");
    judge.Expect(IsWhole(path + "/step-8", successor), "a complete checkpoint is lost");
    judge.Expect(IsWhole(path + "/step-4", stands), "what replaced another one is lost");
    judge.Expect(IsWhole(path + "/step-5", newer) ||
                     IsWhole(path + "/" + format::PartialName("step-5", newer.attempt), newer),
                 "what is to replace another one is lost");
    *orphan = directory::PartialDirectory{};
    const auto report = Recover(path, kAtOnce);
    judge.Expect(report.ok() && report->kept_incomplete.empty(), "the next recovery keeps a rest");
    judge.Expect(NamesIn(path) == settled,
                 absl::StrCat("left behind: ", absl::StrJoin(NamesIn(path), " ")));
    judge.Expect(IsWhole(path + "/step-7", New()), "the promoted one is not whole");
    judge.Expect(IsWhole(path + "/step-5", newer), "a replace was not finished");
    judge.SoundListing(path);
    ++outcome.states;
    if (!killed) return outcome;
  }
  outcome.violations.push_back("recovery has no end");
  return outcome;
}

Outcome KillRemovals() {
  Outcome outcome;
  const std::string retired = format::FormatDirectoryName(
      {.checkpoint = "step-7", .kind = DirectoryKind::kRetired, .attempt = Old().attempt});
  for (const std::string& name : {retired, NewPartial()}) {
    bool killed = true;
    for (int call = 1; killed && call < kCallsMax; ++call) {
      const TemporaryDirectory directory(Scratch());
      Prepare(directory.path(), {});
      WriteSmallCheckpoint(directory / "step-7", New());
      WriteSmallCheckpoint(directory / name, Old());
      killed = KilledAt(call, [&] {
        auto parent = directory::OpenDirectory(AT_FDCWD, directory.path());
        directory::RemoveDirectory(parent->get(), name).IgnoreError();
      });
      const std::string left =
          fs::exists(directory / name) ? directory / name : directory / retired;
      const bool any_left = fs::exists(left);
      if (any_left) std::ofstream(left + "/config.json") << "precious";
      Judge judge(&outcome, absl::StrCat("removal of ", name, " killed before call ", call));
      auto report = Recover(directory.path(), kAtOnce);
      judge.Expect(report.ok() && report->kept_incomplete.size() == (any_left ? 1 : 0),
                   "what is kept goes unreported");
      const std::string kept = fs::exists(left) ? left : directory / retired;
      judge.Expect(!any_left || fs::exists(kept + "/config.json"), "a file of others was removed");
      fs::remove(kept + "/config.json");
      report = Recover(directory.path(), kAtOnce);
      judge.Expect(NamesIn(directory.path()) == std::set<std::string>({"step-1", "step-7"}),
                   "something is left behind");
      judge.SoundListing(directory.path());
      ++outcome.states;
    }
  }
  return outcome;
}

Outcome KillOneRankOfARunningSave() {
  Outcome outcome;
  for (int call = 1; call < kCallsMax; ++call) {
    const TemporaryDirectory directory(Scratch());
    Prepare(directory.path(), {});
    auto parent = directory::OpenDirectory(AT_FDCWD, directory.path());
    auto living = directory::MakePartialDirectory(parent->get(), NewPartial());
    if (!living.ok()) abort();
    New().Write(directory / NewPartial());
    const bool killed = KilledAt(call, [&] {
      const RealRank rank(directory.path(), New(), 1, false);
      SmallRank mine = New();
      mine.rank = 1;
      // Its vote; the save then waits for rank 0.
      while (!fs::exists(directory / (NewPartial() + "/" + mine.manifest_name()))) usleep(1000);
      _exit(0);
    });
    const std::string partial = directory / NewPartial();
    const std::set<std::string> before = NamesIn(partial);
    const auto report = Recover(directory.path(), kAtOnce);
    Judge judge(&outcome, absl::StrCat("rank 1 killed before call ", call));
    judge.Expect(report.ok() && report->promoted.empty() && report->removed.empty() &&
                     report->fenced.empty(),
                 "recovery acted on a running save");
    judge.Expect(fs::exists(partial) && NamesIn(partial) == before, "a running save was touched");
    // Rank 0's trainer dies too: the save has no live owner now.
    *living = directory::PartialDirectory{};
    if (fs::exists(partial)) judge.Recovered(directory.path(), {}, false);
    if (!killed) return outcome;
  }
  outcome.violations.push_back("the rank has no end");
  return outcome;
}

Outcome CutPower(const CommitCase& commit) {
  Outcome outcome;
  // Power cuts during the save, after each of its calls.
  int calls = 0;
  {
    const TemporaryDirectory directory(Scratch());
    Prepare(directory.path(), commit);
    PowerModel model(directory.path());
    if (!commit.sync_record) model.ForgetFsyncOf(layout::kCommitRecordName);
    bool acknowledged = false;
    int call = 0;
    model.OnCall([&] {
      ++call;
      model.ForEachState([&](const std::string& state) {
        Judge(&outcome, absl::StrCat("power cut after call ", call))
            .Recovered(state, commit, acknowledged);
      });
    });
    SaveRanks({.directory = directory.path(),
               .like = New(),
               .replace = commit.replace,
               .exchange = commit.exchange,
               .acknowledge = [&] { acknowledged = true; }});
    calls = model.calls();
  }
  // The processes die at a call, a recovery runs, and then power is cut: during the recovery, or
  // after its report.
  for (int dies = 1; dies <= calls + 1; ++dies) {
    const TemporaryDirectory directory(Scratch());
    Prepare(directory.path(), commit);
    PowerModel model(directory.path());
    if (!commit.sync_record) model.ForgetFsyncOf(layout::kCommitRecordName);
    model.FailFrom(dies);
    bool acknowledged = false;
    SaveRanks({.directory = directory.path(),
               .like = New(),
               .replace = commit.replace,
               .exchange = commit.exchange,
               .time_liveness_max = absl::Milliseconds(100),  // after which a failed rank is gone
               .acknowledge = [&] { acknowledged = true; }});
    model.StopFailing();
    model.OnCall([&] {
      model.ForEachState([&](const std::string& state) {
        Judge(&outcome, absl::StrCat("save died at call ", dies, ", power cut in its recovery"))
            .Recovered(state, commit, acknowledged);
      });
    });
    absl::StatusOr<RecoveryReport> report;
    {
      const WithoutExchange without(!commit.exchange);
      report = Recover(directory.path(), kAtOnce);
    }
    model.OnCall(nullptr);
    Judge judge(&outcome,
                absl::StrCat("save died at call ", dies, ", power cut after its recovery"));
    judge.Expect(report.ok(), "recovery failed");
    if (!report.ok()) continue;
    model.ForEachState([&](const std::string& state) {
      ++outcome.states;
      for (const CheckpointInfo& info : report->complete) {
        const auto found = InspectCheckpoint(state + "/" + info.name);
        judge.Expect(found.ok() && found->attempt == info.attempt,
                     absl::StrCat(info.name, " was reported complete and is lost"));
      }
    });
  }
  return outcome;
}

Outcome Oddities() {
  Outcome outcome;
  {
    const TemporaryDirectory directory(Scratch());
    Prepare(directory.path(), {});
    WriteSmallCheckpoint(directory / NewPartial(), New());
    fs::resize_file(directory / (NewPartial() + "/model-00001-of-00002.safetensors"), 4999);
    Judge judge(&outcome, "a file is one byte short");
    const auto report = Recover(directory.path(), kAtOnce);
    judge.Expect(report.ok() && report->kept_incomplete.size() == 1, "it goes unreported");
    judge.SoundListing(directory.path());
  }
  {
    const TemporaryDirectory directory(Scratch());
    Prepare(directory.path(), {});
    WriteSmallCheckpoint(directory / NewPartial(), Old());
    Judge judge(&outcome, "the manifests are another attempt's");
    const auto report = Recover(directory.path(), kAtOnce);
    judge.Expect(report.ok() && report->promoted.empty(), "they were promoted");
    judge.SoundListing(directory.path());
  }
  {
    const TemporaryDirectory directory(Scratch());
    Prepare(directory.path(), {.replace = true});
    SmallRank stranger = New();
    stranger.replaces = {{.high = 9, .low = 9}};
    WriteSmallCheckpoint(directory / NewPartial(), stranger);
    Judge judge(&outcome, "two complete ones of one name");
    const auto report = Recover(directory.path(), kAtOnce);
    judge.Expect(report.ok() && report->kept_incomplete.size() == 1, "it goes unreported");
    judge.Expect(IsWhole(directory / "step-7", Old()), "one was replaced without proof");
    judge.Expect(IsWhole(directory / NewPartial(), stranger), "one was removed without proof");
  }
  {
    const TemporaryDirectory directory(Scratch());
    Prepare(directory.path(), {});
    auto parent = directory::OpenDirectory(AT_FDCWD, directory.path());
    auto orphan = directory::MakePartialDirectory(parent->get(), NewPartial());
    if (!orphan.ok()) abort();
    orphan->trainer.Reset();
    WriteSmallCheckpoint(directory / NewPartial(), New());
    Judge judge(&outcome, "an orphan commits after the recovery");
    const auto report = Recover(directory.path(), kAtOnce);
    judge.Expect(report.ok(), "recovery failed");
    const int renamed =
        renameat2(parent->get(), NewPartial().c_str(), parent->get(), "step-7", RENAME_NOREPLACE);
    judge.Expect(renamed != 0, "a checkpoint appeared behind the new trainer's back");
  }
  return outcome;
}

}  // namespace holdfast::testing
