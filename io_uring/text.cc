// Names of errors without strerror(3), which reads the locale.
#include "io_uring/text.h"

#include <string.h>

namespace holdfast::io {

Text& Text::AddError(int error) {
  const char* name = strerrorname_np(error);
  return name != nullptr ? Add(name) : Add("errno ").Add(static_cast<uint64_t>(error));
}

}  // namespace holdfast::io
