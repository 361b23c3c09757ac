// Saves of plans that have places for checksums: what stands in the file agrees with zlib, and with
// the manifest, for host and device tensors, larger than the arena or not.
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "tests/testing/checkpoint_files.h"
#include "tests/testing/framed_plan.h"
#include "tests/testing/save_test.h"
#include "tests/testing/slow_device.h"

namespace holdfast::testing {
namespace {

constexpr uint64_t kChunk = kChunkBytes;

class FramedSave : public LauncherTest {
 protected:
  /// Tensor i is on the device if `on_device(i)`.
  template <typename OnDevice>
  void Place(const TrainingState& state, OnDevice on_device) {
    sources_ = state.Sources();
    for (size_t i = 0; i < sources_.size(); ++i) {
      if (!on_device(i) || sources_[i].bytes == 0) continue;
      char* memory = device_.Allocate(sources_[i].bytes);
      std::memcpy(memory, sources_[i].data, sources_[i].bytes);
      sources_[i].data = memory;
      sources_[i].device = &device_;
    }
  }

  /// Saves `sources_`, and looks at everything that came of it.
  void ExpectSavedRight(const CheckpointerOptions& options, const TrainingState& state,
                        const Framing& framing, bool streamed) {
    const SavePlan plan = FramedPlan(sources_, framing);
    const auto checkpointer = Make(options);
    ASSERT_NE(checkpointer, nullptr);
    device_.StartCompleter(3);
    const auto handle = checkpointer->SaveAsync({.name = "framed", .step = 1, .plan = &plan});
    ASSERT_TRUE(handle.ok()) << handle.status();
    const auto report = handle->WaitDurable(kLong);
    device_.StopCompleter();
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->streamed, streamed);
    const std::string path = absl::StrCat(options.directory, "/framed");
    ExpectSound(path);
    EXPECT_EQ(WrongFraming(plan, plan.files[0], ReadFileBytes(path + "/data.zip")), "");
    EXPECT_TRUE(state.CompareWith(path).ok()) << state.CompareWith(path);
    ExpectMemoryBack(checkpointer.get());
  }

  SlowDevice device_;
  std::vector<TensorSource> sources_;
};

INSTANTIATE_TEST_SUITE_P(Launchers, FramedSave, kEveryLauncher, LauncherName);

TEST_P(FramedSave, OfHostTensors) {
  const TrainingState state = TrainingState::Uniform(7, 3'000'000, 1);
  Place(state, [](size_t) { return false; });
  ExpectSavedRight(Options(), state, {}, /*streamed=*/false);
}

TEST_P(FramedSave, OfDeviceTensors) {
  const TrainingState state = TrainingState::Uniform(7, 3'000'000, 2);
  Place(state, [](size_t) { return true; });
  ExpectSavedRight(Options(), state, {}, /*streamed=*/false);
}

TEST_P(FramedSave, OfBothWithFusedCopiesAndAReadBack) {
  const TrainingState state = TrainingState::Uniform(9, 2'500'000, 3);
  Place(state, [](size_t i) { return i % 2 == 1; });
  CheckpointerOptions options = Options();
  options.fused_copy = true;
  options.second_look = true;
  options.read_back = true;
  ExpectSavedRight(options, state, {}, /*streamed=*/false);
}

TEST_P(FramedSave, OfHostTensorsLargerThanTheArena) {
  const TrainingState state = TrainingState::Uniform(8, 5'000'000, 4);
  Place(state, [](size_t) { return false; });
  CheckpointerOptions options = Options();
  options.staging.arena_bytes = 16u << 20;
  ExpectSavedRight(options, state, {}, /*streamed=*/true);
}

TEST_P(FramedSave, OfDeviceTensorsLargerThanTheArena) {
  const TrainingState state = TrainingState::Uniform(8, 5'000'000, 5);
  Place(state, [](size_t) { return true; });
  CheckpointerOptions options = Options();
  options.staging.arena_bytes = 16u << 20;
  // A directory larger than the arena, which waits for the tensors as a whole.
  ExpectSavedRight(options, state, {.directory_bytes = 2'500'000}, /*streamed=*/true);
}

// Host extents that hold memory until an earlier device tensor is there, more extents than the
// arena has room for: every second extent is a host tensor's, with the place of the device tensor
// that ends right before it.
TEST_P(FramedSave, OfHostExtentsThatWaitForDeviceTensorsAndFillTheArena) {
  constexpr uint32_t kPairs = 8;
  TrainingState state = TrainingState::Uniform(2 * kPairs, kChunk, 6);
  for (size_t i = 0; i < state.tensors().size(); ++i) {
    TrainingState::Tensor& tensor = state.tensors()[i];
    const uint64_t bytes = i % 2 == 0 ? 2 * kChunk : kChunk / 2;
    tensor.bytes.resize(bytes, static_cast<char>('a' + i));
    tensor.shape = {static_cast<int64_t>(bytes / 4)};
  }
  Place(state, [](size_t i) { return i % 2 == 0; });
  CheckpointerOptions options = Options();
  options.staging.arena_bytes = 16u << 20;
  options.time_memory_max = absl::Seconds(20);
  // Periods of three chunks: two of a device tensor, one with its place and a host tensor.
  ExpectSavedRight(options, state, {.alignment = kChunk / 4}, /*streamed=*/true);
}

}  // namespace
}  // namespace holdfast::testing
