// Which names a file of a checkpoint may have.
#ifndef HOLDFAST_RUNTIME_FORMAT_FILE_NAMES_H_
#define HOLDFAST_RUNTIME_FORMAT_FILE_NAMES_H_

#include "absl/strings/string_view.h"

namespace holdfast::format {

/// Null if `name` is one path component that cannot lead out of a directory, otherwise what is
/// wrong with it: empty, "." or "..", a '/', a zero byte, not UTF-8 (it stands in JSON), over 255
/// bytes.
const char* WrongComponent(absl::string_view name);

/// As WrongComponent, and not a name that Holdfast itself gives to files in the same directory: a
/// rank manifest's, or one ending in ".tmp".
const char* WrongDataFileName(absl::string_view name);

/// As WrongDataFileName, for a file that is still to be written: it is NAME.tmp first.
const char* WrongNewFileName(absl::string_view name);

}  // namespace holdfast::format

#endif  // HOLDFAST_RUNTIME_FORMAT_FILE_NAMES_H_
