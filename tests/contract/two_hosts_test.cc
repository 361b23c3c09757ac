// Ranks on two hosts: each sees a directory through a FUSE mount of its own, which keeps
// attributes, names and missing names for seconds and hands no lock on.
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "holdfast/recovery.h"
#include "runtime/format/directory_names.h"
#include "tests/testing/child_process.h"
#include "tests/testing/save_test.h"
#include "tests/testing/small_file_system.h"

namespace holdfast::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class FileSystemOfTwoHosts : public SaveTest {
 protected:
  void SetUp() override {
    SaveTest::SetUp();
    for (auto& host : hosts_) {
      auto mounted = SmallFileSystem::Fuse(
          "--forward-odirect=512 -o attr_timeout=3,entry_timeout=3,negative_timeout=3",
          directory());
      if (!mounted.ok()) GTEST_SKIP() << mounted.status();
      host = *std::move(mounted);
    }
  }
  void TearDown() override {
    for (auto& host : hosts_) host.reset();
    SaveTest::TearDown();
  }
  CheckpointerOptions Rank(uint32_t rank) const {
    CheckpointerOptions options = SmallOptions(hosts_[rank]->path());
    options.staging.arena_bytes = 16u << 20;
    options.rank = rank;
    options.world_size = 2;
    return options;
  }
  static absl::StatusOr<SaveHandle> BeginRank(Checkpointer* checkpointer, const std::string& name,
                                              const AttemptId& attempt, uint64_t step) {
    const TrainingState state = TrainingState::Uniform(3, 1u << 20, step);
    const std::vector<TensorSource> sources = state.Sources();
    return checkpointer->SaveAsync(
        {.name = name, .step = step, .tensors = sources, .attempt = attempt});
  }

  std::unique_ptr<SmallFileSystem> hosts_[2];
};

TEST_F(FileSystemOfTwoHosts, CommitTogether) {
  const auto zero = Make(Rank(0));
  const auto one = Make(Rank(1));
  ASSERT_TRUE(zero != nullptr && one != nullptr);
  for (uint64_t step = 1; step <= 2; ++step) {
    const AttemptId attempt = NewAttemptId();
    const std::string name = absl::StrCat("step-", step);
    // The other host looks first, and keeps for a while that nothing is there.
    const auto second = BeginRank(one.get(), name, attempt, step);
    const auto first = BeginRank(zero.get(), name, attempt, step);
    ASSERT_TRUE(first.ok() && second.ok()) << first.status() << second.status();
    EXPECT_TRUE(first->WaitDurable(kLong).ok()) << first->WaitDurable(kLong).status();
    EXPECT_TRUE(second->WaitDurable(kLong).ok()) << second->WaitDurable(kLong).status();
    ExpectSound(absl::StrCat(directory(), "/", name));
  }
  EXPECT_THAT(Names(directory()), ElementsAre("step-1", "step-2"));
}

TEST_F(FileSystemOfTwoHosts, FailTogether) {
  const auto zero = Make(Rank(0));
  const auto one = Make(Rank(1));
  ASSERT_TRUE(zero != nullptr && one != nullptr);
  const AttemptId attempt = NewAttemptId();
  const auto first = BeginRank(zero.get(), "step-1", attempt, 1);
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_TRUE(WaitFor([&] { return first->progress().phase == "waiting for ranks"; }));
  CheckpointerOptions slow = Rank(1);
  slow.qos.bytes_per_second_max = 64u << 10;
  const auto failing = Make(slow);
  const auto second = BeginRank(failing.get(), "step-1", attempt, 1);
  ASSERT_TRUE(second.ok()) << second.status();
  (void)second->Cancel();
  EXPECT_THAT(Text(first->WaitDurable(kLong).status()), HasSubstr("rank 1 failed: cancel"));
  EXPECT_FALSE(second->WaitDurable(kLong).ok());
  EXPECT_TRUE(zero->Flush(kLong).ok() && failing->Flush(kLong).ok());
  // And the next one works.
  const AttemptId next = NewAttemptId();
  const auto third = BeginRank(zero.get(), "step-2", next, 2);
  const auto fourth = BeginRank(one.get(), "step-2", next, 2);
  ASSERT_TRUE(third.ok() && fourth.ok()) << third.status() << fourth.status();
  EXPECT_TRUE(third->WaitDurable(kLong).ok()) << third->WaitDurable(kLong).status();
  EXPECT_TRUE(fourth->WaitDurable(kLong).ok()) << fourth->WaitDurable(kLong).status();
}

TEST_F(FileSystemOfTwoHosts, RecoveryOnTheOtherHostPromotesWhatADeadOneFinished) {
  {
    const auto alone = Make([this] {
      CheckpointerOptions options = Rank(0);
      options.world_size = 1;
      return options;
    }());
    ASSERT_NE(alone, nullptr);
    const auto saved = BeginRank(alone.get(), "step-1", NewAttemptId(), 1);
    ASSERT_TRUE(saved.ok() && saved->WaitDurable(kLong).ok());
  }
  // As a host leaves the directory that died before the last rename.
  const auto info = InspectCheckpoint(absl::StrCat(hosts_[0]->path(), "/step-1"));
  ASSERT_TRUE(info.ok()) << info.status();
  const std::string partial = "/" + format::PartialName("step-1", info->attempt);
  ASSERT_EQ(
      ::rename((hosts_[0]->path() + "/step-1").c_str(), (hosts_[0]->path() + partial).c_str()), 0);
  const auto recovered = Recover(hosts_[1]->path(), {.silence_without_locks = absl::Seconds(5)});
  ASSERT_TRUE(recovered.ok()) << recovered.status();
  EXPECT_THAT(recovered->promoted, ElementsAre("step-1"));
  EXPECT_THAT(recovered->kept_incomplete, IsEmpty());
  ExpectSound(absl::StrCat(directory(), "/step-1"));
}

}  // namespace
}  // namespace holdfast::testing
