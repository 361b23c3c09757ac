// Proof that the streaming tests can fail: a worker that releases bytes when their write is
// submitted is caught by its own re-digest when a hostile trainer refills them at once.
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "gtest/gtest.h"
#include "runtime/sys/system.h"
#include "runtime/worker/planted_bugs.h"
#include "tests/unit/worker/worker_rig.h"

namespace holdfast::worker {
namespace {

std::atomic<bool> g_hold_until_refilled{false};

// The disk is slow, the trainer is fast: writing starts only once the memory was refilled.
ssize_t PwriteAfterRefill(int fd, const void* buffer, size_t bytes, off_t offset) {
  const volatile char* const memory = static_cast<const char*>(buffer);
  const bool hold = g_hold_until_refilled && bytes == kChunkBytes && offset == 0;
  while (hold && memory[0] != 'x') ::usleep(500);
  return sys::kKernel.pwrite(fd, buffer, bytes, offset);
}

Failure SaveUnderAHostileTrainer(bool bug) {
  TestDirectory directory;
  Trainer trainer(4 * uint64_t{kChunkBytes});
  TestSave save(&trainer, directory.path());
  save.parameters.streams = true;
  save.parameters.engine = EngineRung::kPwrite;
  save.parameters.pwrite_threads = 1;
  save.AddFile("model.bin", {2 * uint64_t{kChunkBytes}});
  save.Build();
  testing::g_acknowledge_at_submit = bug;
  g_hold_until_refilled = bug;
  sys::g_system.pwrite = PwriteAfterRefill;
  {
    TestWorker worker(Launcher::kThread, trainer);
    save.Seal(0);
    save.StartOn(&worker);
    layout::LogReader acknowledged(
        layout::At<layout::SharedU32>(save.job(), save.job()->acknowledged), 2);
    uint32_t freed = 0;
    for (int i = 0; i < 10'000 && !acknowledged.Next(&freed); ++i) ::usleep(500);
    std::memset(save.Memory(freed), 'x', kChunkBytes);
    save.Seal(1);
    save.Ring();
    EXPECT_TRUE(save.AwaitDone());
  }
  sys::g_system = sys::kKernel;
  testing::g_acknowledge_at_submit = false;
  g_hold_until_refilled = false;
  if (!bug) {
    EXPECT_EQ(save.Unsound(), "");
  }
  return save.failure();
}

TEST(PlantedBug, ReleaseAtSubmitIsCaughtAndNamesTheChunk) {
  const Failure failure = SaveUnderAHostileTrainer(true);
  EXPECT_EQ(failure.code, FailureCode::kDataLoss);
  EXPECT_EQ(failure.tensor, 0u);
  EXPECT_EQ(failure.offset, 0u);
}

TEST(PlantedBug, WithoutItTheSameTrainerDoesNoHarm) {
  EXPECT_TRUE(SaveUnderAHostileTrainer(false).ok());
}

}  // namespace
}  // namespace holdfast::worker
