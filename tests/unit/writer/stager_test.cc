// Whose thread stages what, and in which order memory is taken for it: seen from outside, through
// saves whose device copies end when the test says so.

#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "tests/testing/save_test.h"
#include "tests/testing/slow_device.h"

namespace holdfast::testing {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kChunk = kChunkBytes;

class StagerTest : public SaveTest {
 protected:
  CheckpointerOptions Options() const {
    CheckpointerOptions options = SmallOptions(directory());
    options.staging.arena_bytes = 4 * kChunk;
    options.time_memory_max = absl::Seconds(20);
    return options;
  }

  std::vector<TensorSource> Place(const TrainingState& state,
                                  const std::function<bool(size_t)>& on_device) {
    std::vector<TensorSource> sources = state.Sources();
    for (size_t i = 0; i < sources.size(); ++i) {
      if (!on_device(i)) continue;
      char* memory = device_.Allocate(sources[i].bytes);
      std::memcpy(memory, sources[i].data, sources[i].bytes);
      sources[i].data = memory;
      sources[i].device = &device_;
    }
    return sources;
  }

  void ExpectSaved(const std::string& name, const TrainingState& state) {
    const std::string path = absl::StrCat(directory(), "/", name);
    ExpectSound(path);
    EXPECT_TRUE(state.CompareWith(path).ok()) << state.CompareWith(path);
  }

  SlowDevice device_;
};

// Every extent has a part of a host tensor and a part of a device tensor: the caller leases them
// all, and only the device thread can make room for the next.
TEST_F(StagerTest, AlternatingHostAndDeviceTensorsLargerThanTheArenaAreSaved) {
  const TrainingState state = TrainingState::Uniform(24, 3'000'000, 1);
  const std::vector<TensorSource> sources = Place(state, [](size_t i) { return i % 2 == 1; });
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  device_.StartCompleter(1);
  const auto handle = checkpointer->SaveAsync({.name = "mixed", .step = 1, .tensors = sources});
  ASSERT_TRUE(handle.ok()) << handle.status();
  const auto report = handle->WaitDurable(kLong);
  device_.StopCompleter();
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(report->streamed);
  ExpectSaved("mixed", state);
  ExpectMemoryBack(checkpointer.get());
}

// Long tensors of both kinds: extents of the caller's alone, of the device thread's alone, and
// mixed ones.
TEST_F(StagerTest, LongHostAndDeviceTensorsLargerThanTheArenaAreSaved) {
  const TrainingState state = TrainingState::Uniform(8, 3 * kChunk + 777, 2);
  for (const bool device_first : {false, true}) {
    const std::vector<TensorSource> sources =
        Place(state, [=](size_t i) { return (i % 2 == 0) == device_first; });
    const auto checkpointer = Make(Options());
    ASSERT_NE(checkpointer, nullptr);
    device_.StartCompleter(2);
    const std::string name = absl::StrCat("long-", device_first);
    const auto handle = checkpointer->SaveAsync({.name = name, .step = 1, .tensors = sources});
    ASSERT_TRUE(handle.ok()) << handle.status();
    const auto report = handle->WaitDurable(kLong);
    device_.StopCompleter();
    ASSERT_TRUE(report.ok()) << report.status();
    ExpectSaved(name, state);
  }
}

TEST_F(StagerTest, AnExtentOfAHeaderAndADeviceTensorIsLeftToTheDeviceThread) {
  // The arena is held by a save whose copies do not end.
  const TrainingState first = TrainingState::Uniform(1, 4 * kChunk - 8192, 3);
  const std::vector<TensorSource> first_sources = Place(first, [](size_t) { return true; });
  const TrainingState second = TrainingState::Uniform(1, 100'000, 4);
  const std::vector<TensorSource> second_sources = Place(second, [](size_t) { return true; });
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  const auto holder =
      checkpointer->SaveAsync({.name = "first", .step = 1, .tensors = first_sources});
  ASSERT_TRUE(holder.ok()) << holder.status();
  ASSERT_TRUE(device_.WaitForPending(4, kLong));
  // Its header is not copied by the caller, so the call does not wait for memory.
  const auto waiting =
      checkpointer->SaveAsync({.name = "second", .step = 2, .tensors = second_sources});
  ASSERT_TRUE(waiting.ok()) << waiting.status();
  EXPECT_FALSE(waiting->WaitStaged(absl::ZeroDuration()).ok());
  EXPECT_EQ(device_.pending().size(), 4u);
  device_.StartCompleter(5);
  EXPECT_TRUE(holder->WaitDurable(kLong).ok());
  EXPECT_TRUE(waiting->WaitDurable(kLong).ok());
  device_.StopCompleter();
  ExpectSaved("first", first);
  ExpectSaved("second", second);
}

// The older save's caller waits for memory that the younger one holds, whose copies are behind
// those of the older: nobody may wait for a single save.
TEST_F(StagerTest, SavesOfSeveralThreadsShareTheArenaAndTheDevice) {
  constexpr int kSaves = 4;
  std::vector<TrainingState> states;
  std::vector<std::vector<TensorSource>> sources;
  for (int i = 0; i < kSaves; ++i) {
    states.push_back(TrainingState::Uniform(10, 3'000'000, 10 + static_cast<uint64_t>(i)));
    sources.push_back(Place(states.back(), [i](size_t t) { return (t + i) % 3 != 0; }));
  }
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  device_.StartCompleter(6);
  std::vector<absl::Status> results(kSaves);
  std::vector<std::thread> callers;
  for (int i = 0; i < kSaves; ++i) {
    callers.emplace_back([&, i] {
      const auto handle = checkpointer->SaveAsync(
          {.name = absl::StrCat("save-", i), .step = 1, .tensors = sources[i]});
      results[i] = handle.ok() ? handle->WaitDurable(kLong).status() : handle.status();
    });
  }
  for (std::thread& caller : callers) caller.join();
  device_.StopCompleter();
  for (int i = 0; i < kSaves; ++i) {
    EXPECT_TRUE(results[i].ok()) << results[i];
    ExpectSaved(absl::StrCat("save-", i), states[i]);
  }
  ExpectMemoryBack(checkpointer.get());
}

TEST_F(StagerTest, AFailedCopyOfOneSaveLeavesTheOthersAlone) {
  const TrainingState good = TrainingState::Uniform(2, kChunk / 2, 7);
  const TrainingState bad = TrainingState::Uniform(2, kChunk / 2, 8);
  const std::vector<TensorSource> good_sources = Place(good, [](size_t i) { return i == 1; });
  const std::vector<TensorSource> bad_sources = Place(bad, [](size_t i) { return i == 1; });
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  const auto failing = checkpointer->SaveAsync({.name = "bad", .step = 1, .tensors = bad_sources});
  ASSERT_TRUE(failing.ok()) << failing.status();
  const auto working =
      checkpointer->SaveAsync({.name = "good", .step = 2, .tensors = good_sources});
  ASSERT_TRUE(working.ok()) << working.status();
  ASSERT_TRUE(device_.WaitForPending(1, kLong));
  const auto is_bad = [&](const SlowDevice::PendingCopy& copy) {
    const char* data = static_cast<const char*>(bad_sources[1].data);
    return copy.source >= data && copy.source < data + bad_sources[1].bytes;
  };
  std::vector<SlowDevice::PendingCopy> pending = device_.pending();
  const auto found = std::find_if(pending.begin(), pending.end(), is_bad);
  ASSERT_NE(found, pending.end());
  device_.Fail(found->ticket, absl::InternalError("planned"));
  device_.StartCompleter(9);
  const auto failed = failing->WaitDurable(kLong);
  EXPECT_THAT(std::string(failed.status().message()), HasSubstr("planned"));
  EXPECT_TRUE(working->WaitDurable(kLong).ok());
  device_.StopCompleter();
  ExpectSaved("good", good);
  ExpectMemoryBack(checkpointer.get());
}

TEST_F(StagerTest, WaitingForMemoryInVainEndsWithItsReason) {
  CheckpointerOptions options = Options();
  options.time_memory_max = absl::Milliseconds(100);
  const TrainingState first = TrainingState::Uniform(1, 4 * kChunk - 8192, 3);
  const std::vector<TensorSource> first_sources = Place(first, [](size_t) { return true; });
  const TrainingState small = TrainingState::Uniform(1, 100'000, 4);
  const auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  const auto holder =
      checkpointer->SaveAsync({.name = "holder", .step = 1, .tensors = first_sources});
  ASSERT_TRUE(holder.ok()) << holder.status();
  ASSERT_TRUE(device_.WaitForPending(4, kLong));
  // By the caller's thread.
  const std::vector<TensorSource> host = small.Sources();
  const auto refused = checkpointer->SaveAsync({.name = "host", .step = 2, .tensors = host});
  EXPECT_TRUE(absl::IsDeadlineExceeded(refused.status())) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("wait for staging memory"));
  device_.StartCompleter(5);
  EXPECT_TRUE(holder->WaitDurable(kLong).ok());
  device_.StopCompleter();
  ExpectMemoryBack(checkpointer.get());
}

// Device copies run while the trainer goes on. What they captured is durable only once the trainer
// has checked that no source changed meanwhile.
TEST_F(StagerTest, SaveWithConfirmIsDurableOnlyAfterIt) {
  const TrainingState state = TrainingState::Uniform(4, 300'000, 1);
  const std::vector<TensorSource> sources = Place(state, [](size_t i) { return i > 1; });
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  device_.CompleteAtOnce(true);
  for (const std::string name : {"confirmed", "refused"}) {
    const auto save =
        checkpointer->SaveAsync({.name = name, .step = 1, .tensors = sources, .confirm = true});
    ASSERT_TRUE(save.ok()) << save.status();
    ASSERT_TRUE(save->WaitStaged(kLong).ok());
    EXPECT_TRUE(absl::IsDeadlineExceeded(save->WaitDurable(absl::Milliseconds(300)).status()));
    EXPECT_FALSE(std::filesystem::exists(absl::StrCat(directory(), "/", name)));
    const bool refused = name == "refused";
    const absl::Status capture =
        refused ? absl::DataLossError("tensor w changed before its copy") : absl::OkStatus();
    ASSERT_TRUE(save->Confirm(capture).ok());
    const auto report = save->WaitDurable(kLong);
    EXPECT_EQ(report.status().code(), capture.code());
    EXPECT_THAT(std::string(report.status().message()), HasSubstr(std::string(capture.message())));
    EXPECT_TRUE(save->Confirm(absl::OkStatus()).ok());  // no effect behind its end
    EXPECT_EQ(std::filesystem::exists(absl::StrCat(directory(), "/", name)), !refused);
  }
  ExpectSaved("confirmed", state);
  ExpectMemoryBack(checkpointer.get());
}

}  // namespace
}  // namespace holdfast::testing
