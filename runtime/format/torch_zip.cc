// The zip framing of torch.save. Source: PKWARE APPNOTE 6.3.10, sections 4.3 and 4.5.3.
//
// Only the central directory is trusted: torch's writer leaves sizes and CRCs of local headers to
// data descriptors.
#include "runtime/format/torch_zip.h"

#include <isa-l/crc.h>
#include <zlib.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "runtime/base/status.h"
#include "runtime/format/text.h"

namespace holdfast::format {
namespace {

constexpr uint32_t kEndSignature = 0x06054b50;
constexpr uint32_t kEnd64Signature = 0x06064b50;
constexpr uint32_t kLocatorSignature = 0x07064b50;
constexpr uint32_t kRecordSignature = 0x02014b50;
constexpr uint32_t kLocalSignature = 0x04034b50;
constexpr size_t kEndBytes = 22;
constexpr size_t kEnd64Bytes = 56;
constexpr size_t kLocatorBytes = 20;
constexpr size_t kRecordBytes = 46;
constexpr size_t kLocalBytes = kZipLocalHeaderBytes;
constexpr uint32_t kIn64 = 0xffffffff;  // "see the zip64 field"
constexpr uint16_t kZip64Field = 1;
constexpr uint32_t kDirectoryAttribute = 0x10;  // of DOS; torch's reader ignores the system
constexpr uint16_t kVersionMax = 63;            // 6.3; zipfile refuses later versions
// Bit 0, strong encryption, and an encrypted directory. Bit 5 is patched data.
constexpr uint16_t kEncryptedFlags = 0x0001 | 0x0040 | 0x2000;
constexpr uint16_t kPatchedFlag = 0x0020;

absl::Status WrongZip(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("zip: ", what));
}

/// Little-endian, at `at`, which the caller has checked.
uint64_t Get(absl::string_view bytes, size_t at, size_t width) {
  uint64_t value = 0;
  for (size_t i = width; i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[at + i]);
  return value;
}
uint16_t Get16(absl::string_view bytes, size_t at) {
  return static_cast<uint16_t>(Get(bytes, at, 2));
}
uint32_t Get32(absl::string_view bytes, size_t at) {
  return static_cast<uint32_t>(Get(bytes, at, 4));
}

/// Place of the end record in `tail`: the last one whose comment ends with the file.
absl::StatusOr<size_t> FindEnd(absl::string_view tail) {
  if (tail.size() >= kEndBytes) {
    const size_t lowest = tail.size() - std::min(tail.size(), kEndBytes + 0xffff);
    for (size_t at = tail.size() - kEndBytes + 1; at-- > lowest;) {
      if (Get32(tail, at) != kEndSignature) continue;
      if (Get16(tail, at + 20) == tail.size() - at - kEndBytes) return at;
    }
  }
  return WrongZip("no end record: this is not a zip file, or its end is missing");
}

/// The zip64 end record has the values that the old record has no room for. A value in the old
/// record must agree.
absl::StatusOr<ZipDirectory> ReadEnd64(absl::string_view tail, size_t end, uint64_t tail_begin) {
  const size_t locator = end - kLocatorBytes;
  const uint64_t place = Get(tail, locator + 8, 8);
  if (Get32(tail, locator + 4) != 0 || Get32(tail, locator + 16) > 1) {
    return absl::UnimplementedError("zip: it spans several disks");
  }
  if (locator < kEnd64Bytes || place != tail_begin + locator - kEnd64Bytes) {
    return WrongZip(absl::StrCat("the zip64 end record is said to be at byte ", place,
                                 ", not in front of its locator"));
  }
  const size_t at = locator - kEnd64Bytes;
  if (Get32(tail, at) != kEnd64Signature || Get(tail, at + 4, 8) != kEnd64Bytes - 12) {
    return WrongZip(absl::StrCat("no zip64 end record at byte ", place));
  }
  if (Get32(tail, at + 16) != 0 || Get32(tail, at + 20) != 0) {
    return absl::UnimplementedError("zip: it spans several disks");
  }
  ZipDirectory directory;
  directory.records = Get(tail, at + 32, 8);
  directory.bytes = Get(tail, at + 40, 8);
  directory.begin = Get(tail, at + 48, 8);
  const auto agree = [](uint64_t old, uint64_t all_ones, uint64_t value) {
    return old == all_ones || old == value;
  };
  if (Get(tail, at + 24, 8) != directory.records ||
      !agree(Get16(tail, end + 8), 0xffff, directory.records) ||
      !agree(Get16(tail, end + 10), 0xffff, directory.records) ||
      !agree(Get32(tail, end + 12), kIn64, directory.bytes) ||
      !agree(Get32(tail, end + 16), kIn64, directory.begin)) {
    return WrongZip("its two end records disagree");
  }
  return directory;
}

absl::StatusOr<ZipDirectory> ReadEnd(absl::string_view tail, size_t end) {
  if (Get16(tail, end + 4) != 0 || Get16(tail, end + 6) != 0) {
    return absl::UnimplementedError("zip: it spans several disks");
  }
  ZipDirectory directory;
  directory.records = Get16(tail, end + 10);
  directory.bytes = Get32(tail, end + 12);
  directory.begin = Get32(tail, end + 16);
  if (Get16(tail, end + 8) != directory.records)
    return WrongZip("its end record disagrees with itself");
  return directory;
}

/// Replaces the record's values that stand in its zip64 field.
absl::Status ReadZip64(absl::string_view extra, uint64_t* unpacked, uint64_t* packed,
                       uint64_t* local) {
  bool found = false;
  while (extra.size() >= 4) {
    const uint16_t id = Get16(extra, 0);
    const size_t bytes = Get16(extra, 2);
    extra.remove_prefix(4);
    if (bytes > extra.size()) return WrongZip("an extra field goes beyond its record");
    if (id == kZip64Field) {
      if (found) return WrongZip("two zip64 fields");
      found = true;
      absl::string_view field = extra.substr(0, bytes);
      for (uint64_t* value : {unpacked, packed, local}) {
        if (*value != kIn64) continue;
        if (field.size() < 8) return WrongZip("a zip64 field is too short");
        *value = Get(field, 0, 8);
        field.remove_prefix(8);
      }
    }
    extra.remove_prefix(bytes);
  }
  // Some writers pad with less than a field's head; the padding has no meaning.
  return absl::OkStatus();
}

/// Checks the fields of a directory record that make torch's reader or Python's zipfile refuse or
/// skip its data.
absl::Status CheckReadable(absl::string_view record, absl::string_view name) {
  if ((Get16(record, 8) & (kEncryptedFlags | kPatchedFlag)) != 0 || Get16(record, 10) != 0) {
    return absl::UnimplementedError(
        absl::StrCat("zip: ", Quoted(name), " is compressed or encrypted"));
  }
  if ((Get16(record, 6) & 0xff) > kVersionMax) {
    return absl::UnimplementedError(
        absl::StrCat("zip: ", Quoted(name), " needs a later version of zip"));
  }
  if (Get16(record, 34) != 0) return absl::UnimplementedError("zip: it spans several disks");
  return absl::OkStatus();
}

/// Returns true for a record that readers take for a directory: they return no data of it, without
/// an error.
bool IsDirectory(absl::string_view record, absl::string_view name) {
  return (Get32(record, 38) & kDirectoryAttribute) != 0 || (!name.empty() && name.back() == '/');
}

}  // namespace

absl::StatusOr<ZipDirectory> FindZipDirectory(absl::string_view tail, uint64_t file_bytes) {
  if (tail.size() > file_bytes) {
    return absl::InvalidArgumentError("zip: more bytes given than the file has");
  }
  const uint64_t tail_begin = file_bytes - tail.size();
  HOLDFAST_ASSIGN_OR_RETURN(const size_t end, FindEnd(tail));
  const bool zip64 = end >= kLocatorBytes && Get32(tail, end - kLocatorBytes) == kLocatorSignature;
  HOLDFAST_ASSIGN_OR_RETURN(const ZipDirectory directory,
                            zip64 ? ReadEnd64(tail, end, tail_begin) : ReadEnd(tail, end));
  // The directory must end exactly at the end records' begin: no bytes in between, and no bytes
  // added in front of the file.
  const uint64_t ends = tail_begin + (zip64 ? end - kLocatorBytes - kEnd64Bytes : end);
  if (directory.begin > ends || directory.bytes != ends - directory.begin) {
    return WrongZip(absl::StrCat("a directory of ", directory.bytes, " bytes at byte ",
                                 directory.begin, " does not end at byte ", ends));
  }
  if (directory.records > directory.bytes / kRecordBytes) {
    return WrongZip(absl::StrCat(directory.records, " records do not fit a directory of ",
                                 directory.bytes, " bytes"));
  }
  return directory;
}

absl::StatusOr<uint64_t> ZipLength(absl::string_view tail) {
  HOLDFAST_ASSIGN_OR_RETURN(const size_t end, FindEnd(tail));
  uint64_t directory_bytes = Get32(tail, end + 12);
  uint64_t directory_begin = Get32(tail, end + 16);
  uint64_t after = tail.size() - end;
  if (end >= kLocatorBytes + kEnd64Bytes && Get32(tail, end - kLocatorBytes) == kLocatorSignature) {
    const size_t end64 = end - kLocatorBytes - kEnd64Bytes;
    if (Get32(tail, end64) != kEnd64Signature) return WrongZip("no zip64 end record");
    directory_bytes = Get(tail, end64 + 40, 8);
    directory_begin = Get(tail, end64 + 48, 8);
    after += kLocatorBytes + kEnd64Bytes;
  }
  const uint64_t limit = ~uint64_t{0} - after;
  if (directory_begin > limit || directory_bytes > limit - directory_begin) {
    return WrongZip("its directory goes beyond any file");
  }
  return directory_begin + directory_bytes + after;
}

absl::StatusOr<std::vector<ZipRecord>> ParseZipDirectory(absl::string_view directory,
                                                         const ZipDirectory& where,
                                                         uint64_t file_bytes) {
  if (directory.size() != where.bytes || where.begin > file_bytes ||
      where.bytes > file_bytes - where.begin || where.records > where.bytes / kRecordBytes) {
    return absl::InvalidArgumentError("zip: these are not the directory's bytes");
  }
  std::vector<ZipRecord> records;
  records.reserve(where.records);
  absl::flat_hash_set<std::string> names;
  absl::string_view rest = directory;
  for (uint64_t i = 0; i < where.records; ++i) {
    const auto wrong = [&](absl::string_view what) {
      return WrongZip(absl::StrCat("record ", i, " at byte ",
                                   where.begin + (directory.size() - rest.size()), ": ", what));
    };
    if (rest.size() < kRecordBytes || Get32(rest, 0) != kRecordSignature) {
      return wrong("no directory record");
    }
    const size_t name_bytes = Get16(rest, 28);
    const size_t extra_bytes = Get16(rest, 30);
    const size_t record_bytes = kRecordBytes + name_bytes + extra_bytes + Get16(rest, 32);
    if (record_bytes > rest.size()) return wrong("it goes beyond the directory");
    ZipRecord record;
    record.name = std::string(rest.substr(kRecordBytes, name_bytes));
    if (!IsUtf8(record.name)) return wrong("its name is no UTF-8");
    record.crc32 = Get32(rest, 16);
    uint64_t packed = Get32(rest, 20);
    record.bytes = Get32(rest, 24);
    record.begin = Get32(rest, 42);
    HOLDFAST_RETURN_IF_ERROR(CheckReadable(rest, record.name));
    const absl::Status zip64 = ReadZip64(rest.substr(kRecordBytes + name_bytes, extra_bytes),
                                         &record.bytes, &packed, &record.begin);
    if (!zip64.ok()) return base::Annotate(zip64, Quoted(record.name));
    if (packed != record.bytes) return wrong("it is stored, but its two sizes differ");
    if (record.bytes > 0 && IsDirectory(rest, record.name)) {
      return wrong(absl::StrCat(Quoted(record.name), " is marked as a directory, but has ",
                                record.bytes, " bytes, which readers leave out"));
    }
    // The local header is at least as long as the fixed part and the name.
    const uint64_t header_bytes = kLocalBytes + name_bytes;
    if (record.begin > where.begin || where.begin - record.begin < header_bytes ||
        record.bytes > where.begin - record.begin - header_bytes) {
      return wrong(absl::StrCat(Quoted(record.name), " of ", record.bytes, " bytes at byte ",
                                record.begin, " reaches into the directory"));
    }
    if (!names.insert(record.name).second) {
      return wrong(absl::StrCat("the name ", Quoted(record.name), " occurs twice"));
    }
    records.push_back(std::move(record));
    rest.remove_prefix(record_bytes);
  }
  if (!rest.empty()) {
    return WrongZip(absl::StrCat(rest.size(), " bytes after the directory's last record"));
  }
  return records;
}

absl::StatusOr<uint64_t> LocalHeaderBytes(absl::string_view first, absl::string_view name) {
  if (first.size() < kLocalBytes || Get32(first, 0) != kLocalSignature) {
    return WrongZip("no local header");
  }
  if (Get16(first, 26) != name.size() || first.substr(kLocalBytes, name.size()) != name) {
    return WrongZip(absl::StrCat("the local header of ", Quoted(name), " has another name"));
  }
  return kLocalBytes + Get16(first, 26) + Get16(first, 28);
}

absl::Status CheckZipLayout(const std::vector<ZipRecord>& records, const ZipDirectory& where) {
  std::vector<const ZipRecord*> order;
  order.reserve(records.size());
  for (const ZipRecord& record : records) order.push_back(&record);
  std::sort(order.begin(), order.end(), [](const ZipRecord* a, const ZipRecord* b) {
    return std::pair(a->begin, a->bytes) < std::pair(b->begin, b->bytes);
  });
  for (size_t i = 0; i < order.size(); ++i) {
    const uint64_t limit = i + 1 < order.size() ? order[i + 1]->begin : where.begin;
    if (order[i]->begin > limit || order[i]->bytes > limit - order[i]->begin) {
      return WrongZip(absl::StrCat(Quoted(order[i]->name), " of ", order[i]->bytes,
                                   " bytes at byte ", order[i]->begin, " overlaps what begins at ",
                                   limit));
    }
  }
  return absl::OkStatus();
}

uint32_t Crc32(uint32_t crc, const void* data, size_t bytes) {
  // Uses the widest carry-less multiply of this CPU: five times as fast as zlib's.
  return crc32_gzip_refl(crc, static_cast<const unsigned char*>(data), bytes);
}

uint32_t Crc32Combine(uint32_t a, uint32_t b, uint64_t b_bytes) {
  return static_cast<uint32_t>(crc32_combine(a, b, static_cast<z_off_t>(b_bytes)));
}

}  // namespace holdfast::format
