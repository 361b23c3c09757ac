// The zip framing of torch.save files: the place and the CRC32 of each record. Pickles are not
// read.
#ifndef HOLDFAST_RUNTIME_FORMAT_TORCH_ZIP_H_
#define HOLDFAST_RUNTIME_FORMAT_TORCH_ZIP_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace holdfast::format {

struct ZipRecord {
  std::string name;
  uint64_t begin = 0;  ///< First byte of its data in the file.
  uint64_t bytes = 0;
  uint32_t crc32 = 0;
};

/// The place of the central directory and the number of its records.
struct ZipDirectory {
  uint64_t begin = 0;
  uint64_t bytes = 0;
  uint64_t records = 0;
};

/// Finds the directory in the last bytes of a file of `file_bytes`. \error kDataLoss if the last
/// bytes are no end record, or the directory does not end directly in front of the end record.
absl::StatusOr<ZipDirectory> FindZipDirectory(absl::string_view tail, uint64_t file_bytes);

/// Returns the length of the archive that ends with `tail`, its end record. For a file of several
/// archives, whose offsets count from each archive's own begin. For FindZipDirectory that many last
/// bytes are then a separate file. \error kDataLoss as there.
absl::StatusOr<uint64_t> ZipLength(absl::string_view tail);

/// Returns the records of the directory, in its order. `begin` is still the local header's offset:
/// the caller adds LocalHeaderBytes. \error kUnimplemented for a compressed or encrypted record
/// (torch.save stores); kDataLoss with record and cause.
absl::StatusOr<std::vector<ZipRecord>> ParseZipDirectory(absl::string_view directory,
                                                         const ZipDirectory& where,
                                                         uint64_t file_bytes);

/// The number of bytes of a local header that LocalHeaderBytes needs, beside the record's name.
inline constexpr uint64_t kZipLocalHeaderBytes = 30;

/// Returns the length of a local header (30 + name + extra) from its first bytes. \error kDataLoss
/// if no header is there, or if it names another record than `name`: readers differ in the name
/// that they trust.
absl::StatusOr<uint64_t> LocalHeaderBytes(absl::string_view first, absl::string_view name);

/// Checks that no two records overlap and that all lie in front of the directory. `begin` is the
/// first byte of data or of the local header.
absl::Status CheckZipLayout(const std::vector<ZipRecord>& records, const ZipDirectory& where);

/// CRC-32 (IEEE, as zip), continuing from `crc`.
uint32_t Crc32(uint32_t crc, const void* data, size_t bytes);

/// CRC-32 of A followed by B, from both CRCs and B's length.
uint32_t Crc32Combine(uint32_t a, uint32_t b, uint64_t b_bytes);

}  // namespace holdfast::format

#endif  // HOLDFAST_RUNTIME_FORMAT_TORCH_ZIP_H_
