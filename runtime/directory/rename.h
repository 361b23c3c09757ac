// Renames of directories that replace nothing.
#ifndef HOLDFAST_RUNTIME_DIRECTORY_RENAME_H_
#define HOLDFAST_RUNTIME_DIRECTORY_RENAME_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/format/directory_names.h"

namespace holdfast::directory {

/// Renames a directory within `parent`; not durable until `parent` is fsynced.
/// \error kAlreadyExists when `to` exists, kNotFound when `from` does not.
absl::Status RenameNoReplace(int parent, const std::string& from, const std::string& to);

/// Renames to `wanted`'s name, or, if the name is taken, to the next free digits. Returns the name.
absl::StatusOr<std::string> RenameToFree(int parent, const std::string& from,
                                         format::DirectoryName wanted);

}  // namespace holdfast::directory

#endif  // HOLDFAST_RUNTIME_DIRECTORY_RENAME_H_
