#include "tests/testing/zip_files.h"

#include "runtime/format/torch_zip.h"

namespace holdfast::testing {
namespace {

void Put(uint64_t value, int width, std::string* out) {
  // A field may be wider than the value: a shift by its width or more is undefined.
  for (int i = 0; i < width; ++i, value = value >> 4 >> 4) out->push_back(static_cast<char>(value));
}

}  // namespace

std::string ZipArchive(const std::vector<ZipEntry>& entries, const ZipStyle& style) {
  std::string out;
  std::string directory;
  for (const ZipEntry& entry : entries) {
    const uint16_t method = &entry == &entries.front() ? style.method : 0;
    const uint32_t crc32 =
        style.record_crc32 ? format::Crc32(0, entry.data.data(), entry.data.size()) : 0;
    const uint64_t begin = out.size();
    // An extra field of id "FB" pads, as torch does.
    const uint64_t unpadded = begin + 30 + entry.name.size() + 4;
    const uint64_t padding = (64 - unpadded % 64) % 64;
    out += "PK\x03\x04";
    Put(20, 2, &out);
    Put(0x0808, 2, &out);  // a data descriptor follows; the name is UTF-8
    Put(method, 2, &out);
    Put(0, 4, &out);   // time
    Put(0, 12, &out);  // CRC32 and both sizes
    Put(entry.name.size(), 2, &out);
    Put(4 + padding, 2, &out);
    out += entry.name;
    out += "FB";
    Put(padding, 2, &out);
    out.append(padding, 'Z');
    out += entry.data;
    out += "PK\x07\x08";
    Put(crc32, 4, &out);
    Put(entry.data.size(), 4, &out);
    Put(entry.data.size(), 4, &out);

    directory += "PK\x01\x02";
    Put(20, 2, &directory);
    Put(20, 2, &directory);
    Put(0x0808, 2, &directory);
    Put(method, 2, &directory);
    Put(0, 4, &directory);
    Put(crc32, 4, &directory);
    Put(entry.data.size(), 4, &directory);
    Put(entry.data.size(), 4, &directory);
    Put(entry.name.size(), 2, &directory);
    Put(0, 12, &directory);  // no extra, no comment, disk 0, attributes (2 + 4)
    Put(begin, 4, &directory);
    directory += entry.name;
  }
  const uint64_t directory_begin = out.size();
  out += directory;
  if (style.zip64_end) {
    const uint64_t end64 = out.size();
    out += "PK\x06\x06";
    Put(44, 8, &out);
    Put(45, 2, &out);
    Put(45, 2, &out);
    Put(0, 8, &out);
    Put(entries.size(), 8, &out);
    Put(entries.size(), 8, &out);
    Put(directory.size(), 8, &out);
    Put(directory_begin, 8, &out);
    out += "PK\x06\x07";
    Put(0, 4, &out);
    Put(end64, 8, &out);
    Put(1, 4, &out);
  }
  out += "PK\x05\x06";
  Put(0, 4, &out);
  Put(entries.size(), 2, &out);
  Put(entries.size(), 2, &out);
  Put(directory.size(), 4, &out);
  Put(directory_begin, 4, &out);
  Put(style.comment.size(), 2, &out);
  return out + style.comment;
}

}  // namespace holdfast::testing
