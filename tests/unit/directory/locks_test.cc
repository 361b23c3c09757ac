// Who is seen at work in a partial directory, by the locks alone. With real processes where a
// process's death is the point.
#include "runtime/directory/locks.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "runtime/directory/entries.h"
#include "runtime/sys/system.h"
#include "tests/testing/child_process.h"
#include "tests/testing/small_checkpoint.h"

namespace holdfast::directory {
namespace {

using testing::TemporaryDirectory;

constexpr char kName[] = "step-7.partial-00000000000000010000000000000002";

class DirectoryLockTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto opened = OpenDirectory(AT_FDCWD, directory_.path());
    ASSERT_TRUE(opened.ok());
    parent_ = *std::move(opened);
    s_path = directory_ / kName;
  }
  void TearDown() override { sys::g_system = sys::kKernel; }

  Owner Look(bool local = true) {
    auto opened = OpenDirectory(parent_.get(), kName);
    EXPECT_TRUE(opened.ok());
    return OwnerProbe(parent_.get(), local).Look(opened->get());
  }

  TemporaryDirectory directory_;
  base::UniqueFd parent_;
  static std::string s_path;  // for hooks
};
std::string DirectoryLockTest::s_path;

TEST_F(DirectoryLockTest, ARunningSaveIsATrainers) {
  auto save = MakePartialDirectory(parent_.get(), kName);
  ASSERT_TRUE(save.ok()) << save.status();
  EXPECT_TRUE(save->locked);
  EXPECT_EQ(Look(), Owner::kTrainer);
}

TEST_F(DirectoryLockTest, RanksShareTheDirectoryAndAnyTrainerCounts) {
  auto first = MakePartialDirectory(parent_.get(), kName);
  auto second = MakePartialDirectory(parent_.get(), kName);
  ASSERT_TRUE(first.ok() && second.ok());
  *first = PartialDirectory{};
  EXPECT_EQ(Look(), Owner::kTrainer);
  *second = PartialDirectory{};
  EXPECT_EQ(Look(), Owner::kNobody);
}

TEST_F(DirectoryLockTest, AWorkerWithoutItsTrainerIsAnOrphan) {
  auto save = MakePartialDirectory(parent_.get(), kName);
  ASSERT_TRUE(save.ok());
  save->trainer.Reset();
  EXPECT_EQ(Look(), Owner::kOrphan);
}

TEST_F(DirectoryLockTest, AForeignForkKeepsNoLockAlive) {
  auto save = MakePartialDirectory(parent_.get(), kName);
  ASSERT_TRUE(save.ok());
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    write(ready[1], "x", 1);
    pause();
    _exit(0);
  }
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  *save = PartialDirectory{};
  EXPECT_EQ(Look(), Owner::kNobody);
  testing::SendSignal(child, SIGKILL);
  waitpid(child, nullptr, 0);
  close(ready[0]);
  close(ready[1]);
}

TEST_F(DirectoryLockTest, ATrainersDeathReleasesItsLockAndTheWorkersRemains) {
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  const pid_t trainer = fork();
  if (trainer == 0) {
    // The inherited fd of the parent was closed by the fork handler.
    auto parent = OpenDirectory(AT_FDCWD, directory_.path());
    auto save = MakePartialDirectory(parent->get(), kName);
    base::ForkScope own;
    const pid_t worker = fork();
    if (worker == 0) {
      close(save->trainer.get());  // as a forked worker must
      const pid_t self = getpid();
      write(pipes[1], &self, sizeof(self));
      pause();
      _exit(0);
    }
    pause();
    _exit(0);
  }
  pid_t worker = 0;
  ASSERT_EQ(read(pipes[0], &worker, sizeof(worker)), ssize_t{sizeof(worker)});
  EXPECT_EQ(Look(), Owner::kTrainer);
  testing::SendSignal(trainer, SIGKILL);
  waitpid(trainer, nullptr, 0);
  EXPECT_EQ(Look(), Owner::kOrphan);
  testing::SendSignal(worker, SIGKILL);
  // The worker was reparented: its end shows by its lock alone.
  auto opened = OpenDirectory(parent_.get(), kName);
  ASSERT_TRUE(opened.ok());
  ASSERT_EQ(flock(opened->get(), LOCK_EX), 0);
  close(pipes[0]);
  close(pipes[1]);
}

TEST_F(DirectoryLockTest, NobodyMeansThatNobodyCanComeIn) {
  ASSERT_TRUE(std::filesystem::create_directory(s_path));
  auto opened = OpenDirectory(parent_.get(), kName);
  ASSERT_EQ(OwnerProbe(parent_.get(), true).Look(opened->get()), Owner::kNobody);
  auto other = OpenDirectory(parent_.get(), kName);
  EXPECT_NE(flock(other->get(), LOCK_SH | LOCK_NB), 0);
}

TEST_F(DirectoryLockTest, TrustsNoLockThatOtherMachinesMayNotSee) {
  ASSERT_TRUE(std::filesystem::create_directory(s_path));
  EXPECT_EQ(Look(/*local=*/false), Owner::kUnknown);
  auto save = MakePartialDirectory(parent_.get(), kName);
  save->trainer.Reset();
  EXPECT_EQ(Look(/*local=*/false), Owner::kTrainer);  // in use, and never called an orphan's
}

TEST_F(DirectoryLockTest, CallsNobodyAnOrphanWhereTrainersLocksCannotBeSeen) {
  auto save = MakePartialDirectory(parent_.get(), kName);
  ASSERT_TRUE(save.ok());
  save->trainer.Reset();
  sys::g_system.fcntl = [](int, int, long) {
    errno = EINVAL;
    return -1;
  };
  EXPECT_EQ(Look(), Owner::kTrainer);
}

TEST_F(DirectoryLockTest, CallsALockErrorUnknown) {
  ASSERT_TRUE(std::filesystem::create_directory(s_path));
  sys::g_system.flock = [](int, int) {
    errno = ENOLCK;
    return -1;
  };
  EXPECT_EQ(Look(), Owner::kUnknown);
}

TEST_F(DirectoryLockTest, MakesTheDirectoryAnewWhenARecoveryTookItAwayBeforeTheLock) {
  // The directory vanishes between open and flock, twice.
  static int takes;
  takes = 2;
  sys::g_system.flock = [](int fd, int operation) {
    if (takes-- > 0) std::filesystem::remove(s_path);
    return sys::kKernel.flock(fd, operation);
  };
  auto save = MakePartialDirectory(parent_.get(), kName);
  ASSERT_TRUE(save.ok()) << save.status();
  EXPECT_TRUE(NameRefersTo(parent_.get(), kName, save->in_use.get()));
  EXPECT_EQ(Look(), Owner::kTrainer);
}

TEST_F(DirectoryLockTest, MakesTheDirectoryAnewWhenItWasReplacedByAnother) {
  static bool done;
  done = false;
  sys::g_system.flock = [](int fd, int operation) {
    if (!done) {
      done = true;
      std::filesystem::rename(s_path, s_path + ".away");
      std::filesystem::create_directory(s_path);
    }
    return sys::kKernel.flock(fd, operation);
  };
  auto save = MakePartialDirectory(parent_.get(), kName);
  ASSERT_TRUE(save.ok()) << save.status();
  EXPECT_TRUE(NameRefersTo(parent_.get(), kName, save->in_use.get()));
}

TEST_F(DirectoryLockTest, GivesUpWhenTheDirectoryIsTakenAwayForEver) {
  sys::g_system.flock = [](int fd, int operation) {
    std::filesystem::remove(s_path);
    return sys::kKernel.flock(fd, operation);
  };
  EXPECT_TRUE(absl::IsUnavailable(MakePartialDirectory(parent_.get(), kName).status()));
}

TEST_F(DirectoryLockTest, RefusesToGoOnWithoutALockThatRecoveryWouldTrust) {
  sys::g_system.flock = [](int, int) {
    errno = ENOLCK;
    return -1;
  };
  EXPECT_FALSE(MakePartialDirectory(parent_.get(), kName).ok());
}

TEST_F(DirectoryLockTest, ReportsErrnosOfMakingAndOpening) {
  sys::g_system.mkdirat = [](int, const char*, mode_t) {
    errno = EDQUOT;
    return -1;
  };
  EXPECT_TRUE(absl::IsResourceExhausted(MakePartialDirectory(parent_.get(), kName).status()));
  sys::g_system.mkdirat = [](int, const char*, mode_t) {
    errno = ENOENT;  // the parent was removed
    return -1;
  };
  EXPECT_TRUE(absl::IsFailedPrecondition(MakePartialDirectory(parent_.get(), kName).status()));
}

TEST_F(DirectoryLockTest, TurnsAreExclusiveAndEndWithTheirHolder) {
  auto other = OpenDirectory(AT_FDCWD, directory_.path());
  ASSERT_TRUE(other.ok());
  ASSERT_TRUE(TakeTurn(other->get(), "d", absl::ZeroDuration()).ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(TakeTurn(parent_.get(), "d", absl::Milliseconds(30))));
  *other = base::UniqueFd();
  EXPECT_TRUE(TakeTurn(parent_.get(), "d", absl::ZeroDuration()).ok());
}

/// The owner of the saves into a framework's directory.
Owner OwnerOf(int parent, bool local = true) {
  auto opened = OpenDirectory(parent, kName);
  EXPECT_TRUE(opened.ok());
  return OwnerOfSaves(opened->get(), local);
}

TEST_F(DirectoryLockTest, AFrameworksDirectoryShowsTrainersAndOrphans) {
  ASSERT_TRUE(MakeDirectory(parent_.get(), kName).ok());
  EXPECT_EQ(OwnerOf(parent_.get()), Owner::kNobody);
  auto first = OpenFrameworkDirectory(parent_.get(), kName);
  auto second = OpenFrameworkDirectory(parent_.get(), kName);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_TRUE(first->locked);
  first->trainer.Reset();
  EXPECT_EQ(OwnerOf(parent_.get()), Owner::kTrainer);  // the second save's
  second->trainer.Reset();
  EXPECT_EQ(OwnerOf(parent_.get()), Owner::kOrphan);
  *first = PartialDirectory{};
  EXPECT_EQ(OwnerOf(parent_.get()), Owner::kOrphan);
  *second = PartialDirectory{};
  EXPECT_EQ(OwnerOf(parent_.get()), Owner::kNobody);
}

TEST_F(DirectoryLockTest, AFrameworksTurnToCommitIsNotTheSavesLock) {
  ASSERT_TRUE(MakeDirectory(parent_.get(), kName).ok());
  auto save = OpenFrameworkDirectory(parent_.get(), kName);
  ASSERT_TRUE(save.ok());
  auto turn = OpenDirectory(parent_.get(), kName);
  ASSERT_TRUE(turn.ok());
  EXPECT_EQ(flock(turn->get(), LOCK_EX | LOCK_NB), 0);
  EXPECT_EQ(OwnerOf(parent_.get()), Owner::kTrainer);
}

TEST_F(DirectoryLockTest, OfANetworkFileSystemNoSaveIsCalledAnOrphansOrGone) {
  ASSERT_TRUE(MakeDirectory(parent_.get(), kName).ok());
  EXPECT_EQ(OwnerOf(parent_.get(), /*local=*/false), Owner::kUnknown);
  auto save = OpenFrameworkDirectory(parent_.get(), kName);
  ASSERT_TRUE(save.ok());
  save->trainer.Reset();
  EXPECT_EQ(OwnerOf(parent_.get(), /*local=*/false), Owner::kTrainer);
}

}  // namespace
}  // namespace holdfast::directory
