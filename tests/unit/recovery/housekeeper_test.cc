// When the directory of a save of several ranks is removed that all its ranks have given up; and
// retention beside other saves.
#include "runtime/recovery/housekeeper.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/vfs.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "holdfast/checkpointer.h"
#include "runtime/base/clock.h"
#include "runtime/base/unique_fd.h"
#include "runtime/directory/entries.h"
#include "runtime/directory/locks.h"
#include "runtime/format/directory_names.h"
#include "runtime/staging/staging_pool.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"
#include "runtime/writer/worker_source.h"
#include "tests/testing/child_process.h"
#include "tests/testing/small_checkpoint.h"

namespace holdfast::recovery {
namespace {

using testing::SmallRank;

constexpr AttemptId kAttempt = {.high = 1, .low = 2};

class HousekeeperTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto opened = directory::OpenDirectory(AT_FDCWD, directory_.path());
    ASSERT_TRUE(opened.ok()) << opened.status();
    parent_ = std::make_shared<const base::UniqueFd>(*std::move(opened));
    options_.directory = directory_.path();
    options_.launcher = Launcher::kFork;
    auto pool = staging::StagingPool::Create({.arena_bytes = kArenaBytesMin});
    ASSERT_TRUE(pool.ok()) << pool.status();
    pool_ = *std::move(pool);
    workers_ = std::make_unique<writer::WorkerSource>(pool_.get(), options_.launcher, "");
    housekeeper_ = std::make_unique<Housekeeper>(options_, workers_.get());
  }
  void TearDown() override {
    housekeeper_.reset();  // its thread calls the system
    sys::g_system = sys::kKernel;
  }

  /// The files of a killed worker of rank 0; those of rank 1 are missing.
  void WriteRankZero() const { step_7_.Write(directory_ / name_); }
  bool Exists() const { return std::filesystem::exists(directory_ / name_); }
  directory::PartialDirectory LocksOfARank() const {
    auto locks = directory::MakePartialDirectory(parent_->get(), name_);
    EXPECT_TRUE(locks.ok()) << locks.status();
    return locks.ok() ? *std::move(locks) : directory::PartialDirectory{};
  }
  /// Returns after the first try.
  void Try() {
    housekeeper_->RemoveOnceUnused(parent_, name_);
    const absl::Status idle = housekeeper_->WaitIdle(base::Now() + absl::Minutes(1));
    EXPECT_TRUE(idle.ok()) << idle;
  }
  /// Complete checkpoints of which retention keeps one.
  void WriteSteps(uint64_t count) {
    options_.retention.keep_last = 1;
    for (uint64_t step = 1; step <= count; ++step) {
      const SmallRank rank = {.checkpoint = absl::StrCat("step-", step),
                              .attempt = {.high = 1, .low = step},
                              .step = step,
                              .saved_at_ns = step};
      testing::WriteSmallCheckpoint(directory_ / rank.checkpoint, rank);
    }
  }
  /// As its worker does between the rename and the fsync of the parent.
  base::UniqueFd HoldStepOne() const {
    const std::string manifest = directory_ / ("step-1/" + format::ManifestName(0, 1));
    base::UniqueFd held(open(manifest.c_str(), O_RDONLY | O_CLOEXEC));
    EXPECT_EQ(flock(held.get(), LOCK_EX), 0);
    return held;
  }
  void ExpectRemoved() const {
    EXPECT_TRUE(testing::WaitFor([this] { return !Exists(); }));
  }

  testing::TemporaryDirectory directory_;
  const SmallRank step_7_ = {.checkpoint = "step-7", .attempt = kAttempt, .world_size = 2};
  const std::string name_ = format::PartialName("step-7", kAttempt);
  std::shared_ptr<const base::UniqueFd> parent_;
  CheckpointerOptions options_;
  std::unique_ptr<staging::StagingPool> pool_;
  std::unique_ptr<writer::WorkerSource> workers_;
  std::unique_ptr<Housekeeper> housekeeper_;
};

using RemoveOnceUnused = HousekeeperTest;
using ApplyRetention = HousekeeperTest;

TEST_F(RemoveOnceUnused, RemovesWhatARankLeft) {
  WriteRankZero();
  Try();
  ExpectRemoved();
}

TEST_F(RemoveOnceUnused, WaitsForOtherRanks) {
  directory::PartialDirectory other = LocksOfARank();
  WriteRankZero();
  Try();
  EXPECT_TRUE(Exists());
  other.trainer.Reset();  // an orphan worker may still commit
  Try();
  EXPECT_TRUE(Exists());
  other.in_use.Reset();
  ExpectRemoved();
}

TEST_F(RemoveOnceUnused, WaitsForTheRingOfADeadWorker) {
  directory::PartialDirectory dead = LocksOfARank();
  WriteRankZero();
  base::UniqueFd ring(sys::DuplicateOwned(dead.in_use.get()));  // the same open file description
  dead = {};
  Try();
  EXPECT_TRUE(Exists());
  ring.Reset();
  ExpectRemoved();
}

TEST_F(RemoveOnceUnused, LeavesACompleteDirectoryToARecovery) {
  testing::WriteSmallCheckpoint(directory_ / name_, step_7_);
  Try();
  EXPECT_TRUE(Exists());
}

TEST_F(RemoveOnceUnused, LeavesADirectoryWithoutProofOfASave) {
  std::filesystem::create_directory(directory_ / name_);
  std::ofstream(directory_ / name_ + "/notes.txt") << "of a user";
  Try();
  EXPECT_TRUE(std::filesystem::exists(directory_ / name_ + "/notes.txt"));
}

TEST_F(RemoveOnceUnused, LeavesANetworkFileSystemToARecovery) {
  WriteRankZero();
  sys::g_system.fstatfs = [](int fd, struct statfs* out) {
    const int result = sys::kKernel.fstatfs(fd, out);
    out->f_type = 0x6969;
    return result;
  };
  Try();
  EXPECT_TRUE(Exists());
}

TEST_F(RemoveOnceUnused, EndsBesideARankThatNeverEnds) {
  const directory::PartialDirectory other = LocksOfARank();
  {
    Housekeeper ending(options_, workers_.get());
    ending.RemoveOnceUnused(parent_, name_);
  }
  EXPECT_TRUE(Exists());
}

// Without a second look one checkpoint too many would stay until the next save.
TEST_F(ApplyRetention, WaitsForASaveThatIsAboutToEnd) {
  WriteSteps(3);
  const base::UniqueFd held = HoldStepOne();
  housekeeper_->ApplyRetention(parent_, "step-3", 3);
  EXPECT_TRUE(testing::WaitFor([this] { return !std::filesystem::exists(directory_ / "step-2"); }));
  const absl::Time soon = base::Now() + absl::Milliseconds(300);
  EXPECT_TRUE(absl::IsDeadlineExceeded(housekeeper_->WaitIdle(soon)));
  EXPECT_TRUE(std::filesystem::exists(directory_ / "step-1"));
  // The forked worker that removes step-2 has the descriptor, too.
  ASSERT_EQ(flock(held.get(), LOCK_UN), 0);
  const absl::Status idle = housekeeper_->WaitIdle(base::Now() + absl::Minutes(1));
  EXPECT_TRUE(idle.ok()) << idle;
  EXPECT_FALSE(std::filesystem::exists(directory_ / "step-1"));
  EXPECT_TRUE(std::filesystem::exists(directory_ / "step-3"));
}

TEST_F(ApplyRetention, LetsASaveGoThatEndsBehindLaterOnes) {
  WriteSteps(3);
  housekeeper_->ApplyRetention(parent_, "step-3", 3);
  ASSERT_TRUE(housekeeper_->WaitIdle(base::Now() + absl::Minutes(1)).ok());
  WriteSteps(1);
  housekeeper_->ApplyRetention(parent_, "step-1", 1);
  ASSERT_TRUE(housekeeper_->WaitIdle(base::Now() + absl::Minutes(1)).ok());
  EXPECT_FALSE(std::filesystem::exists(directory_ / "step-1"));
  EXPECT_TRUE(std::filesystem::exists(directory_ / "step-3"));
}

// On another machine's clock it may look older than the saves of another trainer.
TEST_F(ApplyRetention, KeepsTheSaveOfThisProcessThatWasCalledLast) {
  WriteSteps(3);
  housekeeper_->ApplyRetention(parent_, "step-1", 9);
  ASSERT_TRUE(housekeeper_->WaitIdle(base::Now() + absl::Minutes(1)).ok());
  EXPECT_TRUE(std::filesystem::exists(directory_ / "step-1"));
  EXPECT_FALSE(std::filesystem::exists(directory_ / "step-2"));
  EXPECT_TRUE(std::filesystem::exists(directory_ / "step-3"));
}

TEST_F(ApplyRetention, EndsBesideASaveThatNeverEnds) {
  WriteSteps(2);
  const base::UniqueFd held = HoldStepOne();
  {
    Housekeeper ending(options_, workers_.get());
    ending.ApplyRetention(parent_, "step-2", 2);
  }
  EXPECT_TRUE(std::filesystem::exists(directory_ / "step-1"));
}

}  // namespace
}  // namespace holdfast::recovery
