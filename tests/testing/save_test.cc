#include "tests/testing/save_test.h"

#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "holdfast/verify.h"
#include "tests/testing/child_process.h"

namespace holdfast::testing {
namespace {

constexpr uint64_t kPreviousSeed = 77;

TrainingState PreviousState() { return TrainingState::Uniform(3, 300'000, kPreviousSeed); }

}  // namespace

void LimitFileSize(uint64_t bytes) {
  const rlimit limit = {.rlim_cur = bytes, .rlim_max = RLIM_INFINITY};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  for (const pid_t child : Holdings::OfSelf().children)
    EXPECT_EQ(prlimit(child, RLIMIT_FSIZE, &limit, nullptr), 0);
}

void SaveTest::SetUp() {
  scratch_ = std::make_unique<ScratchDirectory>();
  before_ = Holdings::OfSelf();
}

void SaveTest::TearDown() {
  // Bounded waiting: the kernel closes the last fds of a process after notifying its parent.
  std::vector<std::string> more;
  WaitFor(
      [&] {
        more = Holdings::OfSelf().Beyond(before_);
        return more.empty();
      },
      absl::Seconds(5));
  EXPECT_THAT(more, ::testing::IsEmpty()) << "left behind";
}

std::unique_ptr<Checkpointer> SaveTest::Make(const CheckpointerOptions& options) {
  auto checkpointer = Checkpointer::Create(options);
  EXPECT_TRUE(checkpointer.ok()) << checkpointer.status();
  return checkpointer.ok() ? *std::move(checkpointer) : nullptr;
}

absl::StatusOr<SaveHandle> SaveTest::Begin(Checkpointer* checkpointer, const std::string& name,
                                           const TrainingState& state, uint64_t step) {
  const std::vector<TensorSource> sources = state.Sources();
  return checkpointer->SaveAsync({.name = name, .step = step, .tensors = sources});
}

absl::StatusOr<SaveReport> SaveTest::Save(Checkpointer* checkpointer, const std::string& name,
                                          const TrainingState& state, uint64_t step) {
  const auto handle = Begin(checkpointer, name, state, step);
  if (!handle.ok()) return handle.status();
  return handle->WaitDurable(kLong);
}

void SaveTest::SavePrevious(const std::string& directory) {
  CheckpointerOptions options = SmallOptions(directory);
  options.staging.arena_bytes = 16u << 20;
  const auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  const auto report = Save(checkpointer.get(), "previous", PreviousState());
  ASSERT_TRUE(report.ok()) << report.status();
}

void SaveTest::ExpectSound(const std::string& path) {
  const auto report = Verify(path, VerifyOptions());
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->verdict, Verdict::kSound) << path << ": " << report->note;
}

std::vector<std::string> SaveTest::Names(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(directory, ignored)) {
    // Made by mkfs.
    if (entry.path().filename() != "lost+found") names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

void SaveTest::ExpectPreviousAnd(const std::string& directory,
                                 const std::vector<std::string>& others) {
  std::vector<std::string> expected = others;
  expected.emplace_back("previous");
  EXPECT_THAT(Names(directory), ::testing::UnorderedElementsAreArray(expected));
  const std::string path = absl::StrCat(directory, "/previous");
  ExpectSound(path);
  EXPECT_TRUE(PreviousState().CompareWith(path).ok()) << PreviousState().CompareWith(path);
}

void SaveTest::ExpectMemoryBack(Checkpointer* checkpointer) {
  (void)checkpointer->Flush(kLong);  // returns the failed save's status
  // A killed worker's last writes may take longer than its save's end. The control memory of a
  // quarantined save comes back behind its epoch.
  WaitFor([&] {
    const StagingStats held = checkpointer->staging();
    return held.epochs.empty() && held.control_bytes_held == 0;
  });
  const StagingStats stats = checkpointer->staging();
  EXPECT_EQ(stats.bytes_held, 0u);
  EXPECT_EQ(stats.bytes_quarantined, 0u);
  EXPECT_EQ(stats.control_bytes_held, 0u);
  EXPECT_TRUE(stats.epochs.empty());
}

void SaveTest::ExpectRecovered(Checkpointer* checkpointer) {
  ExpectMemoryBack(checkpointer);
  const std::string where = checkpointer->options().directory;
  ExpectPreviousAnd(where, {});
  const TrainingState state = TrainingState::Uniform(2, 200'000, 5);
  const auto report = Save(checkpointer, "next", state, 2);
  ASSERT_TRUE(report.ok()) << report.status();
  const std::string path = absl::StrCat(where, "/next");
  ExpectSound(path);
  EXPECT_TRUE(state.CompareWith(path).ok()) << state.CompareWith(path);
  ExpectPreviousAnd(where, {"next"});
}

}  // namespace holdfast::testing
