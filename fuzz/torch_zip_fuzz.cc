// The zip reader, through all its steps, on a file of exactly the input's bytes. Its time is linear
// in them.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "fuzz/expect.h"
#include "fuzz/time_bound.h"
#include "runtime/format/torch_zip.h"

// The end records, and the longest comment.
constexpr size_t kTailBytes = 98 + 65535;

static void Check(const uint8_t* data, size_t bytes) {
  using namespace holdfast::format;  // NOLINT: a fuzzer of this namespace
  const absl::string_view file(reinterpret_cast<const char*>(data), bytes);
  const size_t tail = std::min<size_t>(bytes, kTailBytes);
  const auto where = FindZipDirectory(file.substr(bytes - tail), bytes);
  const auto length = ZipLength(file.substr(bytes - tail));
  if (length.ok()) HOLDFAST_EXPECT(*length >= 22);
  if (!where.ok()) return;
  HOLDFAST_EXPECT(length.ok() && *length == bytes);
  HOLDFAST_EXPECT(where->begin <= bytes && where->bytes <= bytes - where->begin);
  auto records = ParseZipDirectory(file.substr(where->begin, where->bytes), *where, bytes);
  if (!records.ok()) return;
  for (ZipRecord& record : *records) {
    HOLDFAST_EXPECT(record.begin <= where->begin && record.bytes <= where->begin - record.begin);
    const auto header = LocalHeaderBytes(file.substr(record.begin), record.name);
    if (!header.ok()) return;
    record.begin += *header;
  }
  if (!CheckZipLayout(*records, *where).ok()) return;
  uint64_t total = 0;
  for (const ZipRecord& record : *records) {
    HOLDFAST_EXPECT(record.begin <= bytes && record.bytes <= bytes - record.begin);
    total += record.bytes;
    Crc32(0, file.data() + record.begin, record.bytes);
  }
  HOLDFAST_EXPECT(total <= bytes);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  holdfast::fuzz::ExpectLinearTime(bytes, [&] { Check(data, bytes); });
  return 0;
}
