// Two ranks as two processes: one checkpoint, visible after both are done, never before.
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "holdfast/load.h"
#include "holdfast/ranks.h"
#include "holdfast/recovery.h"
#include "holdfast/verify.h"
#include "runtime/layout/board.h"
#include "runtime/sys/system.h"
#include "tests/testing/child_process.h"
#include "tests/testing/save_test.h"
#include "tests/testing/small_checkpoint.h"

namespace holdfast::testing {
namespace {

class Ranks : public LauncherTest {
 protected:
  CheckpointerOptions Rank(uint32_t rank) {
    CheckpointerOptions options = Options();
    options.rank = rank;
    options.world_size = 2;
    return options;
  }
  /// Two chunks: the second chunk waits under a rate limit.
  static TrainingState StateOf(uint32_t rank) { return TrainingState::Uniform(3, 2u << 20, rank); }
  absl::StatusOr<SaveHandle> BeginRank(Checkpointer* checkpointer, uint32_t rank) {
    const TrainingState state = StateOf(rank);
    const std::vector<TensorSource> sources = state.Sources();
    return checkpointer->SaveAsync(
        {.name = "step-1", .step = 1, .tensors = sources, .attempt = attempt_});
  }
  /// Saves as `rank` and returns the result.
  absl::Status SaveRank(const CheckpointerOptions& options) {
    const auto checkpointer = Make(options);
    if (checkpointer == nullptr) return absl::InternalError("no checkpointer");
    const auto begun = BeginRank(checkpointer.get(), options.rank);
    if (!begun.ok()) return begun.status();
    const absl::Status ended = begun->WaitDurable(kLong).status();
    ExpectMemoryBack(checkpointer.get());
    return ended;
  }
  void ExpectBothRanksThere() {
    ExpectPreviousAnd(directory(), {"step-1"});
    const std::string path = absl::StrCat(directory(), "/step-1");
    EXPECT_THAT(Names(path), ::testing::Not(::testing::Contains(layout::kBoardName)));
    // A rank 0 killed right after its rename leaves the board.
    std::ofstream(absl::StrCat(path, "/", layout::kBoardName)) << "the board";
    const auto verified = Verify(path, {});
    ASSERT_TRUE(verified.ok()) << verified.status();
    EXPECT_EQ(verified->verdict, Verdict::kSound);
    EXPECT_THAT(verified->note, ::testing::Not(::testing::HasSubstr("Not part")));
    const auto info = InspectCheckpoint(path);
    EXPECT_TRUE(std::filesystem::exists(path + "/holdfast.commit.json")) << "of all its manifests";
    ASSERT_TRUE(info.ok()) << info.status();
    EXPECT_EQ(info->world_size, 2u);
    EXPECT_EQ(info->attempt, attempt_);
  }
  /// Recovery removes the files of a failed attempt; then the name can be saved again.
  void ExpectNextAttemptWorks() {
    EXPECT_TRUE(absl::IsNotFound(InspectCheckpoint(absl::StrCat(directory(), "/step-1")).status()));
    RecoveryOptions recovery;
    recovery.wait_for_orphans = absl::Seconds(30);
    recovery.promote = false;
    const auto recovered = Recover(directory(), recovery);
    ASSERT_TRUE(recovered.ok()) << recovered.status();
    // Every worker has ended by itself, and no process holds a worker's lock.
    EXPECT_THAT(recovered->fenced, ::testing::IsEmpty());
    ExpectPreviousAnd(directory(), {});
    attempt_ = NewAttemptId();
    ChildProcess other([this] { EXPECT_TRUE(SaveRank(Rank(1)).ok()); });
    const absl::Status status = SaveRank(Rank(0));
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(other.Wait(kLong), 0);
    ExpectBothRanksThere();
  }
  AttemptId attempt_ = NewAttemptId();
};
INSTANTIATE_TEST_SUITE_P(All, Ranks, kEveryLauncher, LauncherName);

TEST_P(Ranks, AppearTogether) {
  SavePrevious(directory());
  Mailbox mailbox;
  ChildProcess other([&] {
    EXPECT_TRUE(mailbox.FromParent(kLong).has_value());
    const absl::Status status = SaveRank(Rank(1));
    EXPECT_TRUE(status.ok()) << status;
  });
  const auto checkpointer = Make(Rank(0));
  ASSERT_NE(checkpointer, nullptr);
  const auto begun = BeginRank(checkpointer.get(), 0);
  ASSERT_TRUE(begun.ok()) << begun.status();
  ASSERT_TRUE(WaitFor([&] { return begun->progress().phase == "waiting for ranks"; }));
  EXPECT_THAT(Names(directory()), ::testing::Not(::testing::Contains("step-1")));
  mailbox.ToChild("go");
  const auto report = begun->WaitDurable(kLong);
  EXPECT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(other.Wait(kLong), 0);
  ExpectBothRanksThere();
}

TEST_P(Ranks, OneThatNeverComesIsADeadline) {
  SavePrevious(directory());
  CheckpointerOptions options = Rank(0);
  options.time_liveness_max = absl::Seconds(1);
  const absl::Time begin = absl::Now();
  const absl::Status status = SaveRank(options);
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              ::testing::HasSubstr("rank 1 has not begun this save"));
  EXPECT_LT(absl::Now() - begin, kLong);
  ExpectNextAttemptWorks();
}

TEST_P(Ranks, OneThatIsKilledIsADeadlineOfTheOther) {
  SavePrevious(directory());
  const Subreaper subreaper;
  Mailbox mailbox;
  CheckpointerOptions slow = Rank(1);
  slow.qos.bytes_per_second_max = 2u << 20;
  ChildProcess other([&] {
    const auto checkpointer = Make(slow);
    ASSERT_NE(checkpointer, nullptr);
    const auto begun = BeginRank(checkpointer.get(), 1);
    ASSERT_TRUE(begun.ok()) << begun.status();
    ASSERT_TRUE(WaitFor([&] { return begun->worker_pid() != 0; }));
    mailbox.ToParent(absl::StrCat(begun->worker_pid()));
    (void)begun->WaitDurable(kLong);
  });
  const pid_t worker = std::atoi(mailbox.FromChild(kLong).value_or("0").c_str());
  ASSERT_GT(worker, 0);
  if (!IsThread()) SendSignal(worker, SIGKILL);
  other.Signal(SIGKILL);
  EXPECT_EQ(other.Wait(kLong), ChildProcess::kSignalBase + SIGKILL);
  // The trainer may have reaped the worker already.
  if (!IsThread()) (void)subreaper.Reap(worker, absl::Seconds(10));
  CheckpointerOptions options = Rank(0);
  options.time_liveness_max = absl::Seconds(1);
  const absl::Status status = SaveRank(options);
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("rank 1 has given no sign"));
  ExpectNextAttemptWorks();
}

TEST_P(Ranks, OneThatLivesIsWaitedForUntilTheDeadline) {
  SavePrevious(directory());
  CheckpointerOptions options = Rank(0);
  options.time_liveness_max = absl::Seconds(2);
  options.time_ranks_max = absl::Seconds(5);
  RankInSave who = {.directory = directory(),
                    .name = "step-1",
                    .attempt = attempt_,
                    .rank = 1,
                    .world_size = 2,
                    .time_liveness_max = absl::Seconds(2)};
  const auto announced = RankAnnouncement::Make(who);
  ASSERT_TRUE(announced.ok()) << announced.status();
  const absl::Time begin = absl::Now();
  const absl::Status status = SaveRank(options);
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("rank 1 lives"));
  EXPECT_GE(absl::Now() - begin, absl::Seconds(5));
  // The other rank gets the error when it abandons the save as the last rank.
  (*announced)->Abandon(absl::UnknownError("too late"));
  ExpectPreviousAnd(directory(), {});
}

TEST_P(Ranks, AFailureOfOneIsAnErrorOfTheOtherAtOnce) {
  SavePrevious(directory());
  Mailbox mailbox;
  for (const uint32_t failing : {0u, 1u}) {
    SCOPED_TRACE(failing);
    attempt_ = NewAttemptId();
    ChildProcess other([&] {
      const auto checkpointer = Make(Rank(failing));
      ASSERT_NE(checkpointer, nullptr);
      LimitFileSize(1u << 20);
      ASSERT_TRUE(mailbox.FromParent(kLong).has_value());
      const auto begun = BeginRank(checkpointer.get(), failing);
      // The error comes from the call or from the wait: both are in time.
      const absl::Status status = begun.ok() ? begun->WaitDurable(kLong).status() : begun.status();
      EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("File too large"));
      ExpectMemoryBack(checkpointer.get());
    });
    const auto checkpointer = Make(Rank(1 - failing));
    ASSERT_NE(checkpointer, nullptr);
    const auto begun = BeginRank(checkpointer.get(), 1 - failing);
    ASSERT_TRUE(begun.ok()) << begun.status();
    ASSERT_TRUE(WaitFor([&] { return begun->progress().phase == "waiting for ranks"; }));
    mailbox.ToChild("go");
    const absl::Time begin = absl::Now();
    const absl::Status status = begun->WaitDurable(kLong).status();
    EXPECT_TRUE(absl::IsAborted(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                ::testing::HasSubstr(absl::StrCat("rank ", failing, " failed: ")));
    EXPECT_LT(absl::Now() - begin, kLong);
    EXPECT_EQ(other.Wait(kLong), 0);
    ExpectMemoryBack(checkpointer.get());
    EXPECT_TRUE(absl::IsNotFound(InspectCheckpoint(absl::StrCat(directory(), "/step-1")).status()));
  }
  ExpectNextAttemptWorks();
}

TEST_P(Ranks, RefusedCallOfOneRankFailsTheOtherAtOnce) {
  SavePrevious(directory());
  for (const uint32_t failing : {0u, 1u}) {
    SCOPED_TRACE(failing);
    attempt_ = NewAttemptId();
    const auto checkpointer = Make(Rank(1 - failing));
    ASSERT_NE(checkpointer, nullptr);
    const auto begun = BeginRank(checkpointer.get(), 1 - failing);
    ASSERT_TRUE(begun.ok()) << begun.status();
    ChildProcess other([&] {
      CheckpointerOptions options = Rank(failing);
      options.staging.control_bytes_max = 1;
      EXPECT_TRUE(absl::IsResourceExhausted(SaveRank(options)));
    });
    EXPECT_EQ(other.Wait(kLong), 0);
    const absl::Status status = begun->WaitDurable(kLong).status();
    EXPECT_TRUE(absl::IsAborted(status)) << status;
  }
  ExpectNextAttemptWorks();
}

int g_mkdirs_until_failure = 0;

TEST_P(Ranks, OneThatCannotMakeADirectoryFailsTheOtherAtOnce) {
  SavePrevious(directory());
  for (const int failing : {1, 2}) {  // for the files, and for the board
    SCOPED_TRACE(failing);
    attempt_ = NewAttemptId();
    const auto checkpointer = Make(Rank(0));
    ASSERT_NE(checkpointer, nullptr);
    const auto begun = BeginRank(checkpointer.get(), 0);
    ASSERT_TRUE(begun.ok()) << begun.status();
    ChildProcess other([&] {
      g_mkdirs_until_failure = failing;
      sys::g_system.mkdirat = [](int directory, const char* path, mode_t mode) {
        if (--g_mkdirs_until_failure != 0) return sys::kKernel.mkdirat(directory, path, mode);
        errno = ENOSPC;
        return -1;
      };
      const absl::Status status = SaveRank(Rank(1));
      EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    });
    EXPECT_EQ(other.Wait(kLong), 0);
    const absl::Status status = begun->WaitDurable(kLong).status();
    EXPECT_TRUE(absl::IsAborted(status)) << status;
  }
  ExpectNextAttemptWorks();
}

TEST_P(Ranks, OneThatAbandonsTheSaveIsAnErrorOfTheOtherAtOnce) {
  SavePrevious(directory());
  // Before the other rank comes: no directory yet.
  RankInSave who = {
      .directory = directory(), .name = "step-1", .attempt = attempt_, .rank = 1, .world_size = 2};
  ASSERT_TRUE(AbandonSave(who, absl::UnknownError("no such tensor")).ok());
  const absl::Status status = SaveRank(Rank(0));
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("rank 1 failed: no such tensor"));
  ExpectPreviousAnd(directory(), {});  // both ranks have come and left
  who.name = "a/b";
  EXPECT_TRUE(absl::IsInvalidArgument(AbandonSave(who, absl::UnknownError(""))));
  who = {.directory = "/nowhere", .name = "step-1", .attempt = attempt_, .world_size = 2};
  EXPECT_TRUE(absl::IsNotFound(AbandonSave(who, absl::UnknownError(""))));
  ExpectNextAttemptWorks();
}

std::atomic<int> g_fsyncs_to_fail{0};
std::string g_committed;

TEST_P(Ranks, AnFsyncThatFailedBehindTheCommitStaysAnError) {
  if (!IsThread()) GTEST_SKIP() << "another process has its own table of system calls";
  SavePrevious(directory());
  g_committed = absl::StrCat(directory(), "/step-1");
  g_fsyncs_to_fail = 2;  // in the workers; a later success proves nothing
  sys::g_system.fsync = [](int fd) {
    struct stat synced {};
    struct stat parent {};
    const std::string above = g_committed.substr(0, g_committed.rfind('/'));
    const bool behind = ::access(g_committed.c_str(), F_OK) == 0 &&
                        ::stat(above.c_str(), &parent) == 0 && ::fstat(fd, &synced) == 0 &&
                        parent.st_ino == synced.st_ino;
    if (!behind || g_fsyncs_to_fail.fetch_sub(1) <= 0) return sys::kKernel.fsync(fd);
    errno = EIO;
    return -1;
  };
  {
    const auto zero = Make(Rank(0));
    const auto one = Make(Rank(1));
    ASSERT_TRUE(zero != nullptr && one != nullptr);
    const auto first = BeginRank(zero.get(), 0);
    const auto second = BeginRank(one.get(), 1);
    ASSERT_TRUE(first.ok() && second.ok());
    for (const auto& save : {*first, *second}) {
      const absl::Status ended = save.WaitDurable(kLong).status();
      EXPECT_TRUE(absl::IsDataLoss(ended)) << ended;
    }
  }
  sys::g_system = sys::kKernel;
  ExpectBothRanksThere();
}

TEST_P(Ranks, WithoutAnAttemptIdAreRefused) {
  const auto checkpointer = Make(Rank(0));
  ASSERT_NE(checkpointer, nullptr);
  const auto begun = Begin(checkpointer.get(), "step-1", StateOf(0));
  EXPECT_TRUE(absl::IsInvalidArgument(begun.status())) << begun.status();
  EXPECT_THAT(std::string(begun.status().message()), ::testing::HasSubstr("attempt id"));
}

TEST(RankAnnouncement, SeesWhichRanksGiveSignsOfLife) {
  const TemporaryDirectory directory;
  const auto announced = [&directory, attempt = NewAttemptId()](uint32_t rank) {
    return RankAnnouncement::Make({.directory = directory.path(),
                                   .name = "step-1",
                                   .attempt = attempt,
                                   .rank = rank,
                                   .world_size = 3,
                                   .time_liveness_max = absl::Seconds(3)});
  };
  const auto zero = announced(0);
  const auto one = announced(1);
  ASSERT_TRUE(zero.ok() && one.ok());
  const auto wait = [&zero](const std::vector<uint32_t>& ranks) {
    const absl::Time deadline = absl::Now() + kLong;
    absl::Status status;
    while (status.ok() && absl::Now() < deadline) {
      absl::SleepFor(absl::Milliseconds(100));
      status = (*zero)->CheckRanks(ranks);
    }
    return status;
  };
  const absl::Status absent = wait({1, 2});
  EXPECT_TRUE(absl::IsDeadlineExceeded(absent)) << absent;
  EXPECT_THAT(std::string(absent.message()), ::testing::StartsWith("rank 2 has given no sign"));
  EXPECT_TRUE((*zero)->CheckRanks({1}).ok());
  (*one)->Abandon(absl::UnknownError("out of luck"));
  const absl::Status failed = wait({1});
  EXPECT_TRUE(absl::IsAborted(failed)) << failed;
  EXPECT_THAT(std::string(failed.message()), ::testing::HasSubstr("rank 1 failed: out of luck"));
}

}  // namespace
}  // namespace holdfast::testing
