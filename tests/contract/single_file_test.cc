// Files saved by themselves: a rename, an older file whole until then, and what crashes
// leave.
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "holdfast/load.h"
#include "holdfast/plan.h"
#include "holdfast/recovery.h"
#include "holdfast/verify.h"
#include "runtime/base/unique_fd.h"
#include "runtime/format/file_names.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"
#include "tests/testing/checkpoint_files.h"
#include "tests/testing/child_process.h"
#include "tests/testing/path_of.h"
#include "tests/testing/save_test.h"
#include "tests/testing/single_file.h"

namespace holdfast::testing {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

constexpr AttemptId kFirst = {.high = 1, .low = 9};
constexpr AttemptId kSecond = {.high = 2, .low = 8};
constexpr char kFile[] = "last.pt";

std::string Companion(const AttemptId& attempt, format::CompanionKind kind) {
  return format::CompanionName({.file = kFile, .kind = kind, .attempt = attempt});
}
std::string ManifestOf(const AttemptId& attempt) {
  return Companion(attempt, format::CompanionKind::kManifest);
}
std::string TemporaryOf(const AttemptId& attempt) {
  return Companion(attempt, format::CompanionKind::kTemporary);
}

std::string Archive(const AttemptId& attempt, char fill, size_t bytes = 100'000) {
  return SingleFileArchive(attempt, std::string(bytes, fill));
}

class SingleFile : public LauncherTest {
 protected:
  void TearDown() override {
    sys::g_system = sys::kKernel;  // No thread of a save reads it any more.
    LauncherTest::TearDown();
  }
  std::string path() const { return directory() + "/" + kFile; }

  absl::StatusOr<SaveHandle> Begin(Checkpointer* checkpointer, const AttemptId& attempt,
                                   const std::string& contents, bool replace = true,
                                   bool confirm = false) {
    kept_.push_back(std::make_unique<std::string>(contents));
    const SavePlan plan = SingleFilePlan(kFile, *kept_.back());
    return checkpointer->SaveAsync({.name = kFile,
                                    .step = 1,
                                    .plan = &plan,
                                    .replace = replace,
                                    .attempt = attempt,
                                    .single_file = true,
                                    .confirm = confirm});
  }
  absl::Status Save(const AttemptId& attempt, const std::string& contents, bool replace = true) {
    const auto checkpointer = Make(Options());
    const auto handle = Begin(checkpointer.get(), attempt, contents, replace);
    return handle.ok() ? handle->WaitDurable(kLong).status() : handle.status();
  }
  void ExpectSound(const AttemptId& attempt) const {
    for (const std::string& where : {path(), directory()}) {
      const auto report = Verify(where, {});
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_EQ(report->verdict, Verdict::kSound) << where << ": " << report->note;
      EXPECT_EQ(report->checked, "XXH3-128 digests of the seal") << where;
      EXPECT_EQ(report->attempt, attempt) << where;
    }
  }
  RecoveryReport Recovered() const {
    const auto recovered = Recover(directory(), {.wait_for_orphans = absl::ZeroDuration()});
    EXPECT_TRUE(recovered.ok()) << recovered.status();
    return recovered.ok() ? *recovered : RecoveryReport{};
  }
  CheckpointerOptions Slow() const {
    CheckpointerOptions options = Options();
    options.qos.bytes_per_second_max = 4u << 20;
    return options;
  }

 private:
  std::vector<std::unique_ptr<std::string>> kept_;
};

INSTANTIATE_TEST_SUITE_P(Launchers, SingleFile, kEveryLauncher, LauncherName);

TEST_P(SingleFile, ASafetensorsFileIsLoadedByItsOwnManifest) {
  const std::string file = directory() + "/model.safetensors";
  const std::string source(100'000, 's');
  std::string loaded(source.size(), '?');
  const std::vector<TensorSource> sources = {
      {.name = "t", .dtype = "U8", .shape = {100'000}, .data = source.data(), .bytes = 100'000}};
  const std::vector<TensorTarget> targets = {
      {.name = "t", .data = loaded.data(), .bytes = loaded.size()}};
  const auto checkpointer = Make(Options());
  // With the attempt in the file, and without.
  for (const AttemptId& in_file : {kSecond, AttemptId{}}) {
    const auto plan = PlanSafetensors("model.safetensors", sources, {.attempt = in_file});
    ASSERT_TRUE(plan.ok()) << plan.status();
    const AttemptId attempt = in_file == kSecond ? kSecond : kFirst;
    const auto handle = checkpointer->SaveAsync({.name = "model.safetensors",
                                                 .plan = &*plan,
                                                 .replace = true,
                                                 .attempt = attempt,
                                                 .single_file = true});
    ASSERT_TRUE(handle.ok()) << handle.status();
    ASSERT_TRUE(handle->WaitDurable(kLong).ok());
    const auto reader = CheckpointReader::OpenFile(file);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ((*reader)->attempt(), attempt);
    const auto report = (*reader)->Load(targets, {});
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_TRUE(report->verified);
    EXPECT_EQ(loaded, source);
    const auto verified = Verify(file, {});
    ASSERT_TRUE(verified.ok()) << verified.status();
    EXPECT_EQ(verified->attempt, attempt);
    FlipBit(file, std::filesystem::file_size(file) - 9);
    EXPECT_TRUE(absl::IsDataLoss((*reader)->Load(targets, {}).status()));
  }
  // Another program's file in its place.
  const std::string header = R"({"t":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})";
  WriteFileBytes(file, std::string(1, static_cast<char>(header.size())) + std::string(7, '\0') +
                           header + "abc");
  const auto reader = CheckpointReader::OpenFile(file);
  ASSERT_TRUE(reader.ok()) << reader.status();
  const auto report = (*reader)->Load({{.name = "t", .data = loaded.data(), .bytes = 3}}, {});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_FALSE(report->verified);
  EXPECT_EQ(loaded.substr(0, 3), "abc");
}

TEST_P(SingleFile, AFileStandsWithItsManifestAndIsReplacedByOneRename) {
  std::filesystem::create_directory(directory() + "/other");
  WriteFileBytes(directory() + "/notes.txt", "mine");
  EXPECT_EQ(Save(kFirst, Archive(kFirst, 'a')), absl::OkStatus());
  EXPECT_THAT(Names(directory()),
              UnorderedElementsAre("other", "notes.txt", kFile, ManifestOf(kFirst)));
  ExpectSound(kFirst);
  EXPECT_TRUE(absl::IsAlreadyExists(Save(kSecond, Archive(kSecond, 'b'), /*replace=*/false)));
  ExpectSound(kFirst);
  EXPECT_EQ(Save(kSecond, Archive(kSecond, 'b')), absl::OkStatus());
  EXPECT_THAT(Names(directory()),
              UnorderedElementsAre("other", "notes.txt", kFile, ManifestOf(kSecond)));
  ExpectSound(kSecond);
  EXPECT_EQ(ReadFileBytes(path()), Archive(kSecond, 'b'));
  const auto complete = ListCheckpoints(directory());
  ASSERT_TRUE(complete.ok()) << complete.status();
  EXPECT_THAT(*complete, IsEmpty());
  FlipBit(path(), 700);
  const auto damaged = Verify(path(), {});
  ASSERT_TRUE(damaged.ok()) << damaged.status();
  EXPECT_EQ(damaged->verdict, Verdict::kCorrupt);
}

TEST_P(SingleFile, AnEarlierSaveThatEndsLaterLeavesTheLaterOne) {
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  const auto first = Begin(checkpointer.get(), kFirst, Archive(kFirst, 'a'), true, true);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(Save(kSecond, Archive(kSecond, 'b')), absl::OkStatus());
  EXPECT_EQ(first->Confirm(absl::OkStatus()), absl::OkStatus());
  const auto report = first->WaitDurable(kLong);
  EXPECT_TRUE(absl::IsAborted(report.status())) << report.status();
  EXPECT_THAT(Names(directory()), UnorderedElementsAre(kFile, ManifestOf(kSecond)));
  ExpectSound(kSecond);
}

/// The first save's worker waits behind the fsync of its file, and again behind that of its
/// manifest's name.
std::atomic<int> g_steps_reached = 0;
std::atomic<int> g_steps_allowed = 0;
std::atomic<std::thread::id> g_held_thread;

int HeldFsync(int fd) {
  const int result = sys::kKernel.fsync(fd);
  const std::string path = PathOf(fd);
  const bool of_file = path.ends_with(TemporaryOf(kFirst));
  if (of_file) g_held_thread = std::this_thread::get_id();
  if (g_held_thread.load() != std::this_thread::get_id()) return result;
  if (!of_file && !std::filesystem::exists(path + "/" + ManifestOf(kFirst))) return result;
  g_steps_reached = of_file ? 1 : 2;
  while (g_steps_allowed < g_steps_reached) absl::SleepFor(absl::Milliseconds(1));
  return result;
}

TEST_P(SingleFile, OfThreeSavesThatOverlapTheLastStays) {
  if (GetParam() != Launcher::kThread) GTEST_SKIP() << "the worker has a table of calls of its own";
  constexpr AttemptId kThird = {.high = 3, .low = 7};
  g_steps_reached = g_steps_allowed = 0;
  sys::g_system.fsync = HeldFsync;
  const auto checkpointer = Make(Options());
  const auto first = Begin(checkpointer.get(), kFirst, Archive(kFirst, 'a'));
  EXPECT_TRUE(WaitFor([] { return g_steps_reached == 1; }));
  EXPECT_EQ(Save(kSecond, Archive(kSecond, 'b')), absl::OkStatus());
  const auto later = Make(Options());
  const auto third = Begin(later.get(), kThird, Archive(kThird, 'c'), true, true);
  ASSERT_TRUE(first.ok() && third.ok());
  g_steps_allowed = 1;
  EXPECT_TRUE(WaitFor([&] { return first->IsDone() || g_steps_reached == 2; }));
  EXPECT_EQ(third->Confirm(absl::OkStatus()), absl::OkStatus());
  EXPECT_EQ(third->WaitDurable(kLong).status(), absl::OkStatus());
  g_steps_allowed = 2;
  EXPECT_TRUE(absl::IsAborted(first->WaitDurable(kLong).status()));
  EXPECT_THAT(Names(directory()), UnorderedElementsAre(kFile, ManifestOf(kThird)));
  ExpectSound(kThird);
}

TEST_P(SingleFile, AnEarlierSaveThatEndsFirstIsReplaced) {
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  const auto first = Begin(checkpointer.get(), kFirst, Archive(kFirst, 'a'), true, true);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto later = Make(Options());
  const auto second = Begin(later.get(), kSecond, Archive(kSecond, 'b'), true, true);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(first->Confirm(absl::OkStatus()), absl::OkStatus());
  EXPECT_EQ(first->WaitDurable(kLong).status(), absl::OkStatus());
  ExpectSound(kFirst);
  EXPECT_EQ(second->Confirm(absl::OkStatus()), absl::OkStatus());
  EXPECT_EQ(second->WaitDurable(kLong).status(), absl::OkStatus());
  EXPECT_THAT(Names(directory()), UnorderedElementsAre(kFile, ManifestOf(kSecond)));
  ExpectSound(kSecond);
}

/// A save waits for its turn to commit. Meanwhile a recovery, which does not trust the locks of the
/// file system, gives the file its name.
class PromotedFile : public SingleFile {
 protected:
  void TearDown() override {
    turn_.Reset();
    save_ = absl::UnknownError("over");
    checkpointer_.reset();
    SingleFile::TearDown();
  }
  void BeginAndPromote() {
    EXPECT_EQ(Save(kFirst, Archive(kFirst, 'a')), absl::OkStatus());
    turn_ = base::UniqueFd(sys::OpenOwned(AT_FDCWD, directory().c_str(), O_RDONLY | O_CLOEXEC, 0));
    ASSERT_EQ(flock(turn_.get(), LOCK_EX), 0);
    checkpointer_ = Make(Options());
    save_ = Begin(checkpointer_.get(), kSecond, Archive(kSecond, 'b'));
    ASSERT_TRUE(save_.ok()) << save_.status();
    ASSERT_TRUE(WaitFor([&] { return save_->progress().phase == "committing"; }));
    std::filesystem::rename(directory() + "/" + TemporaryOf(kSecond), path());
  }
  base::UniqueFd turn_;
  std::unique_ptr<Checkpointer> checkpointer_;
  absl::StatusOr<SaveHandle> save_;
};
INSTANTIATE_TEST_SUITE_P(Launchers, PromotedFile, kEveryLauncher, LauncherName);

TEST_P(PromotedFile, IsCommitted) {
  BeginAndPromote();
  turn_.Reset();
  EXPECT_EQ(save_->WaitDurable(kLong).status(), absl::OkStatus());
  EXPECT_THAT(Names(directory()), UnorderedElementsAre(kFile, ManifestOf(kSecond)));
  ExpectSound(kSecond);
}

TEST_P(PromotedFile, KeepsItsManifestWhenItsSaveIsCancelled) {
  BeginAndPromote();
  EXPECT_EQ(save_->Cancel(), absl::OkStatus());
  EXPECT_TRUE(absl::IsCancelled(save_->WaitDurable(kLong).status()));
  ExpectSound(kSecond);
}

std::atomic<int> g_failures_left = 0;  // for the worker's thread and that of the recoveries

int FailingFsync(int fd) {
  if (!PathOf(fd).ends_with(TemporaryOf(kSecond)) || g_failures_left.fetch_sub(1) <= 0)
    return sys::kKernel.fsync(fd);
  errno = EIO;
  return -1;
}

// Launchers whose workers inherit this process's table of system calls.
class FileWrittenTwice : public SingleFile {};
INSTANTIATE_TEST_SUITE_P(Launchers, FileWrittenTwice,
                         ::testing::Values(Launcher::kFork, Launcher::kThread), LauncherName);

TEST_P(FileWrittenTwice, IsARunningSaveForRecoveries) {
  EXPECT_EQ(Save(kFirst, Archive(kFirst, 'a')), absl::OkStatus());
  g_failures_left = 1;
  sys::g_system.fsync = FailingFsync;
  const auto slow = Make(Slow());
  const auto second = Begin(slow.get(), kSecond, Archive(kSecond, 'b', 8u << 20));
  ASSERT_TRUE(second.ok()) << second.status();
  while (!second->IsDone()) {
    const RecoveryReport recovered = Recovered();
    // Behind the commit a recovery may remove the older manifest before the worker does.
    EXPECT_THAT(recovered.removed, Not(Contains(TemporaryOf(kSecond))));
    EXPECT_THAT(recovered.promoted, IsEmpty());
  }
  const auto report = second->WaitDurable(kLong);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->write_attempts, 2u);
  EXPECT_THAT(Names(directory()), UnorderedElementsAre(kFile, ManifestOf(kSecond)));
  ExpectSound(kSecond);
}

TEST_P(SingleFile, ACancelledSaveLeavesTheOlderFile) {
  EXPECT_EQ(Save(kFirst, Archive(kFirst, 'a')), absl::OkStatus());
  const auto slow = Make(Slow());
  const auto second = Begin(slow.get(), kSecond, Archive(kSecond, 'b', 16u << 20));
  ASSERT_TRUE(second.ok()) << second.status();
  ASSERT_TRUE(WaitFor([&] { return second->progress().bytes_written > 0; }));
  EXPECT_THAT(Recovered().kept_incomplete, ElementsAre(HasSubstr("is running")));
  EXPECT_EQ(second->Cancel(), absl::OkStatus());
  EXPECT_TRUE(absl::IsCancelled(second->WaitDurable(kLong).status()));
  EXPECT_THAT(Names(directory()), UnorderedElementsAre(kFile, ManifestOf(kFirst)));
  ExpectSound(kFirst);
}

TEST_P(SingleFile, ATemporaryFileThatIsGoneFailsTheSave) {
  const auto slow = Make(Slow());
  const auto first = Begin(slow.get(), kFirst, Archive(kFirst, 'a', 8u << 20));
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_TRUE(WaitFor([&] { return first->progress().bytes_written > 0; }));
  std::filesystem::remove(directory() + "/" + TemporaryOf(kFirst));
  const auto report = first->WaitDurable(kLong);
  EXPECT_TRUE(absl::IsAborted(report.status())) << report.status();
  EXPECT_THAT(Names(directory()), IsEmpty());
}

/// A later save removes the companions of the save whose manifest gets its name now.
int RenameOfALostManifest(int from_directory, const char* from, int to_directory, const char* to,
                          unsigned flags) {
  if (absl::EndsWith(to, ".json")) sys::kKernel.unlinkat(from_directory, from, 0);
  return sys::kKernel.renameat2(from_directory, from, to_directory, to, flags);
}

TEST_P(SingleFile, AManifestThatIsGoneFailsTheSave) {
  if (GetParam() != Launcher::kFork && GetParam() != Launcher::kThread)
    GTEST_SKIP() << "a worker program has a table of calls of its own";
  sys::g_system.renameat2 = RenameOfALostManifest;
  const absl::Status status = Save(kFirst, Archive(kFirst, 'a'));
  sys::g_system = sys::kKernel;
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  EXPECT_THAT(Text(status), HasSubstr("has taken it over"));
  EXPECT_THAT(Names(directory()), IsEmpty());
}

TEST_P(SingleFile, OnlyAFileIsReplaced) {
  std::filesystem::create_directory(path());
  EXPECT_TRUE(absl::IsFailedPrecondition(Save(kFirst, Archive(kFirst, 'a'))));
  std::filesystem::remove(path());
  std::filesystem::create_symlink("elsewhere", path());
  EXPECT_TRUE(absl::IsFailedPrecondition(Save(kFirst, Archive(kFirst, 'a'))));
  EXPECT_THAT(Names(directory()), ElementsAre(kFile));
}

class SingleFileKilled : public SingleFile {};
INSTANTIATE_TEST_SUITE_P(Launchers, SingleFileKilled, kProcessLaunchers, LauncherName);

TEST_P(SingleFileKilled, AKilledWorkerLeavesTheOlderFile) {
  EXPECT_EQ(Save(kFirst, Archive(kFirst, 'a')), absl::OkStatus());
  const auto slow = Make(Slow());
  const auto second = Begin(slow.get(), kSecond, Archive(kSecond, 'b', 16u << 20));
  ASSERT_TRUE(second.ok()) << second.status();
  ASSERT_TRUE(WaitFor([&] { return second->progress().bytes_written > 0; }));
  SendSignal(second->worker_pid(), SIGKILL);
  EXPECT_FALSE(second->WaitDurable(kLong).ok());
  EXPECT_THAT(Names(directory()), UnorderedElementsAre(kFile, ManifestOf(kFirst)));
  ExpectSound(kFirst);
}

/// The states in which a crash of trainer and worker leaves the directory.
class SingleFileCrash : public SingleFile {
 protected:
  void SetUp() override {
    SingleFile::SetUp();
    EXPECT_EQ(Save(kFirst, Archive(kFirst, 'a')), absl::OkStatus());
    const std::string manifest = directory() + "/" + ManifestOf(kFirst);
    const std::string old_manifest = ReadFileBytes(manifest);
    EXPECT_EQ(Save(kSecond, Archive(kSecond, 'b')), absl::OkStatus());
    // As it was before the rename.
    std::filesystem::rename(path(), directory() + "/" + TemporaryOf(kSecond));
    WriteFileBytes(path(), Archive(kFirst, 'a'));
    WriteFileBytes(manifest, old_manifest);
  }
};
INSTANTIATE_TEST_SUITE_P(Launchers, SingleFileCrash, ::testing::Values(Launcher::kThread),
                         LauncherName);

TEST_P(SingleFileCrash, BeforeTheRenameTheOlderFileIsSoundAndARecoveryCompletesTheSave) {
  ExpectSound(kFirst);
  EXPECT_THAT(Recovered().promoted, ElementsAre(kFile));
  EXPECT_THAT(Names(directory()), UnorderedElementsAre(kFile, ManifestOf(kSecond)));
  ExpectSound(kSecond);
  EXPECT_THAT(Recovered().promoted, IsEmpty());
}

// As two saves leave it of which the older takes the name behind the younger's manifest.
TEST_P(SingleFileCrash, AFileOfAReplacedSaveThatHasTakenItsNameSinceIsReplaced) {
  absl::SleepFor(absl::Milliseconds(20));  // The clock of a file system has ticks.
  std::filesystem::rename(path(), path() + ".moved");
  std::filesystem::rename(path() + ".moved", path());
  EXPECT_THAT(Recovered().promoted, ElementsAre(kFile));
  ExpectSound(kSecond);
}

TEST_P(SingleFileCrash, AFileThatAnotherProgramHasWrittenSinceStays) {
  const std::string other = Archive({.high = 5, .low = 5}, 'a');
  absl::SleepFor(absl::Milliseconds(20));  // The clock of a file system has ticks.
  WriteFileBytes(path(), other);
  const RecoveryReport recovered = Recovered();
  EXPECT_THAT(recovered.promoted, IsEmpty());
  EXPECT_THAT(recovered.kept_incomplete,
              ElementsAre(HasSubstr("last.pt has changed since; remove one of the two")));
  EXPECT_EQ(ReadFileBytes(path()), other);
  absl::SleepFor(absl::Milliseconds(20));
  // Only the time of the inode.
  std::filesystem::permissions(directory() + "/" + ManifestOf(kSecond),
                               std::filesystem::perms::owner_read);
  EXPECT_THAT(Recovered().promoted, IsEmpty());
  EXPECT_EQ(ReadFileBytes(path()), other);
  std::filesystem::remove(path());
  EXPECT_THAT(Recovered().promoted, ElementsAre(kFile));
  ExpectSound(kSecond);
}

int NoFdForTheManifest(int directory, const char* name, int flags, mode_t mode) {
  if (name != ManifestOf(kSecond)) return sys::kKernel.openat(directory, name, flags, mode);
  errno = EMFILE;
  return -1;
}

TEST_P(SingleFileCrash, WhatCannotBeReadOrUnderstoodStays) {
  sys::g_system.openat = NoFdForTheManifest;
  RecoveryReport recovered = Recovered();
  sys::g_system = sys::kKernel;
  EXPECT_THAT(recovered.removed, IsEmpty());
  EXPECT_THAT(recovered.kept_incomplete, ElementsAre(HasSubstr("Too many open files")));
  const std::string manifest = directory() + "/" + ManifestOf(kSecond);
  const std::string text = ReadFileBytes(manifest);
  WriteFileBytes(manifest, "{");
  recovered = Recovered();
  EXPECT_THAT(recovered.removed, IsEmpty());
  EXPECT_THAT(recovered.kept_incomplete, ElementsAre(HasSubstr(ManifestOf(kSecond))));
  WriteFileBytes(manifest, text);
  EXPECT_THAT(Recovered().promoted, ElementsAre(kFile));
  ExpectSound(kSecond);
}

TEST_P(SingleFileCrash, ARecoveryWaitsForALockThatSoonGoes) {
  const std::string temporary = directory() + "/" + TemporaryOf(kSecond);
  base::UniqueFd ring(sys::OpenOwned(AT_FDCWD, temporary.c_str(), O_RDWR | O_CLOEXEC, 0));
  ASSERT_EQ(::flock(ring.get(), LOCK_SH | LOCK_NB), 0);
  EXPECT_THAT(Recovered().kept_incomplete, ElementsAre(HasSubstr("is running")));
  std::thread end([&] {
    absl::SleepFor(absl::Milliseconds(100));
    ring.Reset();
  });
  const auto recovered = Recover(directory(), {.wait_for_orphans = absl::Seconds(30)});
  end.join();
  ASSERT_TRUE(recovered.ok()) << recovered.status();
  EXPECT_THAT(recovered->promoted, ElementsAre(kFile));
  ExpectSound(kSecond);
}

TEST_P(SingleFileCrash, ARecoveryEndsItsWaitForALock) {
  const std::string temporary = directory() + "/" + TemporaryOf(kSecond);
  const base::UniqueFd held(sys::OpenOwned(AT_FDCWD, temporary.c_str(), O_RDWR | O_CLOEXEC, 0));
  ASSERT_EQ(::flock(held.get(), LOCK_SH | LOCK_NB), 0);
  const auto recovered = Recover(directory(), {.wait_for_orphans = absl::Milliseconds(100)});
  ASSERT_TRUE(recovered.ok()) << recovered.status();
  EXPECT_THAT(recovered->kept_incomplete, ElementsAre(HasSubstr("is running")));
  EXPECT_THAT(recovered->promoted, IsEmpty());
  ExpectSound(kFirst);
}

TEST_P(SingleFileCrash, BehindTheRenameTheNewFileIsSoundAndTheOlderManifestGoes) {
  std::filesystem::rename(directory() + "/" + TemporaryOf(kSecond), path());
  ExpectSound(kSecond);
  EXPECT_THAT(Recovered().removed, ElementsAre(ManifestOf(kFirst)));
  ExpectSound(kSecond);
}

TEST_P(SingleFileCrash, WithoutItsManifestATemporaryFileGoes) {
  std::filesystem::remove(directory() + "/" + ManifestOf(kSecond));
  WriteFileBytes(directory() + "/" + ManifestOf(kSecond) + ".tmp", "{");
  ExpectSound(kFirst);
  EXPECT_THAT(Recovered().removed, ElementsAre(TemporaryOf(kSecond)));
  EXPECT_THAT(Names(directory()), UnorderedElementsAre(kFile, ManifestOf(kFirst)));
  ExpectSound(kFirst);
}

TEST_P(SingleFileCrash, TheNextSaveRemovesWhatIsLeft) {
  constexpr AttemptId kThird = {.high = 3, .low = 7};
  EXPECT_EQ(Save(kThird, Archive(kThird, 'c')), absl::OkStatus());
  EXPECT_THAT(Names(directory()), UnorderedElementsAre(kFile, ManifestOf(kThird)));
  ExpectSound(kThird);
}

TEST_P(SingleFileCrash, ASaveThatALaterOneHasOvertakenIsNotPromoted) {
  // The first save, before its rename, beside the committed second one.
  std::filesystem::rename(path(), directory() + "/" + TemporaryOf(kFirst));
  std::filesystem::rename(directory() + "/" + TemporaryOf(kSecond), path());
  ExpectSound(kSecond);
  const RecoveryReport recovered = Recovered();
  EXPECT_THAT(recovered.promoted, IsEmpty());
  EXPECT_THAT(recovered.removed, ElementsAre(TemporaryOf(kFirst)));
  EXPECT_THAT(Names(directory()), UnorderedElementsAre(kFile, ManifestOf(kSecond)));
}

TEST_P(SingleFileCrash, AFileOfAnotherProgramIsJudgedByItself) {
  EXPECT_THAT(Recovered().promoted, ElementsAre(kFile));
  WriteFileBytes(path(), Archive({.high = 5, .low = 5}, 'x'));
  auto report = Verify(path(), {});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->verdict, Verdict::kSound);
  EXPECT_EQ(report->checked, "torch zip CRC32s");
  EXPECT_THAT(report->note, HasSubstr("another file of that name"));
  // Cut: no whole archive of anybody.
  std::filesystem::resize_file(path(), 50'000);
  report = Verify(path(), {});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->verdict, Verdict::kCorrupt);
}

TEST_P(SingleFileCrash, ARemovedFileTakesItsManifestWithIt) {
  EXPECT_THAT(Recovered().promoted, ElementsAre(kFile));
  const auto manifests = FileManifests(directory(), kFile);
  ASSERT_TRUE(manifests.ok()) << manifests.status();
  EXPECT_THAT(*manifests, ElementsAre(ManifestOf(kSecond)));
  EXPECT_EQ(RemoveFile(directory(), kFile), absl::OkStatus());
  EXPECT_THAT(Names(directory()), IsEmpty());
  EXPECT_EQ(RemoveFile(directory(), kFile), absl::OkStatus());
  // After a plain rm the manifest stays until a recovery.
  EXPECT_EQ(Save(kFirst, Archive(kFirst, 'a')), absl::OkStatus());
  std::filesystem::remove(path());
  EXPECT_THAT(Recovered().removed, ElementsAre(ManifestOf(kFirst)));
  EXPECT_THAT(Names(directory()), IsEmpty());
}

TEST(SingleFileNames, AreParsedAndRefused) {
  const std::string manifest = ManifestOf(kFirst);
  EXPECT_EQ(manifest, ".last.pt.holdfast-00000000000000010000000000000009.json");
  for (const format::CompanionKind kind :
       {format::CompanionKind::kManifest, format::CompanionKind::kManifestTemporary,
        format::CompanionKind::kTemporary}) {
    const auto parsed = format::ParseCompanionName(Companion(kSecond, kind));
    ASSERT_TRUE(parsed.has_value());
    EXPECT_EQ(parsed->file, kFile);
    EXPECT_EQ(parsed->kind, kind);
    EXPECT_EQ(parsed->attempt, kSecond);
  }
  for (const char* other : {"last.pt", ".holdfast-00000000000000010000000000000009.json", "",
                            "last.pt.holdfast-00000000000000010000000000000009.json",
                            ".last.pt.holdfast-0000000000000001000000000000000G.json",
                            ".last.pt.holdfast-00000000000000010000000000000009.jso"}) {
    EXPECT_FALSE(format::ParseCompanionName(other).has_value()) << other;
  }
  EXPECT_EQ(format::WrongSingleFileName(std::string(203, 'n')), nullptr);
  EXPECT_NE(format::WrongSingleFileName(std::string(204, 'n')), nullptr);
  EXPECT_NE(format::WrongDataFileName(manifest), nullptr);
}

}  // namespace
}  // namespace holdfast::testing
