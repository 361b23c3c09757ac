// holdfast-demo as people and scripts meet it, on a small state. Its first argument is the program.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "holdfast/plan.h"
#include "tests/testing/training_state.h"
#include "tests/unit/tools/program_run.h"

namespace holdfast {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::ProgramRun;
using testing::ScratchDirectory;
using testing::TrainingState;

/// Writes a plain safetensors file, as another program would.
void WriteSafetensors(const std::string& path, const TrainingState& state) {
  const absl::StatusOr<SavePlan> plan = PlanSafetensors("foreign", state.Sources(), {});
  ASSERT_TRUE(plan.ok()) << plan.status();
  std::ofstream file(path, std::ios::binary);
  for (const Segment& segment : plan->files[0].segments) {
    file.write(segment.tensor == Segment::kLiteral ? segment.literal.data()
                                                   : static_cast<const char*>(segment.data),
               static_cast<std::streamsize>(segment.bytes));
  }
}

class DemoProgram : public ::testing::Test {
 protected:
  void SetUp() override {
    if (testing::ProgramUnderTest().empty()) GTEST_SKIP() << "the program's path is not given";
    WriteSafetensors(file_, TrainingState::Uniform(5, 3'000'001, 1));
  }

  ProgramRun Run(const std::string& arguments) const {
    return testing::RunProgram(arguments, scratch_.path());
  }
  ProgramRun RunHere(const std::string& arguments) const {
    return Run(file_ + " --dir " + directory_ + " --arena-bytes 32M --steps-between 1 " +
               arguments);
  }

  ScratchDirectory scratch_;
  const std::string file_ = scratch_.path() + "/state.safetensors";
  const std::string directory_ = scratch_.path() + "/checkpoints";
};

class DemoLaunchers : public DemoProgram, public ::testing::WithParamInterface<const char*> {};

TEST_P(DemoLaunchers, SavesVerifiesAndLoadsBack) {
  const ProgramRun run = RunHere(std::string("--saves 2 --json --launcher ") + GetParam());
  ASSERT_EQ(run.status, 0) << run.error;
  const nlohmann::json json = nlohmann::json::parse(run.out);
  EXPECT_EQ(json["outcome"], "sound");
  ASSERT_EQ(json["saves"].size(), 2u);
  for (const nlohmann::json& save : json["saves"]) {
    EXPECT_EQ(save["launcher"], GetParam());
    EXPECT_EQ(save["verify"]["sound"], true);
    EXPECT_GT(save["time_in_call"], 0.0);
    EXPECT_TRUE(std::filesystem::exists(save["path"]));
  }
  EXPECT_EQ(json["loaded"]["equal"], true);
  EXPECT_EQ(json["loaded"]["name"], json["saves"][1]["name"]);
  EXPECT_THAT(run.error, Not(HasSubstr("\r"))) << "no progress bar in a pipe";
}

TEST_P(DemoLaunchers, RefusesASaveWhoseSealedMemoryWasOverwritten) {
  const ProgramRun run =
      RunHere(std::string("--saves 3 --mutate-sealed --json --launcher ") + GetParam());
  ASSERT_EQ(run.status, 1) << run.error;
  const nlohmann::json json = nlohmann::json::parse(run.out);
  EXPECT_EQ(json["outcome"], "damage found");
  const nlohmann::json& attacked = json["saves"][1];
  EXPECT_EQ(attacked["status"], "DATA_LOSS");
  const std::string message = attacked["message"];
  EXPECT_THAT(message, ContainsRegex("tensor"));
  EXPECT_THAT(message, HasSubstr("model-00000-of-00001.safetensors"));
  EXPECT_THAT(json["deed"], HasSubstr("overwrote"));
  EXPECT_FALSE(std::filesystem::exists(directory_ + "/" + std::string(attacked["name"])));
  EXPECT_EQ(json["saves"][2]["verify"]["sound"], true) << "the next save works";
}

INSTANTIATE_TEST_SUITE_P(All, DemoLaunchers,
                         ::testing::Values("spawn", "fork", "persistent", "thread"),
                         [](const auto& parameter) { return std::string(parameter.param); });

TEST_F(DemoProgram, StreamsAStateLargerThanItsStagingMemory) {
  WriteSafetensors(file_, TrainingState::Uniform(5, 9'000'001, 2));
  const ProgramRun run =
      Run(file_ + " --dir " + directory_ + " --arena-bytes 16M --saves 1 --json");
  ASSERT_EQ(run.status, 0) << run.error;
  const nlohmann::json json = nlohmann::json::parse(run.out);
  EXPECT_EQ(json["saves"][0]["streamed"], true);
  EXPECT_LE(json["arena"]["bytes_peak"], json["arena"]["bytes"]);
}

TEST_F(DemoProgram, KeepsTheNewestCheckpointsOnly) {
  const ProgramRun run = RunHere("--saves 3 --keep-last 1 --json");
  ASSERT_EQ(run.status, 0) << run.error;
  const nlohmann::json json = nlohmann::json::parse(run.out);
  EXPECT_EQ(json["saves"][0]["deleted"], true);
  EXPECT_EQ(json["saves"][2]["verify"]["sound"], true);
}

TEST_F(DemoProgram, RefusesAnExistingCheckpointUnlessToldToReplaceIt) {
  ASSERT_EQ(RunHere("--saves 1").status, 0);
  const ProgramRun again = RunHere("--saves 1");
  EXPECT_EQ(again.status, 3);
  EXPECT_THAT(again.out, HasSubstr("exists already"));
  EXPECT_EQ(RunHere("--saves 1 --replace").status, 0);
}

TEST_F(DemoProgram, PrintsATableForPeople) {
  const ProgramRun run = RunHere("--saves 1");
  EXPECT_EQ(run.status, 0) << run.error;
  for (const char* word : {"stall", "copying", "writing", "durable", "verify", "equal to"}) {
    EXPECT_THAT(run.out, HasSubstr(word));
  }
  EXPECT_THAT(run.out, HasSubstr(directory_));
  EXPECT_THAT(run.error, IsEmpty());
}

TEST_F(DemoProgram, ExitsWith64ForAWrongCommandLine) {
  for (const char* arguments : {"--no-such-option", "--saves 0", "--launcher magic",
                                "--arena-bytes many", "/no/such/file"}) {
    EXPECT_EQ(Run(arguments).status, 64) << arguments;
  }
}

TEST_F(DemoProgram, ExplainsItself) {
  const ProgramRun run = Run("--help");
  EXPECT_EQ(run.status, 0);
  for (const char* word : {"--saves", "--launcher", "--arena-bytes", "Exit status", "Examples"}) {
    EXPECT_THAT(run.out, HasSubstr(word));
  }
}

}  // namespace
}  // namespace holdfast
