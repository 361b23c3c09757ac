// A failing fsync, and what the kernel does then: the kernel drops the unwritten pages, and says
// success when it is asked again. Only new files can hold the bytes.
#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <string>

#include "gtest/gtest.h"
#include "runtime/sys/system.h"
#include "tests/testing/path_of.h"
#include "tests/testing/settings.h"
#include "tests/unit/worker/worker_rig.h"

namespace holdfast::worker {
namespace {

constexpr uint64_t kArena = 16ull << 20;

bool IsData(int fd) { return testing::PathOf(fd).ends_with(".bin.tmp"); }

// The fsync of which file, counted from 1, fails; 0: none of a file. And which of a directory or
// manifest.
std::atomic<int> g_data_fails_at{0};
std::atomic<int> g_other_fails_at{0};
std::atomic<int> g_data_fsyncs{0};
std::atomic<int> g_other_fsyncs{0};
std::atomic<bool> g_always{false};

int FailingFsync(int fd) {
  const bool data = IsData(fd);
  const int count = data ? ++g_data_fsyncs : ++g_other_fsyncs;
  const int fails_at = data ? g_data_fails_at : g_other_fails_at;
  if (fails_at == 0 || (g_always ? count < fails_at : count != fails_at)) {
    return sys::kKernel.fsync(fd);
  }
  if (data) {
    struct stat status = {};
    EXPECT_EQ(::fstat(fd, &status), 0);
    EXPECT_EQ(::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                          status.st_size + kIoAlignment),
              0);
  }
  errno = EIO;
  return -1;
}

struct FailedFsync : ::testing::TestWithParam<EngineRung> {
  FailedFsync() {
    g_data_fails_at = g_other_fails_at = g_data_fsyncs = g_other_fsyncs = 0;
    g_always = false;
    sys::g_system = sys::kKernel;
    sys::g_system.fsync = FailingFsync;
  }
  ~FailedFsync() override { sys::g_system = sys::kKernel; }
  void SetUp() override { HOLDFAST_SKIP_WITHOUT_RING(GetParam()); }

  void Prepare(TestSave* save) {
    save->parameters.engine = GetParam();
    save->AddFile("a.bin", {uint64_t{kChunkBytes} + 5}, 100);
    save->AddFile("empty.bin", {});
    save->AddFile("b.bin", {9});
  }
  uint32_t Attempts(const TestSave& save) { return save.job()->completion.figures.write_attempts; }

  Trainer trainer{kArena};
  TestDirectory directory;
};
INSTANTIATE_TEST_SUITE_P(Engines, FailedFsync,
                         ::testing::Values(EngineRung::kUring, EngineRung::kPwrite),
                         testing::EngineName);

TEST_P(FailedFsync, EverythingIsWrittenOnceMoreIntoNewFiles) {
  for (int n = 1; n <= 3; ++n) {
    SCOPED_TRACE(n);
    const TestDirectory below;
    TestSave save(&trainer, below.path());
    Prepare(&save);
    save.Build();
    save.SealAll();
    g_data_fsyncs = 0;
    g_data_fails_at = n;
    ASSERT_TRUE(save.Run(Launcher::kThread));
    EXPECT_TRUE(save.failure().ok());
    EXPECT_EQ(save.Unsound(), "");
    EXPECT_EQ(Attempts(save), 2u);
    EXPECT_EQ(g_data_fsyncs, n + 3);
    EXPECT_EQ(save.job()->completion.figures.bytes_written, uint64_t{kChunkBytes} + 5 + 100 + 9);
  }
}

TEST_P(FailedFsync, ASecondFailureEndsTheSave) {
  TestSave save(&trainer, directory.path());
  Prepare(&save);
  save.Build();
  save.SealAll();
  g_data_fails_at = 2;
  g_always = true;
  ASSERT_TRUE(save.Run(Launcher::kThread));
  EXPECT_EQ(save.failure().code, FailureCode::kDataLoss);
  EXPECT_EQ(save.failure().operation, Operation::kSync);
  EXPECT_EQ(save.failure().error_number, EIO);
  EXPECT_EQ(Attempts(save), 2u);
  EXPECT_TRUE(NamesIn(directory.path()).empty());
}

std::atomic<int> g_unlinks_that_fail{0};

int FailingUnlink(int directory, const char* name, int flags) {
  if (g_unlinks_that_fail-- <= 0) return sys::kKernel.unlinkat(directory, name, flags);
  errno = EIO;
  return -1;
}

TEST_P(FailedFsync, OfAFileThatCannotBeRemovedEndsTheSave) {
  TestSave save(&trainer, directory.path());
  Prepare(&save);
  save.Build();
  save.SealAll();
  g_data_fails_at = 2;
  g_unlinks_that_fail = 1;
  sys::g_system.unlinkat = FailingUnlink;
  ASSERT_TRUE(save.Run(Launcher::kThread));
  EXPECT_EQ(save.failure().code, FailureCode::kDataLoss);
  EXPECT_EQ(save.failure().operation, Operation::kSync);
  EXPECT_EQ(Attempts(save), 1u);
  EXPECT_TRUE(NamesIn(directory.path()).empty());
}

TEST_P(FailedFsync, WithMoreFilesThanAreOpenAtOnceAndNotYetAllSealed) {
  constexpr uint32_t kFiles = 100;
  constexpr uint32_t kSealedFirst = 80;
  Trainer large(uint64_t{kFiles} * kIoAlignment);
  TestSave save(&large, directory.path());
  save.parameters.engine = GetParam();
  for (uint32_t i = 0; i < kFiles; ++i) save.AddFile(std::to_string(i) + ".bin", {1000 + i});
  save.Build();
  for (uint32_t i = 0; i < kSealedFirst; ++i) save.Seal(i);
  g_data_fails_at = 10;  // One that must make room for the 74th, while extents are still to come.
  TestWorker worker(Launcher::kThread, large);
  save.StartOn(&worker);
  while (g_data_fsyncs < 10) ::usleep(200);
  for (uint32_t i = kSealedFirst; i < kFiles; ++i) save.Seal(i);
  save.Ring();
  ASSERT_TRUE(save.AwaitDone());
  worker.Join();
  EXPECT_TRUE(save.failure().ok());
  EXPECT_EQ(save.Unsound(), "");
  EXPECT_EQ(Attempts(save), 2u);
}

TEST_P(FailedFsync, OfADirectoryOrManifestEndsTheSave) {
  // The parent, the names, the manifest's file, its name.
  for (int n = 1; n <= 4; ++n) {
    SCOPED_TRACE(n);
    TestSave save(&trainer, directory.path());
    Prepare(&save);
    save.Build();
    save.SealAll();
    g_other_fsyncs = 0;
    g_other_fails_at = n;
    ASSERT_TRUE(save.Run(Launcher::kThread));
    EXPECT_EQ(save.failure().code, FailureCode::kDataLoss);
    EXPECT_EQ(save.failure().error_number, EIO);
    EXPECT_LE(Attempts(save), 1u);
    EXPECT_TRUE(NamesIn(directory.path()).empty());
  }
}

TEST_P(FailedFsync, ASaveThatStreamsHasNothingToWriteAgain) {
  TestSave save(&trainer, directory.path());
  Prepare(&save);
  save.parameters.streams = true;
  save.Build();
  for (uint32_t i = 0; i < save.extent_count(); ++i) {
    save.Stage(i, i * uint64_t{kChunkBytes});
    save.Seal(i);
  }
  g_data_fails_at = 1;
  ASSERT_TRUE(save.Run(Launcher::kThread));
  EXPECT_EQ(save.failure().operation, Operation::kSync);
  EXPECT_EQ(Attempts(save), 1u);
  EXPECT_TRUE(NamesIn(directory.path()).empty());
}

}  // namespace
}  // namespace holdfast::worker
