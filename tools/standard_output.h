// The end of a program's output.
#ifndef HOLDFAST_TOOLS_STANDARD_OUTPUT_H_
#define HOLDFAST_TOOLS_STANDARD_OUTPUT_H_

#include <cstdio>

#include "absl/strings/str_cat.h"

namespace holdfast::tools {

/// Returns the exit status of a program that has printed its result: `exit_status`, or `unprinted`
/// after a message when the standard output has taken less than the program has printed. A full
/// disk and a closed pipe do so.
inline int ExitStatus(const char* program, int exit_status, int unprinted) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return exit_status;
  std::perror(absl::StrCat(program, ": standard output").c_str());
  return unprinted;
}

}  // namespace holdfast::tools

#endif  // HOLDFAST_TOOLS_STANDARD_OUTPUT_H_
