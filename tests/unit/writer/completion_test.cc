// The trainer takes every result of a sound worker, and no result of a damaged worker.
#include "runtime/writer/completion.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace holdfast::writer {
namespace {

using ::testing::HasSubstr;

constexpr CompletionLimits kLimits = {
    .file_count = 2, .tensor_count = 3, .world_size = 4, .bytes = 1000};

constexpr uint32_t kOperations = static_cast<uint32_t>(kLastOperation) + 1;

using Change = std::function<void(layout::CompletionSlot*)>;

absl::StatusOr<std::optional<Completion>> Read(const Change& change) {
  layout::Job job;
  change(&job.completion);
  job.completion.state = static_cast<uint32_t>(layout::CompletionState::kDone);
  return ReadCompletion(job, kLimits);
}

void FailWith(layout::CompletionSlot* slot, Operation operation) {
  slot->failure.code = FailureCode::kAborted;
  slot->failure.operation = operation;
}

TEST(Completion, IsTakenWhole) {
  const auto read = Read([](layout::CompletionSlot* slot) {
    FailWith(slot, Operation::kWaitRanks);
    slot->failure.file = 1;
    slot->failure.tensor = 2;
    slot->failure.error_number = 4095;
    slot->rank_failure.rank = 3;
    slot->figures.bytes_written = 1000;
    slot->figures.engine = EngineRung::kPwrite;
    slot->figures.direct_io = DirectIo::kProven;
    slot->figures.write_attempts = 2;
    slot->figures.space_reserved = true;
    slot->left_files = 1;
    strcpy(slot->reason, "of \x80 the rung\n");
    strcpy(slot->left_behind, ".run.retired-00");
    strcpy(slot->foreign, "c\xc3\xa9");
    slot->newer_step = 9;
  });
  ASSERT_TRUE(read.ok()) << read.status();
  ASSERT_TRUE(read->has_value());
  const Completion& result = **read;
  EXPECT_EQ(result.failure.file, 1u);
  EXPECT_EQ(result.rank_failure.rank, 3u);
  EXPECT_EQ(result.figures.bytes_written, 1000u);
  EXPECT_TRUE(result.left_files);
  EXPECT_EQ(result.reason, "of ? the rung?");
  EXPECT_EQ(result.left_behind, ".run.retired-00");
  EXPECT_EQ(result.foreign, "c\xc3\xa9") << "a name as the file system has it";
  EXPECT_EQ(result.newer_step, 9u);
}

TEST(Completion, OfEveryOperationIsTaken) {
  for (const Operation operation :
       {Operation::kAttach, Operation::kJoinRanks, Operation::kMapNotes, Operation::kMapBuffer}) {
    const auto read = Read([=](layout::CompletionSlot* slot) { FailWith(slot, operation); });
    ASSERT_TRUE(read.ok() && read->has_value()) << read.status();
    EXPECT_EQ((*read)->failure.operation, operation);
  }
}

TEST(Completion, IsNotThereBeforeItsState) {
  layout::Job job;
  job.completion.failure.code = static_cast<FailureCode>(99);
  const auto read = ReadCompletion(job, kLimits);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_FALSE(read->has_value());
}

TEST(Completion, OfNoSoundWorkerIsRefused) {
  using Slot = layout::CompletionSlot;
  struct Case {
    const char* reason;
    Change change;
  };
  const std::vector<Case> cases = {
      {"a code", [](Slot* slot) { slot->failure.code = static_cast<FailureCode>(16); }},
      {"a code", [](Slot* slot) { slot->failure.code = static_cast<FailureCode>(-1); }},
      {"an operation", [](Slot* slot) { FailWith(slot, static_cast<Operation>(kOperations)); }},
      {"no errno", [](Slot* slot) { slot->failure.error_number = 4096; }},
      {"no errno", [](Slot* slot) { slot->failure.error_number = -1; }},
      {"a file", [](Slot* slot) { slot->failure.file = 2; }},
      {"a tensor", [](Slot* slot) { slot->failure.tensor = 3; }},
      {"without a code", [](Slot* slot) { slot->failure.operation = Operation::kWrite; }},
      {"a rank",
       [](Slot* slot) {
         FailWith(slot, Operation::kWaitRanks);
         slot->rank_failure.rank = 4;
       }},
      {"without an end",
       [](Slot* slot) {
         FailWith(slot, Operation::kWaitRanks);
         memset(slot->rank_failure.text, 'r', sizeof(slot->rank_failure.text));
       }},
      {"more bytes", [](Slot* slot) { slot->figures.bytes_written = 1001; }},
      {"an engine", [](Slot* slot) { slot->figures.engine = static_cast<EngineRung>(4); }},
      {"direct I/O", [](Slot* slot) { slot->figures.direct_io = static_cast<DirectIo>(3); }},
      {"two attempts", [](Slot* slot) { slot->figures.write_attempts = 3; }},
      {"yes nor no", [](Slot* slot) { memset(&slot->figures.space_reserved, 2, 1); }},
      {"yes nor no", [](Slot* slot) { slot->left_files = 2; }},
      {"without an end", [](Slot* slot) { memset(slot->reason, 'r', sizeof(slot->reason)); }},
      {"name", [](Slot* slot) { memset(slot->left_behind, 'n', sizeof(slot->left_behind)); }},
      {"name", [](Slot* slot) { strcpy(slot->left_behind, "../elsewhere"); }},
      {"name", [](Slot* slot) { strcpy(slot->left_behind, ".."); }},
      {"name", [](Slot* slot) { strcpy(slot->foreign, "a/b"); }},
  };
  for (const Case& wrong : cases) {
    const auto read = Read(wrong.change);
    EXPECT_TRUE(absl::IsInternal(read.status())) << wrong.reason << ": " << read.status();
    EXPECT_THAT(std::string(read.status().message()), HasSubstr(wrong.reason));
  }
}

TEST(Completion, StatesOfNoSoundWorkerAreNamed) {
  const std::vector<std::function<void(layout::Job*)>> changes = {
      [](layout::Job* job) { job->completion.state = 2; },
      [](layout::Job* job) { job->staging_released = 2; },
      [](layout::Job* job) { job->assertion_failed = 0x80000000; },
      [](layout::Job* job) { job->engine_used = 4; },
      [](layout::Job* job) { job->written = 3; },
      [](layout::Job* job) { job->phase = 9; },
  };
  EXPECT_EQ(WrongState(layout::Job()), nullptr);
  for (size_t i = 0; i < changes.size(); ++i) {
    layout::Job job;
    changes[i](&job);
    EXPECT_NE(WrongState(job), nullptr) << i;
  }
}

}  // namespace
}  // namespace holdfast::writer
