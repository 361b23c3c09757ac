// The zip framing of torch.save files: where records lie and which CRC32 each must have. Nothing is
// unpickled.
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

/// How many bytes at the end of a file ParseZipDirectory wants to see first: end record and zip64
/// locator.
inline constexpr uint64_t kZipTailBytes = 22 + 65535 + 20 + 56;

/// Where the central directory lies, and of how many records.
struct ZipDirectory {
  uint64_t begin = 0;
  uint64_t bytes = 0;
  uint64_t records = 0;
};

/// Finds it in the last bytes of a file of `file_bytes`. \error kDataLoss if the last bytes are no
/// end record, or the directory does not end right in front of it.
absl::StatusOr<ZipDirectory> FindZipDirectory(absl::string_view tail, uint64_t file_bytes);

/// Length of the archive that ends with `tail`, its end record. For archives that stand one after
/// the other in a file, where offsets count from each one's own begin: that many last bytes
/// are then a file of their own to FindZipDirectory. \error kDataLoss as there.
absl::StatusOr<uint64_t> ZipLength(absl::string_view tail);

/// Records of the directory, in its order; `begin` is still the local header's offset: the caller
/// adds LocalHeaderBytes. \error kUnimplemented for a record that is compressed or encrypted
/// (torch.save stores), kDataLoss saying which record and why.
absl::StatusOr<std::vector<ZipRecord>> ParseZipDirectory(absl::string_view directory,
                                                         const ZipDirectory& where,
                                                         uint64_t file_bytes);

/// How many bytes of a local header LocalHeaderBytes wants to see, beside the record's name.
inline constexpr uint64_t kZipLocalHeaderBytes = 30;

/// Length of a local header (30 + name + extra) from its first bytes. \error kDataLoss if there is
/// none, or if it names another record than `name`: readers differ in which name they believe.
absl::StatusOr<uint64_t> LocalHeaderBytes(absl::string_view first, absl::string_view name);

/// Whether the records lie one after the other in front of the directory; `begin` is the first byte
/// of data or of the local header, either way no two may overlap.
absl::Status CheckZipLayout(const std::vector<ZipRecord>& records, const ZipDirectory& where);

/// CRC-32 (IEEE, as zip), continuing from `crc`.
uint32_t Crc32(uint32_t crc, const void* data, size_t bytes);

/// CRC-32 of A followed by B, from those of A and B and B's length.
uint32_t Crc32Combine(uint32_t a, uint32_t b, uint64_t b_bytes);

}  // namespace holdfast::format

#endif  // HOLDFAST_RUNTIME_FORMAT_TORCH_ZIP_H_
