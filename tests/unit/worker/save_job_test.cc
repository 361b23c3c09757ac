// One save, from sealed extents to a durable checkpoint, under every launcher and engine.
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>

#include "gtest/gtest.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/settings.h"
#include "tests/unit/worker/worker_rig.h"

namespace holdfast::worker {
namespace {

constexpr uint64_t kArena = 32ull << 20;

class SaveJob : public ::testing::TestWithParam<testing::Setting> {
 protected:
  void SetUp() override { HOLDFAST_SKIP_WITHOUT_RING(std::get<1>(GetParam())); }
  Launcher launcher() const { return std::get<0>(GetParam()); }
  void Prepare(TestSave* save) const {
    save->parameters.launcher = launcher();
    save->parameters.engine = std::get<1>(GetParam());
  }

  TestDirectory directory_;
  Trainer trainer_{kArena};
};

TEST_P(SaveJob, WritesWhatWasSealedAndCommits) {
  TestSave save(&trainer_, directory_.path());
  Prepare(&save);
  save.AddFile("model.safetensors", {5'000'000, 1, 4'000'003}, 4096);
  save.Build();
  save.SealAll();
  TestWorker worker(launcher(), trainer_);
  save.StartOn(&worker);
  ASSERT_TRUE(save.AwaitDone());
  EXPECT_TRUE(save.failure().ok())
      << static_cast<int>(save.failure().operation) << " " << save.failure().error_number;
  EXPECT_EQ(worker.Join(), 0);
  EXPECT_EQ(save.Unsound(), "");
  EXPECT_FALSE(Exists(save.partial_path()));
  const layout::CompletionSlot& slot = save.job()->completion;
  EXPECT_EQ(slot.figures.bytes_written, save.contents()[0].size());
  EXPECT_EQ(slot.figures.engine, std::get<1>(GetParam()));
  EXPECT_NE(slot.reason[0], '\0');
  EXPECT_TRUE(slot.figures.space_reserved);
  EXPECT_GT(slot.times.first_submit, slot.times.started);
  EXPECT_GE(slot.times.last_complete, slot.times.first_submit);
  EXPECT_GE(slot.times.data_synced, slot.times.last_complete);
  EXPECT_GE(slot.times.manifest_synced, slot.times.data_synced);
  EXPECT_GE(slot.times.committed, slot.times.manifest_synced);
  EXPECT_GT(slot.times.cpu, 0u);
  if (launcher() == Launcher::kSpawn || launcher() == Launcher::kPersistent) {
    EXPECT_GT(slot.figures.worker_private_bytes_peak, 0u);
    if (!testing::kAnySanitizer) {
      EXPECT_LE(slot.figures.worker_private_bytes_peak, 32u << 20);
    }
  }
}

TEST_P(SaveJob, StreamsASaveLargerThanItsMemory) {
  // Eight chunks through memory for three, each slot refilled as soon as it is acknowledged.
  constexpr uint32_t kSlots = 3;
  Trainer trainer(kSlots * uint64_t{kChunkBytes});
  TestSave save(&trainer, directory_.path());
  Prepare(&save);
  save.parameters.streams = true;
  save.AddFile("model.bin", {7 * uint64_t{kChunkBytes} + 77});
  save.Build();
  TestWorker worker(launcher(), trainer);
  save.StartOn(&worker);
  layout::LogReader acknowledged(
      layout::At<layout::SharedU32>(save.job(), save.job()->acknowledged), save.extent_count());
  uint32_t next = 0;
  for (; next < kSlots; ++next) save.Seal(next);
  save.Ring();
  const uint64_t begin = static_cast<uint64_t>(::time(nullptr));
  while (next < save.extent_count() && static_cast<uint64_t>(::time(nullptr)) < begin + 30) {
    uint32_t freed = 0;
    if (!acknowledged.Next(&freed)) {
      ::usleep(200);
      continue;
    }
    save.Stage(next, save.table().extent(freed).arena_offset);
    save.Seal(next++);
    save.Ring();
  }
  ASSERT_TRUE(save.AwaitDone());
  EXPECT_TRUE(save.failure().ok());
  EXPECT_EQ(worker.Join(), 0);
  EXPECT_EQ(save.Unsound(), "");
}

TEST_P(SaveJob, WritesEveryShapeOfFile) {
  TestSave save(&trainer_, directory_.path());
  Prepare(&save);
  save.AddFile("empty", {});
  save.AddFile("one-byte", {1});
  save.AddFile("page", {4096});
  save.AddFile("chunk-less-one", {kChunkBytes - 1});
  save.AddFile("chunk", {kChunkBytes});
  save.AddFile("chunk-and-one", {kChunkBytes, 1});
  save.AddFile("empty-too", {0});
  save.Build();
  // The last first: files complete in any order.
  for (uint32_t i = save.extent_count(); i-- > 0;) save.Seal(i);
  ASSERT_TRUE(save.Run(launcher()));
  EXPECT_TRUE(save.failure().ok());
  EXPECT_EQ(save.Unsound(), "");
}

TEST_P(SaveJob, WritesManyMoreFilesThanItKeepsOpen) {
  TestSave save(&trainer_, directory_.path());
  Prepare(&save);
  for (int i = 0; i < 150; ++i) save.AddFile("part-" + std::to_string(i), {100, 33});
  // Two chunks each, sealed apart, so that incomplete files must make room.
  for (int i = 0; i < 2; ++i) save.AddFile("long-" + std::to_string(i), {kChunkBytes + 5});
  save.Build();
  const uint32_t long_first = 150;
  save.Seal(long_first);
  save.Seal(long_first + 2);
  for (uint32_t i = 0; i < 150; ++i) save.Seal(i);
  save.Seal(long_first + 3);
  save.Seal(long_first + 1);
  ASSERT_TRUE(save.Run(launcher()));
  EXPECT_TRUE(save.failure().ok());
  EXPECT_EQ(save.Unsound(), "");
}

TEST_P(SaveJob, ReadsBackWhatIsOnDisk) {
  uint64_t steps_without = 0;
  {
    TestSave save(&trainer_, directory_.path());
    Prepare(&save);
    save.parameters.target = "without";
    save.AddFile("model.bin", {6 * uint64_t{kChunkBytes} + 1000}, 64);
    save.AddFile("small.bin", {10});
    save.Build();
    save.SealAll();
    ASSERT_TRUE(save.Run(launcher()));
    steps_without = save.job()->steps.load();
  }
  TestSave save(&trainer_, directory_.path());
  Prepare(&save);
  save.parameters.flags |= layout::kReadBack;
  save.AddFile("model.bin", {6 * uint64_t{kChunkBytes} + 1000}, 64);
  save.AddFile("small.bin", {10});
  save.Build();
  save.SealAll();
  ASSERT_TRUE(save.Run(launcher()));
  EXPECT_TRUE(save.failure().ok());
  EXPECT_EQ(save.job()->steps.load() - steps_without, save.extent_count()) << "chunks read";
  EXPECT_EQ(save.Unsound(), "");
  if (launcher() == Launcher::kSpawn) {
    EXPECT_GT(save.job()->completion.figures.worker_private_bytes_peak, 16u << 20);
    if (!testing::kAnySanitizer) {
      EXPECT_LE(save.job()->completion.figures.worker_private_bytes_peak, 32u << 20);
    }
  }
}

TEST_P(SaveJob, RefusesAnExistingTargetAndLeavesItAlone) {
  TestSave save(&trainer_, directory_.path());
  Prepare(&save);
  ::mkdir(save.target_path().c_str(), 0755);
  WriteFileAt(save.target_path() + "/old", "old");
  save.AddFile("model.bin", {1000});
  save.Build();
  save.SealAll();
  ASSERT_TRUE(save.Run(launcher()));
  EXPECT_EQ(save.failure().code, FailureCode::kAlreadyExists);
  EXPECT_EQ(NamesIn(directory_.path()), std::vector<std::string>{"step-7"});
  EXPECT_EQ(ReadFileOf(save.target_path() + "/old"), "old");
}

TEST_P(SaveJob, ReplacesAnExistingTargetWhenAsked) {
  TestSave save(&trainer_, directory_.path());
  Prepare(&save);
  save.parameters.flags |= layout::kReplaceExisting;
  ::mkdir(save.target_path().c_str(), 0755);
  WriteFileAt(save.target_path() + "/rank-00000-of-00001.manifest.json", ManifestNaming({"old"}));
  save.parameters.older = {kManifestAttempt};
  WriteFileAt(save.target_path() + "/old", "old");
  save.AddFile("model.bin", {1000});
  save.Build();
  save.SealAll();
  ASSERT_TRUE(save.Run(launcher()));
  EXPECT_TRUE(save.failure().ok());
  EXPECT_EQ(save.Unsound(), "");
  // What it replaced is the trainer's to remove.
  const std::string hidden = RetiredName("step-7", kManifestAttempt);
  EXPECT_EQ(save.job()->completion.left_behind, hidden);
  EXPECT_EQ(NamesIn(directory_.path()), (std::vector<std::string>{hidden, "step-7"}));
  EXPECT_EQ(ReadFileOf(directory_.path() + "/" + hidden + "/old"), "old");
}

TEST_P(SaveJob, CancelRemovesEveryTrace) {
  TestSave save(&trainer_, directory_.path());
  Prepare(&save);
  save.AddFile("model.bin", {3 * uint64_t{kChunkBytes}});
  save.Build();
  TestWorker worker(launcher(), trainer_);
  save.Seal(0);
  save.StartOn(&worker);
  while (save.job()->bytes_completed.load() == 0) ::usleep(1000);
  save.job()->cancel.store(1);
  save.Ring();
  ASSERT_TRUE(save.AwaitDone());
  EXPECT_EQ(save.failure().code, FailureCode::kCancelled);
  EXPECT_TRUE(NamesIn(directory_.path()).empty());
}

TEST_P(SaveJob, StagingFailureRemovesEveryTrace) {
  TestSave save(&trainer_, directory_.path());
  Prepare(&save);
  save.AddFile("model.bin", {3 * uint64_t{kChunkBytes}});
  save.Build();
  TestWorker worker(launcher(), trainer_);
  save.Seal(0);
  save.StartOn(&worker);
  while (save.job()->bytes_completed.load() == 0) ::usleep(1000);
  save.job()->trainer_failed.store(1);
  save.Ring();
  ASSERT_TRUE(save.AwaitDone());
  EXPECT_EQ(save.failure().code, FailureCode::kAborted);
  EXPECT_EQ(save.failure().operation, Operation::kWaitTrainer);
  EXPECT_TRUE(NamesIn(directory_.path()).empty());
}

TEST_P(SaveJob, GivesUpOnATrainerThatStopsSealing) {
  TestSave save(&trainer_, directory_.path());
  Prepare(&save);
  save.parameters.time_stalled_max_ns = 100'000'000;
  save.AddFile("model.bin", {3 * uint64_t{kChunkBytes}});
  save.Build();
  save.Seal(1);
  ASSERT_TRUE(save.Run(launcher()));
  EXPECT_EQ(save.failure().code, FailureCode::kDeadlineExceeded);
  EXPECT_EQ(save.failure().operation, Operation::kWaitTrainer);
  EXPECT_TRUE(NamesIn(directory_.path()).empty());
}

TEST_P(SaveJob, FullDiskLeavesNothingBehind) {
  const std::string disk = directory_.path() + "/disk";
  ::mkdir(disk.c_str(), 0755);
  if (::mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=8m") != 0) {
    GTEST_SKIP() << "no permission to mount a tmpfs";
  }
  {
    TestSave save(&trainer_, disk);
    Prepare(&save);
    save.AddFile("small.bin", {1000});
    save.AddFile("model.bin", {5 * uint64_t{kChunkBytes}});
    save.Build();
    save.SealAll();
    TestWorker worker(launcher(), trainer_);
    save.StartOn(&worker);
    EXPECT_TRUE(save.AwaitDone());
    EXPECT_EQ(save.failure().code, FailureCode::kResourceExhausted);
    EXPECT_EQ(save.failure().error_number, ENOSPC);
    EXPECT_EQ(save.failure().file, 1u);
    EXPECT_TRUE(NamesIn(disk).empty());
    worker.Join();
  }
  EXPECT_EQ(::umount(disk.c_str()), 0);
}

TEST_P(SaveJob, FrameworkDirectoryGetsItsFilesOneByOne) {
  TestSave save(&trainer_, directory_.path());
  Prepare(&save);
  save.parameters.flags = layout::kFilesOnly;
  save.parameters.target = "iter_0000007";
  ::mkdir(save.target_path().c_str(), 0755);
  WriteFileAt(save.target_path() + "/metadata.json", "theirs");
  // Left by an attempt that was killed.
  WriteFileAt(save.target_path() + "/__0_0.distcp.tmp", "stale");
  save.AddFile("__0_0.distcp", {5'000'000});
  save.AddFile("__0_1.distcp", {77});
  save.Build();
  save.SealAll();
  ASSERT_TRUE(save.Run(launcher()));
  EXPECT_TRUE(save.failure().ok());
  EXPECT_EQ(save.Unsound(), "");
  EXPECT_EQ(ReadFileOf(save.target_path() + "/metadata.json"), "theirs");
}

INSTANTIATE_TEST_SUITE_P(All, SaveJob,
                         ::testing::Combine(testing::kEveryLauncher, testing::kEveryEngine),
                         testing::SettingName);

TEST(SaveJobLimits, FileSizeLimitIsAnErrorAndNotASignal) {
  TestDirectory directory;
  Trainer trainer(kArena);
  TestSave save(&trainer, directory.path());
  save.AddFile("model.bin", {2 * uint64_t{kChunkBytes}});
  save.Build();
  save.SealAll();
  struct rlimit before;
  ::getrlimit(RLIMIT_FSIZE, &before);
  // Inherited by the worker. The rig itself writes no file meanwhile.
  const struct rlimit limit = {.rlim_cur = 1u << 20, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  {
    TestWorker worker(Launcher::kSpawn, trainer);
    save.StartOn(&worker);
    EXPECT_TRUE(save.AwaitDone());
    EXPECT_EQ(worker.Join(), 0);
  }
  ::setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_EQ(save.failure().code, FailureCode::kResourceExhausted);
  EXPECT_EQ(save.failure().error_number, EFBIG);
  EXPECT_TRUE(NamesIn(directory.path()).empty());
}

TEST(SaveJobLimits, ByteRateIsKept) {
  TestDirectory directory;
  Trainer trainer(kArena);
  TestSave save(&trainer, directory.path());
  save.parameters.qos.bytes_per_second_max = 40 * uint64_t{kChunkBytes};
  save.AddFile("model.bin", {5 * uint64_t{kChunkBytes}});
  save.Build();
  save.SealAll();
  ASSERT_TRUE(save.Run(Launcher::kThread));
  ASSERT_TRUE(save.failure().ok());
  // The fifth chunk may start 100 ms after the first; the limit is a lower bound of the time.
  const layout::JobTimes& times = save.job()->completion.times;
  EXPECT_GE(times.last_complete - times.first_submit, 90'000'000u);
}

TEST(SaveJobLimits, ZeroExtentsWriteAManifestAlone) {
  TestDirectory directory;
  Trainer trainer(kArena);
  TestSave save(&trainer, directory.path());
  save.Build();
  ASSERT_TRUE(save.Run(Launcher::kSpawn));
  EXPECT_TRUE(save.failure().ok());
  EXPECT_EQ(save.Unsound(), "");
}

}  // namespace
}  // namespace holdfast::worker
