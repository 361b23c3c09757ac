// Names of errors without strerror(3), which reads the locale.
#include "io_uring/text.h"

#include <string.h>

// The C library has it from 2.32 on. In front of an older one the symbol is null.
#pragma weak strerrorname_np

namespace holdfast::io {

Text& Text::AddError(int error) {
  const char* name = strerrorname_np != nullptr ? strerrorname_np(error) : nullptr;
  return name != nullptr ? Add(name) : Add("errno ").Add(static_cast<uint64_t>(error));
}

}  // namespace holdfast::io
