// RankAnnouncement: a rank that cannot take part says so to the other ranks.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <cerrno>
#include <filesystem>
#include <string>

#include "holdfast/checkpointer.h"
#include "holdfast/ranks.h"
#include "holdfast/recovery.h"
#include "runtime/base/unique_fd.h"
#include "runtime/format/directory_names.h"
#include "runtime/layout/board.h"
#include "runtime/sys/system.h"
#include "runtime/worker/rank_board.h"
#include "tests/testing/small_checkpoint.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class Announcement : public ::testing::Test {
 protected:
  // The thread that gives signs of life may still run, and reads other entries of the table.
  void TearDown() override {
    sys::g_system.thread_create = sys::kKernel.thread_create;
    sys::g_system.mkdirat = sys::kKernel.mkdirat;
  }
  RankInSave Rank(uint32_t rank) const {
    return {.directory = directory_.path(),
            .name = "step-1",
            .attempt = attempt_,
            .rank = rank,
            .world_size = 2};
  }

  testing::TemporaryDirectory directory_;
  const AttemptId attempt_ = NewAttemptId();
};

TEST_F(Announcement, EndsTheSaveOfAllRanksWhereItCannotGiveSignsOfLife) {
  sys::g_system.thread_create = [](pthread_t*, const pthread_attr_t*, void* (*)(void*), void*) {
    return EAGAIN;
  };
  const absl::Status refused = RankAnnouncement::Make(Rank(1)).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused) || absl::IsUnavailable(refused)) << refused;
  sys::g_system.thread_create = sys::kKernel.thread_create;
  // At once, and not after time_liveness_max without a sign of life.
  const absl::Status other = RankAnnouncement::Make(Rank(0)).status();
  EXPECT_TRUE(absl::IsAborted(other)) << other;
  EXPECT_THAT(std::string(other.message()), HasSubstr("rank 1 failed: start a thread"));
}

TEST_F(Announcement, NamesTheSaveWhereItCannotOpenTheParent) {
  RankInSave who = Rank(0);
  who.directory += "/nowhere";
  const absl::Status refused = RankAnnouncement::Make(who).status();
  EXPECT_TRUE(absl::IsNotFound(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("save " + who.directory + "/step-1: open"));
}

TEST_F(Announcement, EndsTheSaveOfAllRanksWhereItCannotMakeTheDirectory) {
  const auto other = RankAnnouncement::Make(Rank(0));
  ASSERT_TRUE(other.ok()) << other.status();
  sys::g_system.mkdirat = [](int, const char*, mode_t) {
    sys::g_system.mkdirat = sys::kKernel.mkdirat;
    errno = ENOSPC;
    return -1;
  };
  const absl::Status refused = RankAnnouncement::Make(Rank(1)).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  const absl::Status told = (*other)->CheckRanks({});
  EXPECT_TRUE(absl::IsAborted(told) || absl::IsResourceExhausted(told)) << told;
  EXPECT_THAT(std::string(told.message()), HasSubstr("rank 1 failed: make directory"));
}

TEST_F(Announcement, LeavesNothingWhereTheOtherRankHasOtherReplicas) {
  const std::string partial = directory_ / format::PartialName("step-1", attempt_);
  std::filesystem::create_directory(partial);
  const base::UniqueFd directory(open(partial.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  worker::RankBoard board;
  ASSERT_EQ(worker::OpenBoard(directory.get(), attempt_, 0, 2, &board), 0);
  layout::RankFailure failure;
  failure.kind = static_cast<uint32_t>(layout::RankFailureKind::kDiffers);
  ASSERT_TRUE(worker::WriteFailure(board, worker::Side::kWorker, failure, /*raise=*/true));
  worker::CloseBoard(&board);
  const absl::Status refused = AbandonSave(Rank(1), absl::DataLossError("a disk"));
  EXPECT_TRUE(refused.ok()) << refused;
  EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
}

TEST_F(Announcement, IsARunningSaveForARecovery) {
  const auto other = RankAnnouncement::Make(Rank(1));
  ASSERT_TRUE(other.ok()) << other.status();
  const auto recovered = Recover(directory_.path(), {.wait_for_orphans = absl::ZeroDuration()});
  ASSERT_TRUE(recovered.ok()) << recovered.status();
  EXPECT_THAT(recovered->removed, IsEmpty());
  EXPECT_THAT(recovered->kept_incomplete, ElementsAre(HasSubstr("running")));

  const auto mine = RankAnnouncement::Make(Rank(0));
  ASSERT_TRUE(mine.ok()) << mine.status();
  EXPECT_TRUE((*mine)->CheckRanks({1}).ok());
  (*other)->Abandon(absl::DataLossError("a disk"));
  EXPECT_THAT(std::string((*mine)->CheckRanks({1}).message()), HasSubstr("rank 1 failed: a disk"));
}

TEST_F(Announcement, LetsItsDirectoryGoOnceItIsAbandoned) {
  for (const uint32_t rank : {0, 1}) {
    const auto made = RankAnnouncement::Make(Rank(rank));
    if (!made.ok()) break;  // another rank has failed
    (*made)->Abandon(absl::DataLossError("a disk"));
    const auto recovered = Recover(directory_.path(), {.wait_for_orphans = absl::ZeroDuration()});
    ASSERT_TRUE(recovered.ok()) << recovered.status();
    EXPECT_THAT(recovered->kept_incomplete, IsEmpty());
  }
}

}  // namespace
}  // namespace holdfast
