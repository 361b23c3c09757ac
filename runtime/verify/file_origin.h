// The save of a file that is saved by itself, by the file's own bytes.
#ifndef HOLDFAST_RUNTIME_VERIFY_FILE_ORIGIN_H_
#define HOLDFAST_RUNTIME_VERIFY_FILE_ORIGIN_H_

#include <string>

#include "absl/status/statusor.h"
#include "runtime/directory/single_files.h"

namespace holdfast::verify {

/// A torch file and a safetensors file hold the attempt of their save. Only that of a whole torch
/// file is certain, because a CRC-32 covers it.
absl::StatusOr<directory::FileOrigin> OriginOf(int directory, const std::string& name);

}  // namespace holdfast::verify

#endif  // HOLDFAST_RUNTIME_VERIFY_FILE_ORIGIN_H_
