// The path of an open file, for tests that choose calls by their file.
#ifndef HOLDFAST_TESTS_TESTING_PATH_OF_H_
#define HOLDFAST_TESTS_TESTING_PATH_OF_H_

#include <filesystem>
#include <string>
#include <system_error>

namespace holdfast::testing {

/// Returns the present path of the file that `fd` refers to; empty for a number without a file.
inline std::string PathOf(int fd) {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd), error);
}

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_TESTING_PATH_OF_H_
