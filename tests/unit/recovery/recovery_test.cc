// What Recover does with each kind of directory that a crash can leave.
#include "holdfast/recovery.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "absl/time/clock.h"
#include "runtime/directory/entries.h"
#include "runtime/directory/locks.h"
#include "runtime/format/directory_names.h"
#include "runtime/layout/board.h"
#include "runtime/sys/system.h"
#include "tests/testing/small_checkpoint.h"

namespace holdfast {
namespace {

using format::DirectoryKind;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using testing::SmallRank;
using ::testing::StartsWith;
using testing::TemporaryDirectory;
using testing::WriteSmallCheckpoint;

constexpr AttemptId kNew = {.high = 1, .low = 2};
constexpr AttemptId kOld = {.high = 3, .low = 4};

std::string NameOf(DirectoryKind kind, const AttemptId& attempt) {
  return format::FormatDirectoryName({.checkpoint = "step-7", .kind = kind, .attempt = attempt});
}

class RecoveryTest : public ::testing::Test {
 protected:
  void TearDown() override { sys::g_system = sys::kKernel; }

  static SmallRank Step7(const AttemptId& attempt) {
    return {.checkpoint = "step-7", .attempt = attempt, .world_size = 2, .step = 7};
  }
  bool Exists(const std::string& name) const { return std::filesystem::exists(directory_ / name); }
  RecoveryReport Recovered(RecoveryOptions options = {.wait_for_orphans = absl::ZeroDuration()}) {
    auto report = Recover(directory_.path(), options);
    EXPECT_TRUE(report.ok()) << report.status();
    return report.ok() ? *std::move(report) : RecoveryReport{};
  }
  /// As found after a crash one complete and one incomplete partial checkpoint.
  void MakeOneOfEach() {
    WriteSmallCheckpoint(directory_ / complete_, Step7(kNew));
    Step7(kOld).Write(directory_ / incomplete_);
  }
  /// As a file system without the flags of renameat2(2).
  static int WithoutFlags(int a, const char* b, int c, const char* d, unsigned flags) {
    if (flags == 0) return sys::kKernel.renameat2(a, b, c, d, 0);
    errno = EINVAL;
    return -1;
  }
  int Entries() const {
    return static_cast<int>(std::distance(std::filesystem::directory_iterator(directory_.path()),
                                          std::filesystem::directory_iterator()));
  }
  /// Makes statfs(2) tell of a network file system.
  static void PretendNfs() {
    sys::g_system.fstatfs = [](int fd, struct statfs* out) {
      const int result = sys::kKernel.fstatfs(fd, out);
      out->f_type = 0x6969;
      return result;
    };
  }
  void MakeOld(const std::string& name, absl::Duration age) {
    const struct timespec then = absl::ToTimespec(absl::Now() - age);
    const struct timespec times[2] = {then, then};
    const std::string path = directory_ / name;
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      ASSERT_EQ(utimensat(AT_FDCWD, entry.path().c_str(), times, 0), 0);
    }
    ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
  }

  TemporaryDirectory directory_;
  const std::string complete_ = NameOf(DirectoryKind::kPartial, kNew);
  const std::string incomplete_ = NameOf(DirectoryKind::kPartial, kOld);
};

TEST_F(RecoveryTest, FindsNothingInAnEmptyDirectory) {
  const RecoveryReport report = Recovered();
  EXPECT_THAT(report.complete, IsEmpty());
  EXPECT_THAT(report.kept_incomplete, IsEmpty());
}

TEST_F(RecoveryTest, SaysNotFoundForAMissingDirectory) {
  EXPECT_TRUE(absl::IsNotFound(Recover(directory_ / "missing", {}).status()));
}

TEST_F(RecoveryTest, PromotesTheCompleteAndRemovesTheRest) {
  MakeOneOfEach();
  const RecoveryReport report = Recovered();
  EXPECT_THAT(report.promoted, ElementsAre("step-7"));
  EXPECT_THAT(report.removed, ElementsAre(incomplete_));
  EXPECT_THAT(report.kept_incomplete, IsEmpty());
  ASSERT_THAT(report.complete, SizeIs(1));
  EXPECT_EQ(report.complete[0].attempt, kNew);
  EXPECT_TRUE(HasBytesOf(directory_ / "step-7", Step7(kNew)));
  EXPECT_FALSE(Exists(incomplete_));
}

TEST_F(RecoveryTest, RepeatingItChangesNothing) {
  MakeOneOfEach();
  Recovered();
  const RecoveryReport again = Recovered();
  EXPECT_THAT(again.promoted, IsEmpty());
  EXPECT_THAT(again.removed, IsEmpty());
  EXPECT_THAT(again.complete, SizeIs(1));
}

TEST_F(RecoveryTest, KeepsAPartialWhoseFilesHaveAnotherSizeThanRecordedForAPersonToSee) {
  WriteSmallCheckpoint(directory_ / complete_, Step7(kNew));
  std::filesystem::resize_file(directory_ / (complete_ + "/model-00001-of-00002.safetensors"), 17);
  const RecoveryReport report = Recovered();
  EXPECT_THAT(report.promoted, IsEmpty());
  EXPECT_THAT(report.removed, IsEmpty());
  EXPECT_THAT(report.kept_incomplete, ElementsAre(AllOf(StartsWith(complete_), HasSubstr("size"))));
  EXPECT_FALSE(Exists("step-7"));
}

TEST_F(RecoveryTest, PromotesBeforeItRemoves) {
  MakeOneOfEach();
  static bool promoted;
  static bool removed_first;
  promoted = removed_first = false;
  sys::g_system.renameat2 = [](int a, const char* b, int c, const char* d, unsigned e) {
    promoted = true;
    return sys::kKernel.renameat2(a, b, c, d, e);
  };
  sys::g_system.unlinkat = [](int directory, const char* name, int flags) {
    removed_first |= !promoted;
    return sys::kKernel.unlinkat(directory, name, flags);
  };
  Recovered();
  EXPECT_TRUE(promoted);
  EXPECT_FALSE(removed_first);
}

TEST_F(RecoveryTest, ChangesNothingWhenToldSo) {
  MakeOneOfEach();
  const RecoveryReport report =
      Recovered({.wait_for_orphans = absl::ZeroDuration(), .promote = false, .clean_up = false});
  EXPECT_TRUE(Exists(complete_) && Exists(incomplete_));
  EXPECT_THAT(report.kept_incomplete,
              ElementsAre(AllOf(StartsWith(complete_), HasSubstr("switched off")),
                          AllOf(StartsWith(incomplete_), HasSubstr("incomplete"))));
}

TEST_F(RecoveryTest, CleaningUpAloneKeepsWhatIsComplete) {
  MakeOneOfEach();
  const RecoveryReport report =
      Recovered({.wait_for_orphans = absl::ZeroDuration(), .promote = false});
  EXPECT_THAT(report.removed, ElementsAre(incomplete_));
  EXPECT_TRUE(Exists(complete_));
}

TEST_F(RecoveryTest, KeepsBothWhenTheFinalNameIsTaken) {
  WriteSmallCheckpoint(directory_ / complete_, Step7(kNew));
  WriteSmallCheckpoint(directory_ / "step-7", Step7(kOld));
  EXPECT_THAT(Recovered().kept_incomplete,
              ElementsAre(AllOf(StartsWith(complete_), HasSubstr("step-7 exists"))));
  EXPECT_TRUE(HasBytesOf(directory_ / "step-7", Step7(kOld)));
  EXPECT_TRUE(HasBytesOf(directory_ / complete_, Step7(kNew)));
}

TEST_F(RecoveryTest, FinishesAReplaceThatACrashEnded) {
  // With and without RENAME_EXCHANGE.
  for (const bool exchange : {true, false}) {
    SmallRank newer = Step7(kNew);
    newer.replaces = {{.high = 9, .low = 9}, kOld};
    WriteSmallCheckpoint(directory_ / complete_, newer);
    WriteSmallCheckpoint(directory_ / "step-7", Step7(kOld));
    if (!exchange) sys::g_system.renameat2 = WithoutFlags;
    const RecoveryReport report = Recovered();
    sys::g_system = sys::kKernel;
    EXPECT_THAT(report.promoted, ElementsAre("step-7"));
    EXPECT_THAT(report.removed, ElementsAre(NameOf(DirectoryKind::kRetired, kOld)));
    EXPECT_THAT(report.kept_incomplete, IsEmpty());
    EXPECT_TRUE(HasBytesOf(directory_ / "step-7", newer));
    EXPECT_EQ(Entries(), 1);
    std::filesystem::remove_all(directory_ / "step-7");
  }
}

TEST_F(RecoveryTest, RemovesTheOlderOneThatACrashKeptFromGivingWay) {
  SmallRank newer = Step7(kNew);
  newer.replaces = {kOld};
  WriteSmallCheckpoint(directory_ / "step-7", newer);
  WriteSmallCheckpoint(directory_ / incomplete_, Step7(kOld));
  EXPECT_THAT(Recovered().removed, ElementsAre(incomplete_));
  EXPECT_TRUE(HasBytesOf(directory_ / "step-7", newer));
  EXPECT_EQ(Entries(), 1);
}

TEST_F(RecoveryTest, EndsWithTheNewestOfSeveralThatReplaceEachOther) {
  const AttemptId third = {.high = 0, .low = 1};  // the first in the order of names
  SmallRank newer = Step7(kNew);
  newer.replaces = {kOld};
  SmallRank newest = Step7(third);
  newest.replaces = {kNew, kOld};
  for (const bool stands : {true, false}) {
    if (stands) WriteSmallCheckpoint(directory_ / "step-7", Step7(kOld));
    WriteSmallCheckpoint(directory_ / complete_, newer);
    WriteSmallCheckpoint(directory_ / NameOf(DirectoryKind::kPartial, third), newest);
    Recovered();
    EXPECT_TRUE(HasBytesOf(directory_ / "step-7", newest));
    EXPECT_EQ(Entries(), 1);
    std::filesystem::remove_all(directory_ / "step-7");
  }
}

TEST_F(RecoveryTest, ReplacesNothingThatHoldsAFileOfOthersOrIsNoCheckpoint) {
  SmallRank newer = Step7(kNew);
  newer.replaces = {kOld};
  WriteSmallCheckpoint(directory_ / complete_, newer);
  WriteSmallCheckpoint(directory_ / "step-7", Step7(kOld));
  std::ofstream(directory_ / "step-7/config.json") << "{}";
  EXPECT_THAT(Recovered().kept_incomplete,
              ElementsAre(AllOf(StartsWith(complete_), HasSubstr("config.json"))));
  std::filesystem::remove_all(directory_ / "step-7");
  std::filesystem::create_symlink("/elsewhere", directory_ / "step-7");
  EXPECT_THAT(Recovered().kept_incomplete,
              ElementsAre(AllOf(StartsWith(complete_), HasSubstr("step-7 exists"))));
}

TEST_F(RecoveryTest, LeavesAReplaceThatIsUnderWayAlone) {
  SmallRank newer = Step7(kNew);
  newer.replaces = {kOld};
  WriteSmallCheckpoint(directory_ / complete_, newer);
  WriteSmallCheckpoint(directory_ / "step-7", Step7(kOld));
  // As a worker between its look and its exchange.
  const int lock =
      open((directory_ / "step-7/rank-00000-of-00002.manifest.json").c_str(), O_RDONLY);
  ASSERT_EQ(flock(lock, LOCK_EX), 0);
  EXPECT_THAT(Recovered().kept_incomplete, ElementsAre(HasSubstr("another save is replacing it")));
  EXPECT_TRUE(HasBytesOf(directory_ / "step-7", Step7(kOld)));
  close(lock);
  EXPECT_THAT(Recovered().promoted, ElementsAre("step-7"));
}

TEST_F(RecoveryTest, RemovesWhatAnExchangeReplacedAndNoLaterSave) {
  // As after RENAME_EXCHANGE: the new one under the final name, the old one under the new
  // attempt's.
  WriteSmallCheckpoint(directory_ / "step-7", Step7(kNew));
  WriteSmallCheckpoint(directory_ / complete_, Step7(kOld));
  EXPECT_THAT(Recovered().removed, ElementsAre(complete_));
  EXPECT_TRUE(HasBytesOf(directory_ / "step-7", Step7(kNew)));
  SmallRank later = Step7(kOld);  // which a drain has found at its exchange
  later.saved_at_ns = 9;
  WriteSmallCheckpoint(directory_ / complete_, later);
  EXPECT_THAT(Recovered().kept_incomplete, ElementsAre(HasSubstr("a later save than step-7")));
}

TEST_F(RecoveryTest, RemovesWhatSteppedAsideWhereDirectoriesCannotBeExchanged) {
  // As after a crash between the two renames: the old one under a name of no attempt.
  WriteSmallCheckpoint(directory_ / complete_, Step7(kNew));
  const std::string aside = NameOf(DirectoryKind::kPartial, {.high = 1, .low = 3});
  WriteSmallCheckpoint(directory_ / aside, Step7(kOld));
  const RecoveryReport report = Recovered();
  EXPECT_THAT(report.promoted, ElementsAre("step-7"));
  EXPECT_THAT(report.removed, ElementsAre(aside));
  EXPECT_TRUE(HasBytesOf(directory_ / "step-7", Step7(kNew)));
}

TEST_F(RecoveryTest, RemovesADamagedOneThatAnExchangeReplaced) {
  WriteSmallCheckpoint(directory_ / "step-7", Step7(kNew));
  WriteSmallCheckpoint(directory_ / complete_, Step7(kOld));
  const std::string manifest = directory_ / (complete_ + "/rank-00000-of-00002.manifest.json");
  std::ofstream(manifest, std::ios::app) << "x";
  EXPECT_THAT(Recovered().removed, ElementsAre(complete_));
}

TEST_F(RecoveryTest, KeepsWhatWasReplacedAndHoldsAFileThatNoManifestNames) {
  WriteSmallCheckpoint(directory_ / "step-7", Step7(kNew));
  WriteSmallCheckpoint(directory_ / complete_, Step7(kOld));
  std::ofstream(directory_ / (complete_ + "/config.json")) << "{}";
  EXPECT_THAT(Recovered().kept_incomplete,
              ElementsAre(AllOf(HasSubstr(complete_), HasSubstr("config.json"))));
  EXPECT_TRUE(std::filesystem::exists(directory_ / (complete_ + "/config.json")));
}

TEST_F(RecoveryTest, NeverPromotesACheckpointOfAnotherAttemptAndNeverRemovesTheOnlyOne) {
  WriteSmallCheckpoint(directory_ / complete_, Step7(kOld));
  const RecoveryReport report = Recovered();
  EXPECT_THAT(report.promoted, IsEmpty());
  EXPECT_THAT(report.removed, IsEmpty());
  EXPECT_THAT(report.kept_incomplete, ElementsAre(HasSubstr("another attempt")));
  EXPECT_TRUE(Exists(complete_));
}

TEST_F(RecoveryTest, KeepsAPartialWithADamagedManifestForAPersonToSee) {
  WriteSmallCheckpoint(directory_ / complete_, Step7(kNew));
  std::ofstream(directory_ / (complete_ + "/rank-00000-of-00002.manifest.json")) << "{}";
  const RecoveryReport report = Recovered();
  EXPECT_THAT(report.removed, IsEmpty());
  EXPECT_THAT(report.kept_incomplete, ElementsAre(HasSubstr("rank-00000-of-00002")));
}

TEST_F(RecoveryTest, NeverPromotesUnderANameThatTheManifestsDoNotCarry) {
  const std::string moved = format::PartialName("other", kNew);
  WriteSmallCheckpoint(directory_ / moved, Step7(kNew));
  EXPECT_THAT(Recovered().promoted, IsEmpty());
  EXPECT_FALSE(Exists("other"));
}

TEST_F(RecoveryTest, RemovesFencedAndRetiredOnesEvenIfComplete) {
  WriteSmallCheckpoint(directory_ / NameOf(DirectoryKind::kFenced, kNew), Step7(kNew));
  WriteSmallCheckpoint(directory_ / NameOf(DirectoryKind::kRetired, kOld), Step7(kOld));
  const RecoveryReport report = Recovered();
  EXPECT_THAT(report.removed, SizeIs(2));
  EXPECT_THAT(report.promoted, IsEmpty());
  EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
}

TEST_F(RecoveryTest, LeavesForeignDirectoriesAndFilesAlone) {
  std::filesystem::create_directory(directory_ / "logs");
  std::ofstream(directory_ / "notes.partial-00000000000000010000000000000002") << "a file";
  std::filesystem::create_symlink("logs", directory_ / complete_);
  EXPECT_THAT(Recovered().removed, IsEmpty());
  EXPECT_TRUE(Exists("logs") && Exists("notes.partial-00000000000000010000000000000002") &&
              Exists(complete_));
}

TEST_F(RecoveryTest, KeepsAPartialDirectoryThatHoldsADirectory) {
  Step7(kNew).Write(directory_ / complete_);
  std::filesystem::create_directory(directory_ / (complete_ + "/mine"));
  EXPECT_THAT(Recovered().kept_incomplete,
              ElementsAre(HasSubstr("it holds mine, which is no part")));
  EXPECT_TRUE(Exists(complete_ + "/model-00000-of-00002.safetensors"));
}

TEST_F(RecoveryTest, TellsOfAFinalNameThatIsIncomplete) {
  Step7(kNew).Write(directory_ / "step-7");
  EXPECT_THAT(Recovered().kept_incomplete,
              ElementsAre(AllOf(StartsWith("step-7: "), HasSubstr("manifest of rank 1"))));
  EXPECT_TRUE(Exists("step-7"));
}

TEST_F(RecoveryTest, LeavesARunningSaveUntouched) {
  auto parent = directory::OpenDirectory(AT_FDCWD, directory_.path());
  ASSERT_TRUE(parent.ok());
  // The nastiest moment: everything is complete and only the rename is missing.
  auto save = directory::MakePartialDirectory(parent->get(), complete_);
  ASSERT_TRUE(save.ok());
  WriteSmallCheckpoint(directory_ / complete_, Step7(kNew));
  const RecoveryReport report = Recovered();
  EXPECT_THAT(report.kept_incomplete, ElementsAre(HasSubstr("a save is running")));
  EXPECT_THAT(report.fenced, IsEmpty());
  EXPECT_TRUE(HasBytesOf(directory_ / complete_, Step7(kNew)));
}

TEST_F(RecoveryTest, FencesAnOrphanThatDoesNotEndAndRemovesItsDirectoryLater) {
  auto parent = directory::OpenDirectory(AT_FDCWD, directory_.path());
  auto save = directory::MakePartialDirectory(parent->get(), complete_);
  ASSERT_TRUE(save.ok());
  save->trainer.Reset();  // the trainer is dead, its worker is not
  WriteSmallCheckpoint(directory_ / complete_, Step7(kNew));
  const std::string fenced = NameOf(DirectoryKind::kFenced, kNew);
  RecoveryReport report = Recovered();
  EXPECT_THAT(report.fenced, ElementsAre(fenced));
  EXPECT_THAT(report.promoted, IsEmpty());
  EXPECT_THAT(report.kept_incomplete, ElementsAre(StartsWith(fenced)));
  // Neither waits for it nor fences it once more.
  report = Recovered({.wait_for_orphans = absl::Hours(1)});
  EXPECT_THAT(report.fenced, IsEmpty());
  EXPECT_THAT(report.kept_incomplete, ElementsAre(StartsWith(fenced)));
  *save = directory::PartialDirectory{};
  EXPECT_THAT(Recovered().removed, ElementsAre(fenced));
  EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
}

TEST_F(RecoveryTest, WaitsForAnOrphanAndPromotesWhatItCompleted) {
  auto parent = directory::OpenDirectory(AT_FDCWD, directory_.path());
  auto save = directory::MakePartialDirectory(parent->get(), complete_);
  ASSERT_TRUE(save.ok());
  save->trainer.Reset();
  // The orphan makes its last manifest and ends while the recovery sleeps.
  static directory::PartialDirectory* orphan;
  static std::string path;
  orphan = &*save;
  path = directory_ / complete_;
  sys::g_system.nanosleep = [](const struct timespec*, struct timespec*) {
    WriteSmallCheckpoint(path, Step7(kNew));
    *orphan = directory::PartialDirectory{};
    return 0;
  };
  const RecoveryReport report = Recovered({.wait_for_orphans = absl::Hours(1)});
  EXPECT_THAT(report.promoted, ElementsAre("step-7"));
  EXPECT_THAT(report.fenced, IsEmpty());
}

TEST_F(RecoveryTest, FencesNothingWhenNotCleaningUp) {
  auto parent = directory::OpenDirectory(AT_FDCWD, directory_.path());
  auto save = directory::MakePartialDirectory(parent->get(), complete_);
  ASSERT_TRUE(save.ok());
  save->trainer.Reset();
  const RecoveryReport report =
      Recovered({.wait_for_orphans = absl::ZeroDuration(), .clean_up = false});
  EXPECT_THAT(report.fenced, IsEmpty());
  EXPECT_THAT(report.kept_incomplete, ElementsAre(HasSubstr("without a trainer")));
}

TEST_F(RecoveryTest, NoErrorOfTheMachineLeadsToARemoval) {
  WriteSmallCheckpoint(directory_ / complete_, Step7(kNew));
  sys::g_system.pread = [](int, void*, size_t, off_t) -> ssize_t {
    errno = EIO;
    return -1;
  };
  EXPECT_THAT(Recovered().kept_incomplete, ElementsAre(HasSubstr("Input/output error")));
  sys::g_system = sys::kKernel;
  EXPECT_TRUE(HasBytesOf(directory_ / complete_, Step7(kNew)));
  EXPECT_THAT(Recovered().promoted, ElementsAre("step-7"));
}

TEST_F(RecoveryTest, PromotesWithoutTheFlagWhereTheFileSystemLacksIt) {
  WriteSmallCheckpoint(directory_ / complete_, Step7(kNew));
  sys::g_system.renameat2 = WithoutFlags;
  EXPECT_THAT(Recovered().promoted, ElementsAre("step-7"));
  WriteSmallCheckpoint(directory_ / incomplete_, Step7(kOld));
  EXPECT_THAT(Recovered().kept_incomplete, ElementsAre(HasSubstr("step-7 exists")));
  EXPECT_TRUE(HasBytesOf(directory_ / "step-7", Step7(kNew)));
}

TEST_F(RecoveryTest, ReportsAnErrorWhenThePromotionIsNotDurable) {
  WriteSmallCheckpoint(directory_ / complete_, Step7(kNew));
  static bool renamed;
  renamed = false;
  sys::g_system.renameat2 = [](int a, const char* b, int c, const char* d, unsigned flags) {
    renamed = true;
    return sys::kKernel.renameat2(a, b, c, d, flags);
  };
  sys::g_system.fsync = [](int) {
    if (renamed) {
      errno = EIO;
      return -1;
    }
    return 0;
  };
  EXPECT_TRUE(absl::IsDataLoss(Recover(directory_.path(), {}).status()));
}

TEST_F(RecoveryTest, PromotesNothingWhoseDirectoryCannotBeSynced) {
  WriteSmallCheckpoint(directory_ / complete_, Step7(kNew));
  sys::g_system.fsync = [](int) {
    errno = EIO;
    return -1;
  };
  EXPECT_FALSE(Recover(directory_.path(), {}).ok());
  EXPECT_FALSE(Exists("step-7"));
  EXPECT_TRUE(Exists(complete_));
}

TEST_F(RecoveryTest, SyncsTheParentEvenWhenItChangesNothing) {
  WriteSmallCheckpoint(directory_ / "step-7", Step7(kNew));
  static int syncs;
  syncs = 0;
  sys::g_system.fsync = [](int fd) {
    ++syncs;
    return sys::kKernel.fsync(fd);
  };
  Recovered();
  EXPECT_GE(syncs, 1);
}

TEST_F(RecoveryTest, OnANetworkFileSystemLeavesYoungDirectoriesAlone) {
  MakeOneOfEach();
  PretendNfs();
  const RecoveryReport report = Recovered();
  EXPECT_THAT(report.kept_incomplete, SizeIs(2));
  EXPECT_THAT(report.kept_incomplete, Contains(AllOf(HasSubstr("nfs"), HasSubstr("24h"))));
  EXPECT_TRUE(Exists(complete_) && Exists(incomplete_));
}

TEST_F(RecoveryTest, OnANetworkFileSystemSettlesOldOnes) {
  MakeOneOfEach();
  MakeOld(complete_, absl::Hours(25));
  MakeOld(incomplete_, absl::Hours(25));
  PretendNfs();
  const RecoveryReport report = Recovered();
  EXPECT_THAT(report.promoted, ElementsAre("step-7"));
  EXPECT_THAT(report.removed, ElementsAre(incomplete_));
}

TEST_F(RecoveryTest, OnANetworkFileSystemOneYoungFileMakesTheDirectoryYoung) {
  MakeOneOfEach();
  MakeOld(incomplete_, absl::Hours(25));
  std::ofstream(directory_ / (incomplete_ + "/model-00000-of-00002.safetensors")) << "still going";
  PretendNfs();
  EXPECT_THAT(Recovered().removed, IsEmpty());
}

TEST_F(RecoveryTest, OnANetworkFileSystemPromotesWhatWasSilentForMinutes) {
  MakeOneOfEach();
  MakeOld(complete_, absl::Minutes(3));
  MakeOld(incomplete_, absl::Minutes(3));
  PretendNfs();
  const RecoveryReport report = Recovered();
  EXPECT_THAT(report.promoted, ElementsAre("step-7"));
  EXPECT_THAT(report.removed, IsEmpty());
  EXPECT_THAT(report.kept_incomplete, ElementsAre(HasSubstr("24h")));
}

TEST_F(RecoveryTest, OnANetworkFileSystemWaitsForTheSilence) {
  MakeOneOfEach();
  PretendNfs();
  const RecoveryReport report = Recovered(
      {.wait_for_orphans = absl::Milliseconds(1), .silence_without_locks = absl::Seconds(2)});
  EXPECT_THAT(report.promoted, ElementsAre("step-7"));
  EXPECT_TRUE(Exists(incomplete_));
}

TEST_F(RecoveryTest, OnANetworkFileSystemSignsOfLifePutThePromotionOff) {
  MakeOneOfEach();
  const std::string board = directory_ / (complete_ + "/" + layout::kBoardName);
  std::ofstream(board) << "alive";
  MakeOld(complete_, absl::Minutes(3));
  std::ofstream(board) << "alive again";
  PretendNfs();
  EXPECT_THAT(Recovered().promoted, IsEmpty());
}

TEST_F(RecoveryTest, OnANetworkFileSystemTheServersClockCounts) {
  static absl::Duration ahead;
  MakeOneOfEach();
  MakeOld(complete_, absl::Minutes(10));
  PretendNfs();
  static const auto kShift = [](struct stat* out) {
    out->st_mtim = absl::ToTimespec(absl::TimeFromTimespec(out->st_mtim) + ahead);
  };
  sys::g_system.fstat = [](int fd, struct stat* out) {
    const int result = sys::kKernel.fstat(fd, out);
    kShift(out);
    return result;
  };
  sys::g_system.fstatat = [](int directory, const char* name, struct stat* out, int flags) {
    const int result = sys::kKernel.fstatat(directory, name, out, flags);
    kShift(out);
    return result;
  };
  // Ten minutes by the server's clock, whatever this machine's says.
  for (const absl::Duration difference : {-absl::Hours(1), absl::Hours(1)}) {
    ahead = difference;
    const RecoveryReport report = Recovered(
        {.wait_for_orphans = absl::ZeroDuration(), .silence_without_locks = absl::Minutes(20)});
    EXPECT_THAT(report.promoted, IsEmpty());
  }
  ahead = absl::Hours(1);
  EXPECT_THAT(Recovered().promoted, ElementsAre("step-7"));
}

TEST_F(RecoveryTest, OnANetworkFileSystemTheCallerMayVouchThatNothingRuns) {
  MakeOneOfEach();
  PretendNfs();
  const RecoveryReport report = Recovered(
      {.wait_for_orphans = absl::ZeroDuration(), .age_without_locks = absl::ZeroDuration()});
  EXPECT_THAT(report.promoted, ElementsAre("step-7"));
  EXPECT_THAT(report.removed, ElementsAre(incomplete_));
}

TEST_F(RecoveryTest, TwoAtOnceOnANetworkFileSystemDoNoHarm) {
  // What the other process does first shows as ENOENT everywhere.
  MakeOneOfEach();
  PretendNfs();
  sys::g_system.unlinkat = [](int directory, const char* name, int flags) {
    sys::kKernel.unlinkat(directory, name, flags);
    errno = ENOENT;
    return -1;
  };
  sys::g_system.renameat2 = [](int a, const char* b, int c, const char* d, unsigned flags) {
    sys::kKernel.renameat2(a, b, c, d, flags);
    errno = ENOENT;
    return -1;
  };
  const RecoveryReport report = Recovered(
      {.wait_for_orphans = absl::ZeroDuration(), .age_without_locks = absl::ZeroDuration()});
  EXPECT_THAT(report.kept_incomplete, IsEmpty());
  EXPECT_THAT(report.complete, SizeIs(1));
}

}  // namespace
}  // namespace holdfast
