// Unsound plans, limits of memory, and saves without free memory.
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "holdfast/plan.h"
#include "tests/testing/child_process.h"
#include "tests/testing/save_test.h"

namespace holdfast::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class BadRequest : public LauncherTest {};
INSTANTIATE_TEST_SUITE_P(All, BadRequest, kEveryLauncher, LauncherName);

/// Two tensors in one file of 300 bytes, behind a header of 100.
SavePlan SoundPlan(const std::vector<char>& bytes) {
  SavePlan plan;
  plan.tensors = {{.name = "a", .dtype = "U8", .shape = {100}, .begin = 100, .end = 200},
                  {.name = "b", .dtype = "U8", .shape = {100}, .begin = 200, .end = 300}};
  plan.files = {
      {.name = "one.bin",
       .bytes = 300,
       .segments = {{.file_offset = 0, .bytes = 100, .literal = std::string(100, 'h')},
                    {.file_offset = 100, .bytes = 100, .tensor = 0, .data = bytes.data()},
                    {.file_offset = 200, .bytes = 100, .tensor = 1, .data = bytes.data() + 100}}}};
  return plan;
}

TEST_P(BadRequest, UnsoundPlansAreRefusedWithFileAndReason) {
  struct Case {
    const char* what;
    std::function<void(SavePlan*)> spoil;
  };
  constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();
  const std::vector<Case> cases = {
      {"overlap", [](SavePlan* plan) { plan->files[0].segments[1].file_offset = 99; }},
      {"hole",
       [](SavePlan* plan) { plan->files[0].segments.erase(plan->files[0].segments.begin() + 1); }},
      {"out of range", [](SavePlan* plan) { plan->files[0].segments[2].bytes = 101; }},
      {"overflow",
       [](SavePlan* plan) {
         plan->files[0].segments[2].file_offset = kHuge - 10;
         plan->files[0].segments[2].bytes = 100;
       }},
      {"missing end", [](SavePlan* plan) { plan->files[0].bytes = 301; }},
      {"no such tensor", [](SavePlan* plan) { plan->files[0].segments[1].tensor = 7; }},
      {"no bytes", [](SavePlan* plan) { plan->files[0].segments[1].data = nullptr; }},
      {"tensor elsewhere", [](SavePlan* plan) { plan->tensors[0].begin = 101; }},
      {"tensor of no file", [](SavePlan* plan) { plan->tensors[0].file = 9; }},
      {"duplicate tensor", [](SavePlan* plan) { plan->tensors[1].name = "a"; }},
      {"duplicate file", [](SavePlan* plan) { plan->files.push_back(plan->files[0]); }},
      {"file ..", [](SavePlan* plan) { plan->files[0].name = ".."; }},
      {"file with slash", [](SavePlan* plan) { plan->files[0].name = "../one.bin"; }},
      {"empty file name", [](SavePlan* plan) { plan->files[0].name.clear(); }},
      {"long file name", [](SavePlan* plan) { plan->files[0].name.assign(300, 'n'); }},
      {"manifest's name",
       [](SavePlan* plan) { plan->files[0].name = "rank-00000-of-00001.manifest.json"; }},
      {"temporary name", [](SavePlan* plan) { plan->files[0].name = "one.tmp"; }},
  };
  SavePrevious(directory());
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  const std::vector<char> bytes(200, 'x');
  for (const Case& spoilt : cases) {
    SavePlan plan = SoundPlan(bytes);
    spoilt.spoil(&plan);
    const auto begun = checkpointer->SaveAsync({.name = "planned", .plan = &plan});
    EXPECT_TRUE(absl::IsInvalidArgument(begun.status())) << spoilt.what << ": " << begun.status();
    EXPECT_FALSE(begun.status().message().empty()) << spoilt.what;
  }
  EXPECT_EQ(checkpointer->staging().leases, 0u);
  ExpectRecovered(checkpointer.get());
}

TEST_P(BadRequest, TensorsThatContradictThemselvesAreRefusedByName) {
  SavePrevious(directory());
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  const std::vector<char> bytes(64, 'x');
  const TensorSource good = {
      .name = "w", .dtype = "F32", .shape = {4}, .data = bytes.data(), .bytes = 16};
  const auto with = [&good](const std::function<void(TensorSource*)>& spoil) {
    std::vector<TensorSource> tensors = {good, good};
    tensors[1].name = "v";
    spoil(&tensors[1]);
    return tensors;
  };
  const std::vector<std::vector<TensorSource>> cases = {
      with([](TensorSource* tensor) { tensor->name = "w"; }),
      with([](TensorSource* tensor) { tensor->name.clear(); }),
      with([](TensorSource* tensor) { tensor->name = "\xff\xfe"; }),
      with([](TensorSource* tensor) { tensor->bytes = 15; }),
      with([](TensorSource* tensor) { tensor->shape = {-4}; }),
      with([](TensorSource* tensor) {
        tensor->shape = {int64_t{1} << 62, 8};
      }),
      with([](TensorSource* tensor) { tensor->data = nullptr; }),
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    const auto begun = checkpointer->SaveAsync({.name = "planned", .tensors = cases[i]});
    EXPECT_TRUE(absl::IsInvalidArgument(begun.status())) << i << ": " << begun.status();
  }
  ExpectRecovered(checkpointer.get());
}

TEST_P(BadRequest, AManifestThatNoReaderTakesIsRefused) {
  // Of one tensor's 128 TiB each chunk has a digest in the manifest. No byte is read.
  constexpr uint64_t kBytes = uint64_t{1} << 47;
  const char bytes = 'x';
  SavePlan plan;
  plan.tensors = {
      {.name = "a", .dtype = "U8", .shape = {static_cast<int64_t>(kBytes)}, .end = kBytes}};
  plan.files = {{.name = "one.bin",
                 .bytes = kBytes,
                 .segments = {{.bytes = kBytes, .tensor = 0, .data = &bytes}}}};
  SavePrevious(directory());
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  const auto begun = checkpointer->SaveAsync({.name = "planned", .plan = &plan});
  EXPECT_TRUE(absl::IsInvalidArgument(begun.status())) << begun.status();
  EXPECT_THAT(std::string(begun.status().message()),
              AllOf(HasSubstr("planned"), HasSubstr("manifest")));
  EXPECT_EQ(checkpointer->staging().leases, 0u);
  ExpectRecovered(checkpointer.get());
}

TEST_P(BadRequest, NoTensorAtAllIsACheckpoint) {
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  const auto report = Save(checkpointer.get(), "empty", TrainingState());
  ASSERT_TRUE(report.ok()) << report.status();
  ExpectSound(report->path);
  SavePlan nothing;
  const auto handle = checkpointer->SaveAsync({.name = "nothing", .plan = &nothing});
  if (handle.ok()) {
    const auto planned = handle->WaitDurable(kLong);
    EXPECT_TRUE(planned.ok()) << planned.status();
    if (planned.ok()) ExpectSound(planned->path);
  } else {
    EXPECT_TRUE(absl::IsInvalidArgument(handle.status())) << handle.status();
  }
  // No last byte could be held back.
  const absl::Status refused =
      checkpointer->SaveAsync({.name = "held", .plan = &nothing, .confirm = true}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_THAT(Text(refused), AllOf(HasSubstr("held"), HasSubstr("`confirm`")));
  ExpectMemoryBack(checkpointer.get());
}

TEST_P(BadRequest, ManyTensorsOverTheControlMemoryCapAreRefusedNamingIt) {
  SavePrevious(directory());
  CheckpointerOptions options = Options();
  options.staging.control_bytes_max = 256u << 10;
  const auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  const auto begun = Begin(checkpointer.get(), "many", TrainingState::Uniform(5000, 16, 1));
  EXPECT_TRUE(absl::IsResourceExhausted(begun.status())) << begun.status();
  EXPECT_THAT(Text(begun.status()), AllOf(HasSubstr("many"), HasSubstr("control")));
  EXPECT_LE(checkpointer->staging().control_bytes_peak, options.staging.control_bytes_max);
  ExpectRecovered(checkpointer.get());
}

/// A slow save that holds all of the arena.
class HeldMemory : public LauncherTest {
 protected:
  void Start(WhenFull when_full, absl::Duration time_memory_max, uint64_t mib_per_second = 10,
             absl::Duration time_stalled_max = kLong) {
    SavePrevious(directory());
    CheckpointerOptions options = Options();
    options.time_stalled_max = time_stalled_max;
    options.staging.arena_bytes = 16u << 20;
    options.when_full = when_full;
    options.time_memory_max = time_memory_max;
    options.qos.bytes_per_second_max = mib_per_second << 20;
    checkpointer_ = Make(options);
    ASSERT_NE(checkpointer_, nullptr);
    const auto begun = Begin(checkpointer_.get(), "first", state_);
    ASSERT_TRUE(begun.ok()) << begun.status();
    first_ = *begun;
  }
  void End() {
    const auto report = first_.WaitDurable(kLong);
    EXPECT_TRUE(report.ok()) << report.status();
    EXPECT_TRUE(state_.CompareWith(absl::StrCat(directory(), "/first")).ok());
    ExpectMemoryBack(checkpointer_.get());
    ExpectPreviousAnd(directory(), {"first"});
    const auto next = Save(checkpointer_.get(), "next", second_, 2);
    EXPECT_TRUE(next.ok()) << next.status();
    ExpectPreviousAnd(directory(), {"first", "next"});
    checkpointer_.reset();
    first_ = SaveHandle();
  }
  const TrainingState state_ = TrainingState::Uniform(4, 3'900'000, 1);
  const TrainingState second_ = TrainingState::Uniform(2, 2'000'000, 2);
  std::unique_ptr<Checkpointer> checkpointer_;
  SaveHandle first_;
};
INSTANTIATE_TEST_SUITE_P(All, HeldMemory, kEveryLauncher, LauncherName);

TEST_P(HeldMemory, SkipsLaterSaves) {
  Start(WhenFull::kSkip, absl::Seconds(60));
  if (HasFatalFailure()) return;
  const auto second = Begin(checkpointer_.get(), "second", second_, 2);
  EXPECT_TRUE(absl::IsUnavailable(second.status())) << second.status();
  EXPECT_THAT(Text(second.status()), AllOf(HasSubstr("second"), HasSubstr("skipped")));
  End();
}

TEST_P(HeldMemory, FailsLaterSaves) {
  Start(WhenFull::kFail, absl::Seconds(60));
  if (HasFatalFailure()) return;
  const auto second = Begin(checkpointer_.get(), "second", second_, 2);
  EXPECT_TRUE(absl::IsResourceExhausted(second.status())) << second.status();
  EXPECT_THAT(Text(second.status()), AllOf(HasSubstr("second"), HasSubstr("arena_bytes")));
  End();
}

TEST_P(HeldMemory, TheCallGivesUpAtItsDeadlineAndTheFirstSaveGoesOn) {
  Start(WhenFull::kWait, absl::Milliseconds(200));
  if (HasFatalFailure()) return;
  const absl::Time begin = absl::Now();
  const auto second = Begin(checkpointer_.get(), "second", second_, 2);
  EXPECT_TRUE(absl::IsDeadlineExceeded(second.status())) << second.status();
  EXPECT_THAT(Text(second.status()), AllOf(HasSubstr("second"), HasSubstr("arena_bytes")));
  EXPECT_LT(absl::Now() - begin, kLong);
  EXPECT_FALSE(first_.IsDone());
  End();
}

TEST_P(HeldMemory, TheCallWaitsAndBothAreSaved) {
  // Slow: on a busy disk the second call's directories take a second. Waiting for memory is
  // no stall.
  Start(WhenFull::kWait, absl::Seconds(60), 2, absl::Seconds(3));
  if (HasFatalFailure()) return;
  const auto second = Begin(checkpointer_.get(), "second", second_, 2);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_TRUE(second->WaitDurable(kLong).ok());
  EXPECT_GT(checkpointer_->staging().waits, 0u);
  const std::string path = absl::StrCat(directory(), "/second");
  EXPECT_TRUE(second_.CompareWith(path).ok());
  std::filesystem::remove_all(path);
  End();
}

}  // namespace
}  // namespace holdfast::testing
