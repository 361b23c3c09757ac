#include "tools/bench/scratch.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"

namespace holdfast::bench {

Scratch::Scratch(std::string path, int fd, uint32_t settle_ms)
    : path_(std::move(path)), fd_(fd), settle_ms_(settle_ms) {}

Scratch::Scratch(Scratch&& other) noexcept
    : path_(std::exchange(other.path_, "")),
      fd_(std::exchange(other.fd_, -1)),
      settle_ms_(other.settle_ms_) {}

Scratch::~Scratch() {
  if (fd_ >= 0) close(fd_);
  std::error_code ignored;
  if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
}

absl::StatusOr<Scratch> Scratch::Make(const std::string& directory, uint64_t bytes_needed,
                                      uint32_t settle_ms) {
  std::error_code error;
  const std::filesystem::space_info space = std::filesystem::space(directory, error);
  if (!error && space.available < bytes_needed) {
    return absl::ResourceExhaustedError(
        absl::StrCat("measure in ", directory, ": ", space.available, " bytes are free, ",
                     bytes_needed, " are needed; give less --bytes or another --dir"));
  }
  std::string path = absl::StrCat(directory, "/holdfast-bench-XXXXXX");
  if (mkdtemp(path.data()) == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("make a directory in ", directory, ": ", std::strerror(errno)));
  }
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  return Scratch(path, fd, settle_ms);
}

void Scratch::Empty() const {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(path_, ignored)) {
    std::filesystem::remove_all(entry.path(), ignored);
  }
  syncfs(fd_);
  std::this_thread::sleep_for(std::chrono::milliseconds(settle_ms_));
}

}  // namespace holdfast::bench
