// Where the worker program is looked for, in which order, and what is said when it is nowhere.
#include "runtime/writer/worker_program.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/sys/system.h"

namespace holdfast::writer {
namespace {

using ::testing::HasSubstr;

std::string g_executable;  // What /proc/self/exe is made to say; empty: an error.

ssize_t FakeReadLink(int, const char*, char* buffer, size_t bytes) {
  if (g_executable.empty()) {
    errno = ENOENT;
    return -1;
  }
  std::memcpy(buffer, g_executable.data(), std::min(bytes, g_executable.size()));
  return static_cast<ssize_t>(g_executable.size());
}

class FindWorkerProgramTest : public ::testing::Test {
 protected:
  FindWorkerProgramTest() {
    char name[] = "/tmp/worker_program_test.XXXXXX";
    root_ = mkdtemp(name);
    std::filesystem::create_directories(root_ + "/bin");
    std::filesystem::create_directories(root_ + "/libexec/holdfast");
    g_executable = root_ + "/bin/trainer";
    unsetenv("HOLDFAST_WORKER");
    sys::g_system.readlinkat = FakeReadLink;
  }
  ~FindWorkerProgramTest() override {
    sys::g_system = sys::kKernel;
    std::filesystem::remove_all(root_);
  }
  std::string Make(const std::string& name, mode_t mode = 0755) {
    const std::string path = root_ + "/" + name;
    std::ofstream(path) << "program";
    EXPECT_EQ(chmod(path.c_str(), mode), 0);
    return path;
  }

  std::string root_;
};

TEST_F(FindWorkerProgramTest, TheOptionComesFirstThenTheVariableThenThePlacesBesideTheProgram) {
  const std::string installed = Make("libexec/holdfast/holdfast-worker");
  EXPECT_TRUE(std::filesystem::equivalent(*FindWorkerProgram(""), installed));
  const std::string beside = Make("bin/holdfast-worker");
  EXPECT_EQ(*FindWorkerProgram(""), beside);
  const std::string named = Make("by-variable");
  setenv("HOLDFAST_WORKER", named.c_str(), 1);
  EXPECT_EQ(*FindWorkerProgram(""), named);
  const std::string option = Make("by-option");
  EXPECT_EQ(*FindWorkerProgram(option), option);
}

TEST_F(FindWorkerProgramTest, AWishThatCannotBeMetIsAnErrorAndNothingElseIsTried) {
  Make("bin/holdfast-worker");
  const absl::Status missing = FindWorkerProgram(root_ + "/nowhere").status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()), HasSubstr(root_ + "/nowhere"));
  EXPECT_THAT(std::string(missing.message()), HasSubstr("worker_program"));
  setenv("HOLDFAST_WORKER", root_.c_str(), 1);
  const absl::Status directory = FindWorkerProgram("").status();
  EXPECT_EQ(directory.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(directory.message()), HasSubstr("not a file"));
  EXPECT_THAT(std::string(directory.message()), HasSubstr("$HOLDFAST_WORKER"));
  unsetenv("HOLDFAST_WORKER");
  EXPECT_THAT(std::string(FindWorkerProgram(Make("plain", 0644)).status().message()),
              HasSubstr("not executable"));
}

TEST_F(FindWorkerProgramTest, AnEmptyVariableIsNoWish) {
  setenv("HOLDFAST_WORKER", "", 1);
  const std::string beside = Make("bin/holdfast-worker");
  EXPECT_EQ(*FindWorkerProgram(""), beside);
}

TEST_F(FindWorkerProgramTest, NowhereNamesEveryPlaceThatWasTried) {
  Make("bin/holdfast-worker", 0644);
  const absl::Status status = FindWorkerProgram("").status();
  if (status.ok()) GTEST_SKIP() << "a holdfast-worker is installed on this machine";
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  const std::string message(status.message());
  EXPECT_THAT(message, HasSubstr(root_ + "/bin/holdfast-worker"));
  EXPECT_THAT(message, HasSubstr("not executable"));
  EXPECT_THAT(message, HasSubstr(root_ + "/bin/../libexec/holdfast/holdfast-worker"));
  EXPECT_THAT(message, HasSubstr("$HOLDFAST_WORKER"));
}

TEST_F(FindWorkerProgramTest, WithoutProcTheInstalledPlaceIsStillTried) {
  g_executable.clear();
  const absl::StatusOr<std::string> found = FindWorkerProgram("");
  if (found.ok()) GTEST_SKIP() << "a holdfast-worker is installed on this machine";
  EXPECT_THAT(std::string(found.status().message()), HasSubstr("libexec/holdfast/holdfast-worker"));
}

}  // namespace
}  // namespace holdfast::writer
