// Finds the zip archives of a file, and the CRC32s of their records. A torch.save file is one
// archive. A .distcp file of PyTorch DCP is a sequence of archives.
#ifndef HOLDFAST_RUNTIME_VERIFY_ZIP_ARCHIVES_H_
#define HOLDFAST_RUNTIME_VERIFY_ZIP_ARCHIVES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/format/torch_zip.h"

namespace holdfast::verify {

/// The first bytes of an archive: of its first record's local header.
constexpr char kZipSignature[] = "PK\x03\x04";

/// Bytes outside every readable archive.
struct ZipGap {
  uint64_t begin = 0;
  uint64_t end = 0;
  absl::Status why;            ///< Why no archive ends at the gap's end.
  bool begins_as_zip = false;  ///< A former archive: a local header stands at the gap's begin.
};

struct ZipArchives {
  uint32_t archives = 0;
  /// By place in the file; `begin` is the first byte of data.
  std::vector<format::ZipRecord> records;
  std::vector<ZipGap> gaps;
};

/// Walks from the file's end to its begin, because only the end of an archive records its begin.
/// Reads at most a small multiple of the file's bytes. Beyond the limit, the rest of the file is a
/// gap with the code kResourceExhausted. Faults of the structure are in the gaps.
/// \error when reading fails.
absl::StatusOr<ZipArchives> FindZipArchives(int file, const std::string& name, uint64_t file_bytes);

}  // namespace holdfast::verify

#endif  // HOLDFAST_RUNTIME_VERIFY_ZIP_ARCHIVES_H_
