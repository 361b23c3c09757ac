// holdfast-doctor as a person or a script meets it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/testing/small_checkpoint.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;
using testing::TemporaryDirectory;

struct Ran {
  int exit_status = -1;
  std::string output;
};

Ran Doctor(const std::string& arguments) {
  Ran ran;
  std::FILE* pipe = popen((std::string(HOLDFAST_DOCTOR) + " " + arguments + " 2>&1").c_str(), "r");
  if (pipe == nullptr) abort();
  char buffer[4096];
  size_t got = 0;
  while ((got = std::fread(buffer, 1, sizeof(buffer), pipe)) > 0) ran.output.append(buffer, got);
  const int status = pclose(pipe);
  if (WIFEXITED(status)) ran.exit_status = WEXITSTATUS(status);
  return ran;
}

class DoctorTest : public ::testing::Test {
 protected:
  TemporaryDirectory directory_;
};

TEST_F(DoctorTest, FindsThisDirectoryFineAndLeavesNothingThere) {
  const Ran ran = Doctor("--quick " + directory_.path());
  EXPECT_EQ(ran.exit_status, 0) << ran.output;
  EXPECT_THAT(ran.output, HasSubstr("engine"));
  EXPECT_THAT(ran.output, HasSubstr("not measured"));
  EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
}

TEST_F(DoctorTest, PrintsOneJsonDocument) {
  const Ran ran = Doctor("--quick --json " + directory_.path());
  EXPECT_EQ(ran.exit_status, 0);
  const auto document = nlohmann::json::parse(ran.output, nullptr, false);
  ASSERT_FALSE(document.is_discarded()) << ran.output;
  EXPECT_EQ(document["directory"], directory_.path());
  EXPECT_EQ(document["exit_status"], 0);
  EXPECT_TRUE(document["refusals"].empty());
  for (const char* key : {"engine", "pages", "direct_io", "file_system", "advice", "gpus",
                          "write_bytes_per_second", "memlock_bytes", "worker_program"}) {
    EXPECT_TRUE(document.contains(key)) << key;
  }
}

TEST_F(DoctorTest, RefusesADirectoryThatIsNotThere) {
  const Ran text = Doctor(directory_ / "missing");
  EXPECT_EQ(text.exit_status, 1);
  EXPECT_THAT(text.output, HasSubstr("No such file"));
  const Ran json = Doctor("--json " + (directory_ / "missing"));
  EXPECT_EQ(json.exit_status, 1);
  const auto document = nlohmann::json::parse(json.output, nullptr, false);
  ASSERT_FALSE(document.is_discarded()) << json.output;
  EXPECT_EQ(document["refusals"].size(), 1u);
}

TEST_F(DoctorTest, RefusesWhereTheWorkerProgramIsMissing) {
  setenv("HOLDFAST_WORKER", "/nonexistent/holdfast-worker", 1);
  const Ran ran = Doctor("--quick " + directory_.path());
  EXPECT_EQ(ran.exit_status, 1);
  EXPECT_THAT(ran.output, HasSubstr("holdfast-worker is missing"));
  EXPECT_THAT(ran.output, HasSubstr("Saves do not work here"));
}

TEST_F(DoctorTest, SaysHowItIsUsed) {
  EXPECT_EQ(Doctor("").exit_status, 64);
  EXPECT_EQ(Doctor("--unknown " + directory_.path()).exit_status, 64);
  const Ran help = Doctor("--help");
  EXPECT_EQ(help.exit_status, 0);
  EXPECT_THAT(help.output, HasSubstr("Exit status"));
}

}  // namespace
}  // namespace holdfast
