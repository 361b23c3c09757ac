#include "tests/unit/format/zip_sample.h"

#include <algorithm>

#include "runtime/format/torch_zip.h"

namespace holdfast::format {
namespace {

class Bytes {
 public:
  void Put(uint64_t value, size_t width) {
    for (; width-- > 0; value >>= 8) text.push_back(static_cast<char>(value));
  }
  std::string text;
};

void PutRecord(const ZipSampleRecord& record, uint64_t place, Bytes* out) {
  const uint64_t size = record.data.size();
  out->Put(0x02014b50, 4);
  out->Put(0, 4);  // versions
  out->Put(record.flags, 2);
  out->Put(record.method, 2);
  out->Put(0, 4);  // time and date
  out->Put(Crc32(0, record.data.data(), size), 4);
  out->Put(record.zip64 ? 0xffffffff : size, 4);
  out->Put(record.zip64 ? 0xffffffff : size, 4);
  out->Put(record.name.size(), 2);
  out->Put(record.zip64 ? 28 : 0, 2);
  out->Put(0, 2);  // comment
  out->Put(0, 8);  // disk, attributes
  out->Put(record.zip64 ? 0xffffffff : place, 4);
  out->text += record.name;
  if (record.zip64) {
    out->Put(1, 2);
    out->Put(24, 2);
    out->Put(size, 8);
    out->Put(size, 8);
    out->Put(place, 8);
  }
}

}  // namespace

std::string ZipSample::Write() const {
  Bytes out;
  std::vector<uint64_t> places;
  for (const ZipSampleRecord& record : records) {
    places.push_back(out.text.size());
    // torch pads with an "FB" field so that data begins at a multiple of 64.
    const size_t padding = 64 - (out.text.size() + 30 + record.name.size() + 4) % 64;
    out.Put(0x04034b50, 4);
    out.Put(0, 2);
    out.Put(record.flags, 2);
    out.Put(record.method, 2);
    out.Put(0, 16);  // time, date, CRC and sizes: in the descriptor
    out.Put(record.name.size(), 2);
    out.Put(4 + padding, 2);
    out.text += record.name;
    out.text += "FB";
    out.Put(padding, 2);
    out.text += std::string(padding, 'Z') + record.data;
    out.Put(0x08074b50, 4);
    out.Put(Crc32(0, record.data.data(), record.data.size()), 4);
    out.Put(record.data.size(), 4);
    out.Put(record.data.size(), 4);
  }
  const uint64_t begin = out.text.size();
  for (size_t i = 0; i < records.size(); ++i) PutRecord(records[i], places[i], &out);
  const uint64_t end = out.text.size();
  if (zip64_end) {
    out.Put(0x06064b50, 4);
    out.Put(44, 8);
    out.Put(0, 4);  // versions
    out.Put(0, 8);  // disks
    out.Put(records.size(), 8);
    out.Put(records.size(), 8);
    out.Put(end - begin, 8);
    out.Put(begin, 8);
    out.Put(0x07064b50, 4);
    out.Put(0, 4);
    out.Put(end, 8);
    out.Put(1, 4);
  }
  out.Put(0x06054b50, 4);
  out.Put(0, 4);  // disks
  out.Put(std::min<size_t>(records.size(), 0xffff), 2);
  out.Put(std::min<size_t>(records.size(), 0xffff), 2);
  out.Put(end - begin, 4);
  out.Put(begin, 4);
  out.Put(comment.size(), 2);
  return out.text + comment;
}

}  // namespace holdfast::format
