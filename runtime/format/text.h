// Text that goes into headers, manifests and messages: UTF-8, JSON strings, quoted names.
#ifndef HOLDFAST_RUNTIME_FORMAT_TEXT_H_
#define HOLDFAST_RUNTIME_FORMAT_TEXT_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace holdfast::format {

/// Whether `text` is UTF-8 as the Unicode standard has it: shortest forms only, no surrogates,
/// nothing over U+10FFFF.
bool IsUtf8(absl::string_view text);

/// Appends `text`, which is UTF-8, as a JSON string, quotes included. Quote, backslash and control
/// characters are escaped, everything else stands as it is.
void AppendJsonString(absl::string_view text, std::string* out);

/// Appends `value` in decimal.
void AppendNumber(uint64_t value, std::string* out);

/// Appends "[2,3]"; dimensions are not negative.
void AppendShape(absl::Span<const int64_t> shape, std::string* out);

/// `"name"` for a message: control characters escaped, cut after 200 bytes.
std::string Quoted(absl::string_view name);

}  // namespace holdfast::format

#endif  // HOLDFAST_RUNTIME_FORMAT_TEXT_H_
