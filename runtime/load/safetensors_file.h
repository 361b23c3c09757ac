// The header of a safetensors file on disk.
#ifndef HOLDFAST_RUNTIME_LOAD_SAFETENSORS_FILE_H_
#define HOLDFAST_RUNTIME_LOAD_SAFETENSORS_FILE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "holdfast/pod.h"
#include "runtime/format/safetensors.h"

namespace holdfast::load {

struct SafetensorsFile {
  uint64_t bytes = 0;  ///< Of the whole file.
  format::SafetensorsHeader header;

  /// The attempt id in the metadata; "" for a file of another writer.
  std::string attempt() const;
  /// The same as a number; none where it is malformed, too.
  std::optional<AttemptId> attempt_id() const;
};

/// Reads and checks the header of the regular file `fd`.
/// \error kDataLoss when the structure is wrong; errors of reading.
absl::StatusOr<SafetensorsFile> ReadSafetensorsFile(int fd, const std::string& name);

}  // namespace holdfast::load

#endif  // HOLDFAST_RUNTIME_LOAD_SAFETENSORS_FILE_H_
