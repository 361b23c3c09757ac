// What every save promises, with any launcher and any engine: one suite over
// all of them.
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "holdfast/recovery.h"
#include "tests/testing/child_process.h"
#include "tests/testing/save_test.h"
#include "tests/testing/settings.h"
#include "tests/testing/slow_device.h"
#include "tests/testing/training_state.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::kLong;
using testing::SmallOptions;
using testing::TrainingState;
using ::testing::UnorderedElementsAre;

class Save : public testing::SaveTest, public ::testing::WithParamInterface<testing::Setting> {
 protected:
  void SetUp() override {
    SaveTest::SetUp();
    HOLDFAST_SKIP_WITHOUT_RING(std::get<1>(GetParam()));
  }
  CheckpointerOptions Options() {
    CheckpointerOptions options = SmallOptions(directory());
    options.launcher = std::get<0>(GetParam());
    options.engine = std::get<1>(GetParam());
    return options;
  }
  std::string PathOf(const std::string& name) const { return absl::StrCat(directory(), "/", name); }
  std::vector<std::string> Names() const { return SaveTest::Names(directory()); }
};

INSTANTIATE_TEST_SUITE_P(All, Save,
                         ::testing::Combine(testing::kEveryLauncher, testing::kEveryEngine),
                         testing::SettingName);

TEST_P(Save, WritesWhatWasThereAtTheCall) {
  auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  TrainingState state = TrainingState::Assorted(1);
  const TrainingState at_the_call = state;
  const std::vector<TensorSource> sources = state.Sources();
  auto handle = checkpointer->SaveAsync({.name = "step-1", .step = 1, .tensors = sources});
  ASSERT_TRUE(handle.ok()) << handle.status();
  state.Step(2);  // the training goes on at once
  const auto report = handle->WaitDurable(kLong);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->bytes_written, report->bytes);
  EXPECT_EQ(report->engine, std::get<1>(GetParam())) << report->engine_reason;
  EXPECT_TRUE(at_the_call.CompareWith(PathOf("step-1")).ok())
      << at_the_call.CompareWith(PathOf("step-1"));
  ExpectSound(PathOf("step-1"));
  EXPECT_THAT(Names(), ElementsAre("step-1"));
  EXPECT_EQ(checkpointer->staging().bytes_held, 0u);
  EXPECT_EQ(checkpointer->staging().control_bytes_held, 0u);
}

TEST_P(Save, StreamsThroughAnArenaAnEighthOfItsSize) {
  CheckpointerOptions options = Options();
  options.staging.arena_bytes = 16u << 20;
  auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  const TrainingState state = TrainingState::Uniform(37, 128u << 20 >> 5, 3);
  const auto report = SaveTest::Save(checkpointer.get(), "big", state);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(report->streamed);
  EXPECT_GE(report->bytes, 8 * options.staging.arena_bytes);
  EXPECT_LE(checkpointer->staging().bytes_held_peak, checkpointer->staging().arena_bytes);
  EXPECT_TRUE(state.CompareWith(PathOf("big")).ok()) << state.CompareWith(PathOf("big"));
}

// More tensors than a manifest is written for at once. The saves after the first find the structure
// of the one before, the last one does not.
TEST_P(Save, SavesManyTensorsAgainAndAgain) {
  auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  TrainingState state = TrainingState::Uniform(3000, 3000, 1);
  for (int step = 0; step < 4; ++step) {
    if (step != 0) state.Step(static_cast<uint64_t>(step));
    if (step == 3) state.tensors()[2000].name += ".renamed";
    const std::string name = absl::StrCat("step-", step);
    const auto report = SaveTest::Save(checkpointer.get(), name, state);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->tensors, 3000u);
    ExpectSound(PathOf(name));
    EXPECT_TRUE(state.CompareWith(PathOf(name)).ok()) << state.CompareWith(PathOf(name));
  }
}

TEST_P(Save, SeveralAreInFlightUnderOneCap) {
  auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  std::vector<SaveHandle> handles;
  std::vector<TrainingState> states;
  for (uint64_t i = 0; i < 6; ++i) {
    states.push_back(TrainingState::Uniform(5, 5u << 20, i));
    const std::vector<TensorSource> sources = states.back().Sources();
    auto handle =
        checkpointer->SaveAsync({.name = absl::StrCat("step-", i), .step = i, .tensors = sources});
    ASSERT_TRUE(handle.ok()) << handle.status();
    handles.push_back(*handle);
  }
  for (uint64_t i = 0; i < 6; ++i) {
    ASSERT_TRUE(handles[i].WaitDurable(kLong).ok());
    EXPECT_TRUE(states[i].CompareWith(PathOf(absl::StrCat("step-", i))).ok());
  }
  EXPECT_LE(checkpointer->staging().bytes_held_peak, checkpointer->staging().arena_bytes);
}

TEST_P(Save, RefusesAnExistingCheckpointAndReplacesItOnRequest) {
  auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  const TrainingState first = TrainingState::Uniform(3, 1u << 20, 1);
  const TrainingState second = TrainingState::Uniform(3, 1u << 20, 2);
  ASSERT_TRUE(SaveTest::Save(checkpointer.get(), "last", first).ok());
  const auto refused = SaveTest::Save(checkpointer.get(), "last", second);
  EXPECT_TRUE(absl::IsAlreadyExists(refused.status())) << refused.status();
  EXPECT_TRUE(first.CompareWith(PathOf("last")).ok());
  const std::vector<TensorSource> sources = second.Sources();
  auto handle =
      checkpointer->SaveAsync({.name = "last", .step = 2, .tensors = sources, .replace = true});
  ASSERT_TRUE(handle.ok()) << handle.status();
  const auto replaced = handle->WaitDurable(kLong);
  ASSERT_TRUE(replaced.ok()) << replaced.status();
  EXPECT_TRUE(second.CompareWith(PathOf("last")).ok());
  EXPECT_TRUE(checkpointer->Flush(kLong).ok());
  EXPECT_THAT(Names(), ElementsAre("last"));
}

TEST_P(Save, MemoryChangedAfterItsSealIsRefusedByName) {
  CheckpointerOptions options = Options();
  // What a framework's allocator does that hands a pinned block out again.
  options.on_sealed = [](const SealedExtent& extent) {
    if (extent.file_offset == kChunkBytes) static_cast<char*>(extent.memory)[100] ^= 1;
  };
  auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  const TrainingState state = TrainingState::Uniform(4, 3u << 20, 1);
  const auto report = SaveTest::Save(checkpointer.get(), "dirty", state);
  ASSERT_TRUE(absl::IsDataLoss(report.status())) << report.status();
  EXPECT_THAT(report.status().message(), HasSubstr("layer.1.weight"));
  EXPECT_THAT(report.status().message(), HasSubstr("nothing was committed"));
  EXPECT_THAT(Names(), IsEmpty());
  EXPECT_EQ(checkpointer->staging().bytes_held, 0u);
}

TEST_P(Save, KilledWorkerIsToldMemoryComesBackAndTheNextSaveWorks) {
  if (std::get<0>(GetParam()) == Launcher::kThread) GTEST_SKIP() << "a thread cannot be killed";
  CheckpointerOptions options = Options();
  options.qos.bytes_per_second_max = 8u << 20;  // slow enough to be killed inside
  auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  const TrainingState state = TrainingState::Uniform(4, 8u << 20, 1);
  const std::vector<TensorSource> sources = state.Sources();
  auto handle = checkpointer->SaveAsync({.name = "killed", .step = 1, .tensors = sources});
  ASSERT_TRUE(handle.ok()) << handle.status();
  while (handle->progress().bytes_written == 0) absl::SleepFor(absl::Milliseconds(5));
  const pid_t worker = handle->worker_pid();
  ASSERT_GT(worker, 0);
  ASSERT_TRUE(testing::SendSignal(worker, SIGKILL));
  const auto report = handle->WaitDurable(kLong);
  // The end of the process itself wakes the supervisor: no time-out has passed.
  ASSERT_TRUE(absl::IsAborted(report.status())) << report.status();
  EXPECT_THAT(report.status().message(), HasSubstr("signal 9"));
  EXPECT_TRUE(checkpointer->Flush(kLong).ok());
  EXPECT_THAT(Names(), IsEmpty());
  EXPECT_EQ(checkpointer->staging().bytes_held, 0u);
  const TrainingState small = TrainingState::Uniform(2, 1u << 20, 2);
  const auto next = SaveTest::Save(checkpointer.get(), "next", small);
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_TRUE(small.CompareWith(PathOf("next")).ok());
}

TEST_P(Save, CancelRemovesItsFiles) {
  CheckpointerOptions options = Options();
  options.qos.bytes_per_second_max = 4u << 20;
  auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  const TrainingState state = TrainingState::Uniform(4, 8u << 20, 1);
  const std::vector<TensorSource> sources = state.Sources();
  auto handle = checkpointer->SaveAsync({.name = "cancelled", .step = 1, .tensors = sources});
  ASSERT_TRUE(handle.ok()) << handle.status();
  ASSERT_TRUE(handle->Cancel().ok());
  const auto report = handle->WaitDurable(kLong);
  EXPECT_TRUE(absl::IsCancelled(report.status())) << report.status();
  EXPECT_THAT(Names(), IsEmpty());
  EXPECT_EQ(checkpointer->staging().bytes_held, 0u);
}

TEST_P(Save, RetentionKeepsTheNewestAndEveryKth) {
  CheckpointerOptions options = Options();
  options.retention = {.keep_last = 2, .keep_every = 4};
  auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  const TrainingState state = TrainingState::Uniform(2, 1u << 20, 1);
  for (uint64_t step = 1; step <= 7; ++step) {
    ASSERT_TRUE(SaveTest::Save(checkpointer.get(), absl::StrCat("step-", step), state, step).ok());
  }
  ASSERT_TRUE(checkpointer->Flush(kLong).ok());
  EXPECT_THAT(Names(), UnorderedElementsAre("step-4", "step-6", "step-7"));
  // A run that was rolled back: the saves are the newest, though the steps are the lowest.
  ASSERT_TRUE(SaveTest::Save(checkpointer.get(), "step-2", state, 2).ok());
  ASSERT_TRUE(checkpointer->Flush(kLong).ok());
  EXPECT_THAT(Names(), UnorderedElementsAre("step-2", "step-4", "step-7"));
}

TEST_P(Save, DeviceTensorsAreStagedBehindTheCall) {
  testing::SlowDevice device;
  std::jthread completer([&device](const std::stop_token& stop) {
    for (uint64_t seed = 0; !stop.stop_requested(); ++seed) {
      device.CompleteAllShuffled(seed);
      absl::SleepFor(absl::Milliseconds(1));
    }
  });
  auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  const TrainingState state = TrainingState::Assorted(5);
  std::vector<TensorSource> sources = state.Sources();
  for (size_t i = 0; i < sources.size(); ++i) {
    if (i % 3 == 0 || sources[i].bytes == 0) continue;  // a mixture, also inside a chunk
    char* memory = device.Allocate(sources[i].bytes);
    memcpy(memory, sources[i].data, sources[i].bytes);
    sources[i].data = memory;
    sources[i].device = &device;
  }
  auto handle = checkpointer->SaveAsync({.name = "device", .step = 1, .tensors = sources});
  ASSERT_TRUE(handle.ok()) << handle.status();
  ASSERT_TRUE(handle->WaitStagedOn(&device, nullptr).ok());
  ASSERT_TRUE(handle->WaitStaged(kLong).ok());
  const auto report = handle->WaitDurable(kLong);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(state.CompareWith(PathOf("device")).ok()) << state.CompareWith(PathOf("device"));
}

TEST_P(Save, ReadBackAgreesWithTheSeal) {
  CheckpointerOptions options = Options();
  options.read_back = true;
  options.fused_copy = true;
  options.second_look = true;
  auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  const TrainingState state = TrainingState::Assorted(6);
  const auto report = SaveTest::Save(checkpointer.get(), "read-back", state);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(state.CompareWith(PathOf("read-back")).ok());
}

TEST_P(Save, ChangedWorkingDirectoryDoesNotMoveTheCheckpoint) {
  auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  const std::filesystem::path before = std::filesystem::current_path();
  testing::ScratchDirectory elsewhere;
  std::filesystem::current_path(elsewhere.path());
  const TrainingState state = TrainingState::Uniform(2, 1u << 20, 1);
  const auto report = SaveTest::Save(checkpointer.get(), "here", state);
  std::filesystem::current_path(before);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_THAT(Names(), ElementsAre("here"));
}

}  // namespace
}  // namespace holdfast
