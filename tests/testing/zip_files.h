// Zip archives in torch.save's format, for tests of readers.
#ifndef HOLDFAST_TESTS_TESTING_ZIP_FILES_H_
#define HOLDFAST_TESTS_TESTING_ZIP_FILES_H_

#include <cstdint>
#include <string>
#include <vector>

namespace holdfast::testing {

struct ZipEntry {
  std::string name;
  std::string data;
};

struct ZipStyle {
  bool zip64_end = true;     ///< A zip64 end record and its locator, as torch always writes.
  bool record_crc32 = true;  ///< False: 0, as with set_crc32_options(False).
  uint16_t method = 0;  ///< Method of the first entry; 0 is stored. The data is never compressed.
  std::string comment;
};

/// Local headers have no sizes and no CRC32s: data descriptors and the directory hold both. Data
/// begins at multiples of 64.
std::string ZipArchive(const std::vector<ZipEntry>& entries, const ZipStyle& style);

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_TESTING_ZIP_FILES_H_
