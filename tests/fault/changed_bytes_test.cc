// Bytes that change without notice: in the source during the copy, and on the disk after the write.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "tests/testing/child_process.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/save_test.h"

namespace holdfast::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class ChangedBytes : public LauncherTest {};
INSTANTIATE_TEST_SUITE_P(All, ChangedBytes, kEveryLauncher, LauncherName);

TEST_P(ChangedBytes, TornCopyIsFoundByTheSecondLook) {
  if (kThreadSanitizer) GTEST_SKIP() << "the race is the test's subject";
  SavePrevious(directory());
  for (const bool fused : {false, true}) {
    SCOPED_TRACE(fused ? "fused" : "plain");
    CheckpointerOptions options = Options();
    options.second_look = true;
    options.fused_copy = fused;
    const auto checkpointer = Make(options);
    ASSERT_NE(checkpointer, nullptr);
    TrainingState state = TrainingState::Uniform(1, 12u << 20, 1);
    std::vector<char>& bytes = state.tensors()[0].bytes;
    std::atomic<bool> stop{false};
    std::thread mutator([&] {
      // A trainer that does not wait for the call: changes a byte per page, all the time.
      constexpr size_t kStep = 4096;
      for (char value = 1; !stop.load(std::memory_order_relaxed); ++value) {
        for (size_t i = 0; i < bytes.size(); i += kStep)
          reinterpret_cast<std::atomic<char>*>(&bytes[i])->store(value, std::memory_order_relaxed);
      }
    });
    absl::Status found;
    // On few CPUs the threads may take turns for a while.
    const absl::Time deadline = absl::Now() + absl::Seconds(60);
    while (found.ok() && absl::Now() < deadline) {
      found = Save(checkpointer.get(), "torn", state).status();
      std::filesystem::remove_all(absl::StrCat(directory(), "/torn"));
    }
    stop.store(true);
    mutator.join();
    EXPECT_TRUE(absl::IsDataLoss(found)) << found;
    EXPECT_THAT(Text(found), AllOf(HasSubstr("layer.0.weight"), HasSubstr("torn"),
                                   HasSubstr("changed while it was being copied")));
    ExpectRecovered(checkpointer.get());
    std::filesystem::remove_all(absl::StrCat(directory(), "/next"));
  }
}

/// Returns the file below `partial` with a name in ".safetensors.tmp".
std::string FindTemporary(const std::string& directory) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory, ignored)) {
    if (absl::EndsWith(entry.path().string(), ".safetensors.tmp")) return entry.path();
  }
  return "";
}

TEST_P(ChangedBytes, FileOverwrittenBehindTheWorkerIsFoundByReadBack) {
  SavePrevious(directory());
  CheckpointerOptions options = Options();
  options.read_back = true;
  options.qos.bytes_per_second_max = 16u << 20;
  const auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  const auto handle =
      Begin(checkpointer.get(), "overwritten", TrainingState::Uniform(3, 4u << 20, 1));
  ASSERT_TRUE(handle.ok()) << handle.status();
  // Chunks are written in the order of sealing, so any two of the three may be on disk; the worker
  // has compared their memory with the seal already.
  ASSERT_TRUE(WaitFor([&] { return handle->progress().bytes_written >= 2 * kChunkBytes; }));
  const int fd = open(FindTemporary(directory()).c_str(), O_WRONLY | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  for (off_t at = 1 << 20; at < 3 * static_cast<off_t>(kChunkBytes); at += kChunkBytes) {
    EXPECT_EQ(pwrite(fd, "somebody else's", 15, at), 15);
  }
  EXPECT_EQ(fsync(fd), 0);
  close(fd);
  const auto report = handle->WaitDurable(kLong);
  EXPECT_TRUE(absl::IsDataLoss(report.status())) << report.status();
  EXPECT_THAT(Text(report.status()),
              AllOf(HasSubstr("layer."), HasSubstr(".safetensors"), HasSubstr("bytes ["),
                    HasSubstr("nothing was committed")));
  ExpectRecovered(checkpointer.get());
}

}  // namespace
}  // namespace holdfast::testing
