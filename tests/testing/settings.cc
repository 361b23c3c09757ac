#include "tests/testing/settings.h"

#include <linux/io_uring.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

namespace holdfast::testing {

std::string WhyNoRing(EngineRung engine) {
  if (engine == EngineRung::kPwrite || engine == EngineRung::kAuto) return "";
  io_uring_params parameters = {};
  const long fd = ::syscall(SYS_io_uring_setup, 1, &parameters);
  if (fd >= 0) {
    ::close(static_cast<int>(fd));
    return "";
  }
  // Other errors fail the test.
  if (errno == ENOSYS) return "no io_uring here: ENOSYS";
  return errno == EPERM ? "no io_uring here: EPERM" : "";
}

}  // namespace holdfast::testing
