// A run of many saves holds no more resources at its end than at its beginning, and never more than
// its limits.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "tests/testing/child_process.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/save_test.h"
#include "tests/testing/small_file_system.h"

namespace holdfast::testing {
namespace {

constexpr uint64_t kWorkerPrivateMax = 32u << 20;

uint32_t Saves() { return std::getenv("HOLDFAST_LONG") != nullptr ? 1000 : 200; }

class SteadyResources : public LauncherTest {
 protected:
  void SetUp() override {
    LauncherTest::SetUp();
    // In memory: the counts do not depend on the disk, and a thousand fsyncs take minutes.
    auto made = SmallFileSystem::Tmpfs(256u << 20);
    if (made.ok()) file_system_ = *std::move(made);
  }
  void TearDown() override {
    file_system_.reset();
    LauncherTest::TearDown();
  }
  const std::string& where() const {
    return file_system_ != nullptr ? file_system_->path() : directory();
  }

 private:
  std::unique_ptr<SmallFileSystem> file_system_;
};
INSTANTIATE_TEST_SUITE_P(All, SteadyResources, kEveryLauncher, LauncherName);

TEST_P(SteadyResources, AreFlatOverManySaves) {
  CheckpointerOptions options = Options(where());
  options.staging.arena_bytes = 16u << 20;
  options.retention.keep_last = 1;
  const auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  const TrainingState state = TrainingState::Uniform(4, 100'000, 1);
  const uint32_t saves = Saves();
  const uint32_t warm = saves / 4;  // malloc's arenas, caches of stacks
  Holdings after_warming;
  uint64_t worker_private = 0;
  for (uint32_t i = 0; i < saves; ++i) {
    const auto report = Save(checkpointer.get(), absl::StrCat("step-", i), state, i);
    ASSERT_TRUE(report.ok()) << report.status();
    worker_private = std::max(worker_private, report->worker_private_bytes_peak);
    if (i + 1 == warm) {
      ASSERT_TRUE(checkpointer->Flush(kLong).ok());
      after_warming = Holdings::OfSelf();
    }
  }
  ASSERT_TRUE(checkpointer->Flush(kLong).ok());
  const Holdings at_end = Holdings::OfSelf();
  EXPECT_EQ(at_end.fds.size(), after_warming.fds.size());
  EXPECT_EQ(at_end.shared_mappings.size(), after_warming.shared_mappings.size());
  EXPECT_EQ(at_end.children.size(), after_warming.children.size());
  if (!kAnySanitizer) {
    EXPECT_LE(at_end.mappings, after_warming.mappings + 4);
    EXPECT_LE(at_end.resident_private_bytes, after_warming.resident_private_bytes + (2u << 20));
    EXPECT_LE(worker_private, kWorkerPrivateMax);
  }
  EXPECT_LE(at_end.resident_shared_bytes, after_warming.resident_shared_bytes + (1u << 20));
  if (!IsThread()) {
    EXPECT_GT(worker_private, 0u);
  }
  EXPECT_EQ(checkpointer->staging().control_bytes_held, 0u);
  EXPECT_THAT(Names(where()), ::testing::ElementsAre(absl::StrCat("step-", saves - 1)));
}

TEST_P(SteadyResources, ASaveOfEightArenasStaysBelowTheCap) {
  constexpr uint64_t kArena = 16u << 20;
  const uint64_t shared_before = Holdings::OfSelf().resident_shared_bytes;
  CheckpointerOptions options = Options(where());
  options.staging.arena_bytes = kArena;
  const auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> shared_peak{0};
  std::thread sampler([&] {
    while (!stop.load()) {
      shared_peak.store(std::max(shared_peak.load(), Holdings::OfSelf().resident_shared_bytes));
      absl::SleepFor(absl::Milliseconds(2));
    }
  });
  const TrainingState state = TrainingState::Uniform(9, 15'000'000, 1);
  const auto report = Save(checkpointer.get(), "large", state);
  stop.store(true);
  sampler.join();
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_GE(report->bytes, 8 * kArena);
  EXPECT_TRUE(report->streamed);
  EXPECT_TRUE(state.CompareWith(report->path).ok());
  const StagingStats stats = checkpointer->staging();
  EXPECT_EQ(stats.arena_bytes, kArena);
  EXPECT_LE(stats.bytes_held_peak, kArena);
  EXPECT_LE(report->worker_private_bytes_peak,
            kAnySanitizer ? 8 * kWorkerPrivateMax : kWorkerPrivateMax);
  // Exact to the page: only the arena and the job table are shared. A worker thread of this process
  // maps the arena once more, and the kernel counts both mappings.
  const uint64_t mappings = IsThread() ? 2 : 1;
  EXPECT_LE(shared_peak.load(),
            shared_before + mappings * (kArena + stats.control_bytes_peak + 4096));
}

/// Two ranks in one process, which keeps the handles of ended saves.
class KeptHandles : public SaveTest {
 protected:
  std::unique_ptr<Checkpointer> MakeRank(uint32_t rank) {
    CheckpointerOptions options = SmallOptions(directory());
    options.launcher = Launcher::kThread;
    options.rank = rank;
    options.world_size = 2;
    return Make(options);
  }
  static absl::StatusOr<SaveHandle> BeginRank(Checkpointer* checkpointer, uint64_t step,
                                              const AttemptId& attempt) {
    const TrainingState state = TrainingState::Uniform(1, 1000, 1);
    const std::vector<TensorSource> sources = state.Sources();
    return checkpointer->SaveAsync({.name = absl::StrCat("step-", step),
                                    .step = step,
                                    .tensors = sources,
                                    .attempt = attempt});
  }
};

TEST_F(KeptHandles, HoldNoDescriptorOfAnEndedSave) {
  const std::unique_ptr<Checkpointer> ranks[] = {MakeRank(0), MakeRank(1)};
  ASSERT_TRUE(ranks[0] != nullptr && ranks[1] != nullptr);
  std::vector<SaveHandle> kept;
  size_t fds_at_first = 0;
  constexpr uint64_t kSaves = 5;
  for (uint64_t step = 1; step <= kSaves; ++step) {
    const AttemptId attempt = NewAttemptId();
    const auto first = BeginRank(ranks[0].get(), step, attempt);
    const auto second = BeginRank(ranks[1].get(), step, attempt);
    ASSERT_TRUE(first.ok() && second.ok()) << first.status() << second.status();
    for (const SaveHandle& handle : {*first, *second}) {
      const auto report = handle.WaitDurable(kLong);
      ASSERT_TRUE(report.ok()) << report.status();
      kept.push_back(handle);
    }
    ASSERT_TRUE(ranks[0]->Flush(kLong).ok() && ranks[1]->Flush(kLong).ok());
    if (step == 1) fds_at_first = Holdings::OfSelf().fds.size();
  }
  // A thread that writes heartbeats may hold the last save's for a moment.
  EXPECT_TRUE(WaitFor([&] { return Holdings::OfSelf().fds.size() <= fds_at_first; }))
      << Holdings::OfSelf().fds.size() << " descriptors, " << fds_at_first << " after one save";
}

}  // namespace
}  // namespace holdfast::testing
