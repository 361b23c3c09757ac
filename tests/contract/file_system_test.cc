// A checkpoint's life, on each kind of file system: file systems that prove direct
// I/O, file systems that only accept it, and file systems without it.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "holdfast/probe.h"
#include "holdfast/recovery.h"
#include "tests/testing/child_process.h"
#include "tests/testing/save_test.h"
#include "tests/testing/small_file_system.h"

namespace holdfast::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using MadeFileSystem = absl::StatusOr<std::unique_ptr<SmallFileSystem>>;

constexpr uint64_t kDiskBytes = 320u << 20;  // the smallest XFS

struct Kind {
  const char* name;
  std::function<MadeFileSystem()> make;
  const char* file_system;  ///< As the probe calls it.
  DirectIo direct_io;       ///< The best that may be said of it.
};

const Kind kKinds[] = {
    {"Ext4", [] { return SmallFileSystem::Loop("mkfs.ext4 -q -F", "ext4", kDiskBytes); }, "ext4",
     DirectIo::kProven},
    {"Ext4SmallBlocks",
     [] { return SmallFileSystem::Loop("mkfs.ext4 -q -F -b 1024", "ext4", kDiskBytes); }, "ext4",
     DirectIo::kProven},
    {"Ext4DataJournal",
     [] { return SmallFileSystem::Loop("mkfs.ext4 -q -F", "ext4", kDiskBytes, "data=journal"); },
     "ext4", DirectIo::kNo},
    {"Xfs", [] { return SmallFileSystem::Loop("mkfs.xfs -q -f", "xfs", kDiskBytes); }, "xfs",
     DirectIo::kProven},
    {"Btrfs", [] { return SmallFileSystem::Loop("mkfs.btrfs -q -f", "btrfs", kDiskBytes); },
     "btrfs", DirectIo::kClaimed},
    {"Tmpfs", [] { return SmallFileSystem::Tmpfs(kDiskBytes); }, "tmpfs", DirectIo::kClaimed},
    {"Overlay", [] { return SmallFileSystem::Overlay(); }, "overlay", DirectIo::kProven},
    // bindfs takes O_DIRECT and forgets it ...
    {"FuseWithoutDirect", [] { return SmallFileSystem::Fuse(""); }, "fuse", DirectIo::kClaimed},
    // ... or hands it on.
    {"FuseWithDirect", [] { return SmallFileSystem::Fuse("--forward-odirect=512"); }, "fuse",
     DirectIo::kClaimed},
};

class FileSystem : public SaveTest,
                   public ::testing::WithParamInterface<std::tuple<Kind, EngineRung>> {
 protected:
  void SetUp() override {
    SaveTest::SetUp();
    HOLDFAST_SKIP_WITHOUT_RING(std::get<1>(GetParam()));
  }
};

std::string NameOfCase(const ::testing::TestParamInfo<std::tuple<Kind, EngineRung>>& info) {
  return absl::StrCat(std::get<0>(info.param).name, NameOf(std::get<1>(info.param)));
}
INSTANTIATE_TEST_SUITE_P(All, FileSystem,
                         ::testing::Combine(::testing::ValuesIn(kKinds),
                                            ::testing::Values(EngineRung::kUringFixed,
                                                              EngineRung::kPwrite)),
                         NameOfCase);

TEST_P(FileSystem, CheckpointsLiveThroughTheirWholeLife) {
  const Kind& kind = std::get<0>(GetParam());
  const auto disk = kind.make();
  if (!disk.ok()) GTEST_SKIP() << disk.status();
  const std::string& path = (*disk)->path();
  const auto probed = Probe(path, {.speed_probe = absl::ZeroDuration()});
  ASSERT_TRUE(probed.ok()) << probed.status();
  EXPECT_EQ(probed->file_system, kind.file_system);

  CheckpointerOptions options = SmallOptions(path);
  options.staging.arena_bytes = 16u << 20;
  options.engine = std::get<1>(GetParam());
  options.read_back = true;
  options.retention.keep_last = 2;
  {
    const auto checkpointer = Make(options);
    ASSERT_NE(checkpointer, nullptr);
    // The second one is larger than the arena.
    for (const uint32_t step : {1u, 2u, 3u}) {
      const TrainingState state = TrainingState::Uniform(step == 2 ? 11 : 3, 3u << 20, step);
      const std::string name = absl::StrCat("step-", step);
      const auto report = Save(checkpointer.get(), name, state, step);
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_EQ(report->bytes_written, report->bytes);
      EXPECT_EQ(report->direct_io, probed->direct_io);
      EXPECT_EQ(report->space_reserved, probed->reserve);
      EXPECT_EQ(report->streamed, step == 2);
      // What is true of the disk below says the file system; it never says more than is true.
      EXPECT_LE(report->direct_io, kind.direct_io);
      ExpectSound(report->path);
      EXPECT_TRUE(state.CompareWith(report->path).ok()) << state.CompareWith(report->path);
    }
    EXPECT_FALSE(Save(checkpointer.get(), "step-3", TrainingState::Uniform(1, 100, 1), 3).ok());
    const TrainingState again = TrainingState::Uniform(3, 2u << 20, 33);
    const std::vector<TensorSource> sources = again.Sources();
    const auto replacing =
        checkpointer->SaveAsync({.name = "step-3", .step = 3, .tensors = sources, .replace = true});
    ASSERT_TRUE(replacing.ok()) << replacing.status();
    const auto replaced = replacing->WaitDurable(kLong);
    ASSERT_TRUE(replaced.ok()) << replaced.status();
    EXPECT_TRUE(again.CompareWith(replaced->path).ok()) << again.CompareWith(replaced->path);
    ExpectMemoryBack(checkpointer.get());
  }
  const auto recovered = Recover(path, {.age_without_locks = absl::ZeroDuration()});
  ASSERT_TRUE(recovered.ok()) << recovered.status();
  EXPECT_THAT(recovered->kept_incomplete, IsEmpty());
  EXPECT_THAT(Names(path), ElementsAre("step-2", "step-3"));
  const auto newest = FindNewest(path);
  ASSERT_TRUE(newest.ok()) << newest.status();
  EXPECT_EQ(newest->name, "step-3");
}

TEST_P(FileSystem, RanksCommitAndFailTogether) {
  const auto disk = std::get<0>(GetParam()).make();
  if (!disk.ok()) GTEST_SKIP() << disk.status();
  const std::string& path = (*disk)->path();
  CheckpointerOptions options = SmallOptions(path);
  options.staging.arena_bytes = 16u << 20;
  options.engine = std::get<1>(GetParam());
  options.world_size = 2;
  const auto zero = Make(options);
  options.rank = 1;
  const auto one = Make(options);
  ASSERT_TRUE(zero != nullptr && one != nullptr);
  for (const bool fails : {false, true}) {
    const AttemptId attempt = NewAttemptId();
    const auto begin = [&](Checkpointer* checkpointer, uint64_t seed) {
      const TrainingState state = TrainingState::Uniform(3, 1u << 20, seed);
      const std::vector<TensorSource> sources = state.Sources();
      return checkpointer->SaveAsync(
          {.name = fails ? "failed" : "whole", .step = 1, .tensors = sources, .attempt = attempt});
    };
    const auto first = begin(zero.get(), 1);
    ASSERT_TRUE(first.ok()) << first.status();
    if (fails) {
      ASSERT_TRUE(WaitFor([&] { return first->progress().phase == "waiting for ranks"; }));
    }
    const auto second = begin(one.get(), 2);
    ASSERT_TRUE(second.ok()) << second.status();
    if (fails) (void)second->Cancel();
    const absl::Status ended = first->WaitDurable(kLong).status();
    const absl::Status other = second->WaitDurable(kLong).status();
    if (fails && ended.ok()) continue;  // it was committing already
    EXPECT_EQ(ended.ok(), !fails) << ended;
    EXPECT_EQ(other.ok(), !fails) << other;
    if (fails) {
      EXPECT_THAT(Text(ended), ::testing::HasSubstr("rank 1 failed: cancel"));
    }
  }
  ExpectSound(absl::StrCat(path, "/whole"));
}

}  // namespace
}  // namespace holdfast::testing
