// Several callers at once: threads of one trainer, and trainers of one directory.
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "tests/testing/child_process.h"
#include "tests/testing/save_test.h"

namespace holdfast::testing {
namespace {

class Callers : public LauncherTest {};
INSTANTIATE_TEST_SUITE_P(All, Callers, kEveryLauncher, LauncherName);

TEST_P(Callers, ThreadsOfOneTrainerSaveSideBySide) {
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  constexpr int kThreads = 4;
  constexpr int kSaves = 3;
  const auto seed = [](int thread, int save) { return static_cast<uint64_t>(thread * 100 + save); };
  const auto name = [](int thread, int save) { return absl::StrCat("step-", thread, "-", save); };
  std::vector<std::thread> threads;
  std::vector<absl::Status> ended(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      for (int k = 0; k < kSaves && ended[i].ok(); ++k) {
        // Together larger than the arena.
        const TrainingState state = TrainingState::Uniform(3, 3u << 20, seed(i, k));
        ended[i] = Save(checkpointer.get(), name(i, k), state).status();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < kThreads; ++i) {
    EXPECT_TRUE(ended[i].ok()) << ended[i];
    for (int k = 0; k < kSaves; ++k) {
      const TrainingState state = TrainingState::Uniform(3, 3u << 20, seed(i, k));
      const std::string path = absl::StrCat(directory(), "/", name(i, k));
      EXPECT_TRUE(state.CompareWith(path).ok()) << state.CompareWith(path);
    }
  }
  EXPECT_LE(checkpointer->staging().bytes_held_peak, checkpointer->staging().arena_bytes);
  ExpectMemoryBack(checkpointer.get());
}

TEST_P(Callers, OneNameAtOnceIsSavedOnce) {
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  constexpr int kThreads = 4;
  std::vector<std::thread> threads;
  std::vector<absl::Status> ended(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      const TrainingState state = TrainingState::Uniform(2, 1u << 20, static_cast<uint64_t>(i));
      ended[i] = Save(checkpointer.get(), "same", state).status();
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::string path = absl::StrCat(directory(), "/same");
  int winners = 0;
  for (int i = 0; i < kThreads; ++i) {
    if (ended[i].ok()) {
      ++winners;
      EXPECT_TRUE(
          TrainingState::Uniform(2, 1u << 20, static_cast<uint64_t>(i)).CompareWith(path).ok());
    } else {
      EXPECT_TRUE(absl::IsAlreadyExists(ended[i])) << ended[i];
    }
  }
  EXPECT_EQ(winners, 1);
  ExpectMemoryBack(checkpointer.get());
  EXPECT_THAT(Names(directory()), ::testing::ElementsAre("same"));
}

TEST_P(Callers, TrainersOfOneDirectoryDoNotDisturbEachOther) {
  std::vector<std::unique_ptr<ChildProcess>> trainers;
  for (int i = 0; i < 3; ++i) {
    trainers.push_back(std::make_unique<ChildProcess>([this, i] {
      const auto checkpointer = Make(Options());
      ASSERT_NE(checkpointer, nullptr);
      const TrainingState state = TrainingState::Uniform(2, 1u << 20, static_cast<uint64_t>(i));
      const auto report = Save(checkpointer.get(), absl::StrCat("trainer-", i), state);
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_TRUE(state.CompareWith(report->path).ok());
    }));
  }
  for (const auto& trainer : trainers) EXPECT_EQ(trainer->Wait(kLong), 0);
  EXPECT_THAT(Names(directory()), ::testing::ElementsAre("trainer-0", "trainer-1", "trainer-2"));
}

}  // namespace
}  // namespace holdfast::testing
