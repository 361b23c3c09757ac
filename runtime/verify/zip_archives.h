// Where the zip archives of a file lie and what their records must sum to. A torch.save file is one
// archive; a .distcp file of PyTorch DCP is several, one after the other.
#ifndef HOLDFAST_RUNTIME_VERIFY_ZIP_ARCHIVES_H_
#define HOLDFAST_RUNTIME_VERIFY_ZIP_ARCHIVES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/format/torch_zip.h"

namespace holdfast::verify {

/// Bytes that belong to no archive that can be understood.
struct ZipGap {
  uint64_t begin = 0;
  uint64_t end = 0;
  absl::Status why;            ///< Why no archive ends there.
  bool begins_as_zip = false;  ///< There once was one: a local header stands at its begin.
};

struct ZipArchives {
  uint32_t archives = 0;
  std::vector<format::ZipRecord> records;  ///< By place in the file; `begin` is of the data.
  std::vector<ZipGap> gaps;
};

/// Walks from the file's end to its begin, because only an archive's end says where it begins.
/// Reads a small multiple of the file's bytes, whatever they are: beyond it, the rest of the file
/// is a gap with the code kResourceExhausted. \error when reading fails; what is wrong with the
/// structure is in the gaps.
absl::StatusOr<ZipArchives> FindZipArchives(int file, const std::string& name, uint64_t file_bytes);

}  // namespace holdfast::verify

#endif  // HOLDFAST_RUNTIME_VERIFY_ZIP_ARCHIVES_H_
