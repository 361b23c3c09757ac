#include "runtime/base/check.h"

#include <cstdio>
#include <cstdlib>

namespace holdfast::base {

void CheckFailed(const char* file, int line, const char* condition, const char* why) {
  std::fprintf(stderr, "holdfast: %s:%d: check failed: %s: %s\n", file, line, condition, why);
  std::abort();
}

}  // namespace holdfast::base
