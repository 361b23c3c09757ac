// Running one of the programs as a shell would, and what came of it.
#ifndef HOLDFAST_TESTS_UNIT_TOOLS_PROGRAM_RUN_H_
#define HOLDFAST_TESTS_UNIT_TOOLS_PROGRAM_RUN_H_

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <string>
#include <vector>

#include "tests/testing/checkpoint_files.h"

namespace holdfast::testing {

struct ProgramRun {
  int status = -1;  ///< Exit status; -1 if it was killed.
  std::string out;
  std::string error;
};

/// The first argument of the test program: the program under test. Empty if it was not given.
inline std::string ProgramUnderTest() {
  const std::vector<std::string> arguments = ::testing::internal::GetArgvs();
  return arguments.size() > 1 ? arguments[1] : "";
}

/// Runs the program with `arguments`, as a shell takes them. The output goes through files in
/// `scratch`.
inline ProgramRun RunProgram(const std::string& arguments, const std::string& scratch) {
  const std::string out = scratch + "/.out";
  const std::string error = scratch + "/.error";
  const std::string command =
      "'" + ProgramUnderTest() + "' " + arguments + " >" + out + " 2>" + error + " </dev/null";
  const int status = std::system(command.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, ReadFileBytes(out), ReadFileBytes(error)};
}

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_UNIT_TOOLS_PROGRAM_RUN_H_
