// holdfast-doctor as a person or a script meets it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/testing/small_checkpoint.h"
#include "tests/unit/tools/program_run.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;
using testing::ProgramRun;
using testing::TemporaryDirectory;

class DoctorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (testing::ProgramUnderTest().empty()) GTEST_SKIP() << "the program's path is not given";
  }
  ProgramRun Doctor(const std::string& arguments) const {
    return testing::RunProgram(arguments, output_.path());
  }

  TemporaryDirectory directory_;
  TemporaryDirectory output_;
};

TEST_F(DoctorTest, FindsThisDirectoryFineAndLeavesNothingThere) {
  const ProgramRun ran = Doctor("--quick " + directory_.path());
  EXPECT_EQ(ran.status, 0) << ran.out + ran.error;
  EXPECT_THAT(ran.out + ran.error, HasSubstr("engine"));
  EXPECT_THAT(ran.out + ran.error, HasSubstr("not measured"));
  EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
}

TEST_F(DoctorTest, PrintsOneJsonDocument) {
  const ProgramRun ran = Doctor("--quick --json " + directory_.path());
  EXPECT_EQ(ran.status, 0);
  const auto document = nlohmann::json::parse(ran.out, nullptr, false);
  ASSERT_FALSE(document.is_discarded()) << ran.out + ran.error;
  EXPECT_EQ(document["directory"], directory_.path());
  EXPECT_EQ(document["exit_status"], 0);
  EXPECT_TRUE(document["refusals"].empty());
  for (const char* key : {"engine", "pages", "direct_io", "file_system", "advice", "gpus",
                          "write_bytes_per_second", "memlock_bytes", "worker_program"}) {
    EXPECT_TRUE(document.contains(key)) << key;
  }
}

TEST_F(DoctorTest, RefusesADirectoryThatIsNotThere) {
  const ProgramRun text = Doctor(directory_ / "missing");
  EXPECT_EQ(text.status, 1);
  EXPECT_THAT(text.out + text.error, HasSubstr("there is no such directory; make it"));
  const ProgramRun json = Doctor("--json " + (directory_ / "missing"));
  EXPECT_EQ(json.status, 1);
  const auto document = nlohmann::json::parse(json.out, nullptr, false);
  ASSERT_FALSE(document.is_discarded()) << json.out;
  EXPECT_EQ(document["refusals"].size(), 1u);
}

TEST_F(DoctorTest, RefusesWhereTheWorkerProgramIsMissing) {
  setenv("HOLDFAST_WORKER", "/nonexistent/holdfast-worker", 1);
  const ProgramRun ran = Doctor("--quick " + directory_.path());
  EXPECT_EQ(ran.status, 1);
  EXPECT_THAT(ran.out + ran.error, HasSubstr("holdfast-worker is missing"));
  EXPECT_THAT(ran.out + ran.error, HasSubstr("Saves do not work here"));
}

TEST_F(DoctorTest, SaysHowItIsUsed) {
  EXPECT_EQ(Doctor("").status, 64);
  EXPECT_EQ(Doctor("--unknown " + directory_.path()).status, 64);
  const ProgramRun help = Doctor("--help");
  EXPECT_EQ(help.status, 0);
  EXPECT_THAT(help.out + help.error, HasSubstr("Exit status"));
}

}  // namespace
}  // namespace holdfast
