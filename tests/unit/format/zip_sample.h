// Writes zip files the way that torch.save does, with every field open to change.
#ifndef HOLDFAST_TESTS_UNIT_FORMAT_ZIP_SAMPLE_H_
#define HOLDFAST_TESTS_UNIT_FORMAT_ZIP_SAMPLE_H_

#include <cstdint>
#include <string>
#include <vector>

namespace holdfast::format {

struct ZipSampleRecord {
  std::string name;
  std::string data;
  bool zip64 = false;  ///< Sizes and place in a zip64 field of the directory.
  uint16_t method = 0;
  uint16_t flags = 0x0808;  ///< Data descriptor, UTF-8 name.
};

struct ZipSample {
  std::vector<ZipSampleRecord> records;
  bool zip64_end = true;  ///< As torch writes it.
  std::string comment;

  std::string Write() const;
};

}  // namespace holdfast::format

#endif  // HOLDFAST_TESTS_UNIT_FORMAT_ZIP_SAMPLE_H_
