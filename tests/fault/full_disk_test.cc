// Full disks, and files with a size limit.
#include <sys/resource.h>

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "tests/testing/child_process.h"
#include "tests/testing/save_test.h"
#include "tests/testing/small_file_system.h"

namespace holdfast::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint64_t kDiskBytes = 40u << 20;
constexpr uint64_t kTensorBytes = 4u << 20;
constexpr uint32_t kTooMany = 12;  // tensors: 48 MiB

class FullDisk : public LauncherTest {
 protected:
  /// A save too large for `disk`, staged at once (`arena_bytes` large) or streamed.
  void ExpectRefused(SmallFileSystem* disk, uint64_t arena_bytes, const std::string& operation) {
    SavePrevious(disk->path());
    CheckpointerOptions options = Options(disk->path());
    options.staging.arena_bytes = arena_bytes;
    const auto checkpointer = Make(options);
    ASSERT_NE(checkpointer, nullptr);
    const uint64_t free_before = disk->FreeBytes();
    const auto report =
        Save(checkpointer.get(), "big", TrainingState::Uniform(kTooMany, kTensorBytes, 1));
    EXPECT_TRUE(absl::IsResourceExhausted(report.status())) << report.status();
    EXPECT_THAT(Text(report.status()),
                AllOf(HasSubstr(operation), HasSubstr("big"), HasSubstr(".safetensors"),
                      HasSubstr("No space left on device")));
    ExpectMemoryBack(checkpointer.get());
    // No leaked block, except one of a directory. The kernel frees the files of a dead ring in the
    // background, and their blocks with them.
    EXPECT_TRUE(WaitFor([&] { return disk->FreeBytes() + (64u << 10) >= free_before; }))
        << disk->FreeBytes() << " bytes are free, " << free_before << " were";
    ExpectRecovered(checkpointer.get());
  }
};
INSTANTIATE_TEST_SUITE_P(All, FullDisk, kEveryLauncher, LauncherName);

constexpr uint64_t kEverythingBytes = 64u << 20;
constexpr uint64_t kStreamedBytes = 16u << 20;

TEST_P(FullDisk, FailsBeforeTheFirstWriteOnTmpfs) {
  const auto disk = SmallFileSystem::Tmpfs(kDiskBytes);
  if (!disk.ok()) GTEST_SKIP() << disk.status();
  ExpectRefused(disk->get(), kEverythingBytes, "reserve space for");
}

TEST_P(FullDisk, FailsBeforeTheFirstWriteOnExt4) {
  const auto disk = SmallFileSystem::Loop("mkfs.ext4 -q -F", "ext4", kDiskBytes);
  if (!disk.ok()) GTEST_SKIP() << disk.status();
  ExpectRefused(disk->get(), kEverythingBytes, "reserve space for");
}

TEST_P(FullDisk, FailsAStreamingSaveWithTheReason) {
  const auto disk = SmallFileSystem::Tmpfs(kDiskBytes);
  if (!disk.ok()) GTEST_SKIP() << disk.status();
  ExpectRefused(disk->get(), kStreamedBytes, "reserve space for");
}

TEST_P(FullDisk, FailsDuringTheWritesWithoutReservation) {
  // Without extents ext4 has no fallocate.
  const auto disk = SmallFileSystem::Loop("mkfs.ext4 -q -F -O ^extent,^64bit", "ext4", kDiskBytes);
  if (!disk.ok()) GTEST_SKIP() << disk.status();
  ExpectRefused(disk->get(), kEverythingBytes, "write");
}

TEST_P(FullDisk, FailsAStreamingSaveDuringItsWritesWithTheReason) {
  const auto disk = SmallFileSystem::Loop("mkfs.ext4 -q -F -O ^extent,^64bit", "ext4", kDiskBytes);
  if (!disk.ok()) GTEST_SKIP() << disk.status();
  ExpectRefused(disk->get(), kStreamedBytes, "write");
}

class FileSizeLimit : public LauncherTest {};
INSTANTIATE_TEST_SUITE_P(All, FileSizeLimit, kEveryLauncher, LauncherName);

// The signal of the limit would end the trainer.
TEST_P(FileSizeLimit, IsAnErrorAndNoDeath) {
  SavePrevious(directory());
  const ChildResult result = RunInChild([this] {
    const auto checkpointer = Make(Options());
    if (checkpointer == nullptr) return std::string();
    LimitFileSize(5u << 20);
    const auto report = Save(checkpointer.get(), "big", TrainingState::Uniform(2, 4u << 20, 1));
    EXPECT_FALSE(report.ok());
    EXPECT_THAT(Text(report.status()), AllOf(HasSubstr("big"), HasSubstr("File too large")));
    ExpectRecovered(checkpointer.get());
    return std::string();
  });
  EXPECT_EQ(result.status, 0);
}

TEST_P(FileSizeLimit, BelowTheJobTableIsAnErrorAndNoDeath) {
  SavePrevious(directory());
  const ChildResult result = RunInChild([this] {
    const auto checkpointer = Make(Options());
    if (checkpointer == nullptr) return std::string();
    LimitFileSize(1000);
    const auto report = Save(checkpointer.get(), "big", TrainingState::Uniform(2, 4u << 20, 1));
    EXPECT_TRUE(absl::IsResourceExhausted(report.status())) << report.status();
    EXPECT_THAT(Text(report.status()), AllOf(HasSubstr("big"), HasSubstr("file size limit")));
    LimitFileSize(RLIM_INFINITY);
    ExpectRecovered(checkpointer.get());
    return std::string();
  });
  EXPECT_EQ(result.status, 0);
}

TEST_P(FileSizeLimit, BelowTheArenaIsAnErrorOfCreate) {
  SavePrevious(directory());
  const ChildResult result = RunInChild([this] {
    LimitFileSize(5u << 20);
    const auto made = Checkpointer::Create(Options());
    // Memory of some kinds does not count as a file.
    if (made.ok()) return std::string("the arena of this machine is under no such limit");
    EXPECT_THAT(Text(made.status()), AllOf(HasSubstr("arena"), HasSubstr("file size limit")));
    LimitFileSize(RLIM_INFINITY);
    const auto checkpointer = Make(Options());
    if (checkpointer != nullptr) ExpectRecovered(checkpointer.get());
    return std::string();
  });
  EXPECT_TRUE(result.status == 0 || !result.skipped.empty()) << result.status;
}

}  // namespace
}  // namespace holdfast::testing
