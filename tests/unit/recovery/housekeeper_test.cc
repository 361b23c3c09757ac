// When the directory of a save of several ranks is removed that all its ranks have given up.
#include "runtime/recovery/housekeeper.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/vfs.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "holdfast/checkpointer.h"
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

class RemoveOnceUnused : public ::testing::Test {
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
    const absl::Status idle = housekeeper_->WaitIdle(absl::Now() + absl::Minutes(1));
    EXPECT_TRUE(idle.ok()) << idle;
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

}  // namespace
}  // namespace holdfast::recovery
