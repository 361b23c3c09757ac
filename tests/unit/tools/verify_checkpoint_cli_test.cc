// verify-checkpoint as people and scripts meet it: exit statuses, lines, JSON. Its first argument
// is the program.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "tests/testing/checkpoint_files.h"
#include "tests/testing/training_state.h"
#include "tests/testing/zip_files.h"
#include "tests/unit/tools/program_run.h"

namespace holdfast {
namespace {

using testing::FlipBit;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::ProgramRun;
using testing::ScratchDirectory;
using testing::TrainingState;
using testing::WriteFileBytes;

class VerifyCheckpointProgram : public ::testing::Test {
 protected:
  void SetUp() override {
    if (testing::ProgramUnderTest().empty()) GTEST_SKIP() << "the program's path is not given";
    for (const char* name : {"sound", "corrupt"}) {
      std::filesystem::create_directory(Path(name));
      plan_ = testing::WriteRank(Path(name), {}, TrainingState::Uniform(3, 2'000'000, 1).Sources());
    }
    FlipBit(Path("corrupt/") + model_, plan_.tensors[1].begin + 7);
    std::filesystem::create_directory(Path("incomplete"));
    testing::WriteRank(Path("incomplete"), {.world_size = 2},
                       TrainingState::Uniform(1, 1000, 2).Sources());
  }

  std::string Path(const std::string& name) const { return scratch_.path() + "/" + name; }
  ProgramRun Run(const std::string& arguments) const {
    return testing::RunProgram(arguments, scratch_.path());
  }

  ScratchDirectory scratch_;
  SavePlan plan_;
  const std::string model_ = testing::RankFiles{}.model_name();
};

TEST_F(VerifyCheckpointProgram, ExitsAsItFound) {
  EXPECT_EQ(Run(Path("sound")).status, 0);
  EXPECT_EQ(Run(Path("corrupt")).status, 1);
  EXPECT_EQ(Run(Path("incomplete")).status, 2);
  EXPECT_EQ(Run(Path("nothing")).status, 3);
}

TEST_F(VerifyCheckpointProgram, PrintsAReasonAsItIs) {
  const std::string file = Path("sound/") + model_;
  std::filesystem::resize_file(file, std::filesystem::file_size(file) - 1);
  EXPECT_THAT(Run(Path("sound")).out, HasSubstr("found the file's end\n"));
}

TEST_F(VerifyCheckpointProgram, ExitsWithTheWorstOfSeveral) {
  const std::string sound = Path("sound") + " ";
  const std::string corrupt = Path("corrupt") + " ";
  const std::string incomplete = Path("incomplete") + " ";
  const std::string nothing = Path("nothing") + " ";
  EXPECT_EQ(Run(sound + sound).status, 0);
  EXPECT_EQ(Run(sound + incomplete).status, 2);
  EXPECT_EQ(Run(incomplete + nothing + sound).status, 3);
  EXPECT_EQ(Run(nothing + corrupt + incomplete).status, 1);
}

TEST_F(VerifyCheckpointProgram, ExitsWith64ForAWrongCommandLine) {
  for (const char* arguments :
       {"", "--no-such-option x", "--threads many x", "--engine warp x", "--threads 100000 x"}) {
    const ProgramRun outcome = Run(arguments);
    EXPECT_EQ(outcome.status, 64) << arguments;
    EXPECT_THAT(outcome.out, IsEmpty()) << arguments;
    EXPECT_THAT(outcome.error, Not(IsEmpty())) << arguments;
  }
}

TEST_F(VerifyCheckpointProgram, ExplainsItself) {
  const ProgramRun help = Run("--help");
  EXPECT_EQ(help.status, 0);
  for (const char* said : {"PATH", "--json", "--adopt", "--threads", "--engine", "--buffered",
                           "--quiet", "Exit status", "incomplete", "faults_total", "Examples"}) {
    EXPECT_THAT(help.out, HasSubstr(said));
  }
  const ProgramRun version = Run("--version");
  EXPECT_EQ(version.status, 0);
  EXPECT_THAT(version.out, HasSubstr("verify-checkpoint 0."));
}

TEST_F(VerifyCheckpointProgram, PrintsOneLinePerFaultAndOneForThePath) {
  const ProgramRun outcome = Run(Path("corrupt"));
  EXPECT_THAT(outcome.error, IsEmpty()) << "no progress bar in a pipe";
  EXPECT_EQ(std::count(outcome.out.begin(), outcome.out.end(), '\n'), 2);
  EXPECT_THAT(outcome.out, HasSubstr(absl::StrCat(Path("corrupt"), ": ", model_, ": tensor \"",
                                                  plan_.tensors[1].name, "\": bytes [")));
  EXPECT_THAT(outcome.out, HasSubstr("digest: expected "));
  EXPECT_THAT(outcome.out, HasSubstr(": corrupt (1 fault): 1 file, 3 tensors, "));
  EXPECT_THAT(outcome.out, HasSubstr("/s); checked: XXH3-128 digests of the seal"));
  const ProgramRun quiet = Run("--quiet " + Path("corrupt"));
  EXPECT_EQ(std::count(quiet.out.begin(), quiet.out.end(), '\n'), 1);
  EXPECT_THAT(Run("-q " + Path("sound")).out, IsEmpty());
  EXPECT_THAT(Run(Path("sound ") + Path("corrupt")).out,
              HasSubstr("2 checkpoints: 1 sound, 1 corrupt, "));
}

TEST_F(VerifyCheckpointProgram, WalksADirectoryOfCheckpoints) {
  const std::string run = Path("run");
  std::filesystem::create_directories(run + "/logs/empty");
  WriteFileBytes(run + "/train.log", "step 1\n");
  for (const char* name : {"sound", "corrupt", "incomplete"}) {
    std::filesystem::rename(Path(name), run + "/" + name);
  }
  const std::string partial = run + "/step-9.partial-00112233445566778899aabbccddeeff";
  std::filesystem::create_directory(partial);
  std::filesystem::create_directory_symlink("sound", run + "/latest");
  const ProgramRun outcome = Run(run);
  EXPECT_EQ(outcome.status, 1);
  for (const char* said :
       {"/run/sound: sound", "/run/corrupt: corrupt", "/run/incomplete: incomplete",
        "3 checkpoints: 1 sound, 1 corrupt, 1 incomplete, ", "eeff: not verified: "}) {
    EXPECT_THAT(outcome.out, HasSubstr(said));
  }
  EXPECT_THAT(outcome.out, Not(HasSubstr("latest")));
  std::filesystem::remove_all(run + "/corrupt");
  EXPECT_EQ(Run(run).status, 2);
  std::filesystem::remove_all(run + "/incomplete");
  const ProgramRun json = Run("--json " + run);
  EXPECT_EQ(json.status, 0) << "a save under way is no damage";
  const auto document = nlohmann::json::parse(json.out, nullptr, false);
  ASSERT_EQ(document["paths"].size(), 1u) << json.out;
  EXPECT_EQ(document["paths"][0]["path"], run + "/sound");
  EXPECT_EQ(document["uncommitted"][0], partial);
  EXPECT_EQ(Run(partial).status, 2) << "named by the caller";
}

TEST_F(VerifyCheckpointProgram, WalksWhatLiesBesideFilesOfTensors) {
  std::filesystem::create_directories(Path("run/deep"));
  std::filesystem::rename(Path("sound"), Path("run/deep/step-1"));
  WriteFileBytes(Path("run/final.pt"), testing::ZipArchive({{"archive/data/0", "abc"}}, {}));
  const ProgramRun outcome = Run(Path("run"));
  EXPECT_EQ(outcome.status, 0) << outcome.out;
  EXPECT_THAT(outcome.out, HasSubstr("2 checkpoints: 2 sound, "));
}

TEST_F(VerifyCheckpointProgram, SaysThatADirectoryHoldsNoCheckpoint) {
  std::filesystem::create_directories(Path("run/logs"));
  EXPECT_EQ(Run(Path("run")).status, 2);
}

TEST_F(VerifyCheckpointProgram, PrintsOneJsonDocument) {
  const ProgramRun outcome = Run("--json " + Path("sound ") + Path("corrupt"));
  EXPECT_EQ(outcome.status, 1);
  const auto document = nlohmann::json::parse(outcome.out, nullptr, false);
  ASSERT_FALSE(document.is_discarded()) << outcome.out;
  EXPECT_EQ(document["program"], "verify-checkpoint");
  EXPECT_EQ(document["version"], 1);
  EXPECT_EQ(document["verdict"], "corrupt");
  EXPECT_EQ(document["exit_status"], 1);
  ASSERT_EQ(document["paths"].size(), 2u);
  const auto& sound = document["paths"][0];
  EXPECT_EQ(sound["verdict"], "sound");
  EXPECT_EQ(sound["bytes"], plan_.files[0].bytes);
  EXPECT_EQ(sound["files"], 1);
  EXPECT_EQ(sound["tensors"], 3);
  EXPECT_EQ(sound["step"], 7);
  EXPECT_EQ(sound["attempt"], "00000000000000070000000000000008");
  EXPECT_EQ(sound["faults_total"], 0);
  for (const char* key :
       {"path", "checked", "note", "seconds", "bytes_per_second", "engine", "direct_io"}) {
    EXPECT_TRUE(sound.contains(key)) << key;
  }
  const auto& fault = document["paths"][1]["faults"][0];
  EXPECT_EQ(fault["file"], model_);
  EXPECT_EQ(fault["tensor"], plan_.tensors[1].name);
  EXPECT_LE(fault["begin"], plan_.tensors[1].begin + 7);
  EXPECT_GT(fault["end"], plan_.tensors[1].begin + 7);
  EXPECT_EQ(fault["reason"], "digest");
  EXPECT_NE(fault["expected"], fault["found"]);
}

TEST_F(VerifyCheckpointProgram, TakesEveryEngineItOffers) {
  for (const char* engine : {"auto", "pwrite"}) {
    const ProgramRun outcome =
        Run(absl::StrCat("--json --buffered --threads 1 --engine ", engine, " ", Path("sound")));
    EXPECT_EQ(outcome.status, 0) << outcome.out << outcome.error;
    EXPECT_EQ(nlohmann::json::parse(outcome.out, nullptr, false)["paths"][0]["direct_io"], "no");
  }
}

TEST_F(VerifyCheckpointProgram, AdoptsAndVerifies) {
  std::filesystem::create_directory(Path("foreign"));
  WriteFileBytes(Path("foreign/a.pt"), testing::ZipArchive({{"archive/data/0", "abc"}}, {}));
  const ProgramRun outcome = Run("--adopt " + Path("foreign"));
  EXPECT_EQ(outcome.status, 0) << outcome.out;
  EXPECT_THAT(outcome.out, HasSubstr("time of adoption"));
  FlipBit(Path("foreign/a.pt"), 70);
  EXPECT_EQ(Run(Path("foreign")).status, 1);
  EXPECT_EQ(Run("--adopt " + Path("foreign")).status, 3) << "there is a manifest already";
  std::filesystem::remove(Path("sound/") + testing::RankFiles{}.manifest_name());
  const ProgramRun refused = Run("--adopt " + Path("sound"));
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.out, HasSubstr("attempt id"));
}

TEST_F(VerifyCheckpointProgram, LetsNoControlCharacterOfANameThrough) {
  WriteFileBytes(Path("evil\x1b[31m.pt"), "not a zip");
  const ProgramRun outcome = Run("'" + Path("evil\x1b[31m.pt") + "'");
  EXPECT_EQ(outcome.status, 3);
  EXPECT_THAT(outcome.out, Not(HasSubstr("\x1b")));
  WriteFileBytes(Path("bad\xff.pt"), "not a zip");
  const ProgramRun json = Run("--json '" + Path("bad\xff.pt") + "'");
  EXPECT_FALSE(nlohmann::json::parse(json.out, nullptr, false).is_discarded());
}

TEST_F(VerifyCheckpointProgram, FailsWhenItsOutputCannotBeWritten) {
  const std::string command = absl::StrCat("'", testing::ProgramUnderTest(), "' ", Path("sound"),
                                           " >/dev/full 2>/dev/null");
  const int status = std::system(command.c_str());
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 3);
}

}  // namespace
}  // namespace holdfast
