// Words in messages.
#ifndef HOLDFAST_RUNTIME_BASE_TEXT_H_
#define HOLDFAST_RUNTIME_BASE_TEXT_H_

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace holdfast::base {

/// Returns "1 save", "2 saves".
inline std::string Counted(uint64_t number, absl::string_view noun) {
  return absl::StrCat(number, " ", noun, number == 1 ? "" : "s");
}

}  // namespace holdfast::base

#endif  // HOLDFAST_RUNTIME_BASE_TEXT_H_
