#include "runtime/format/torch_zip.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/format/zip_sample.h"

namespace holdfast::format {
namespace {

using ::testing::HasSubstr;

ZipSample Sample() {
  ZipSample sample;
  sample.records = {{.name = "archive/data.pkl", .data = "pickle"},
                    {.name = "archive/data/0", .data = std::string(1000, 'x'), .zip64 = true},
                    {.name = "archive/version", .data = "3\n"},
                    {.name = "archive/empty", .data = ""}};
  return sample;
}

/// Everything that a reader of a file does, in order.
absl::StatusOr<std::vector<ZipRecord>> Read(const std::string& file) {
  constexpr size_t kTailBytes = 22 + 65535 + 20 + 56;  // end record, its comment, zip64 records
  const size_t tail = std::min(file.size(), kTailBytes);
  const auto directory =
      FindZipDirectory(absl::string_view(file).substr(file.size() - tail), file.size());
  if (!directory.ok()) return directory.status();
  auto records = ParseZipDirectory(
      absl::string_view(file).substr(directory->begin, directory->bytes), *directory, file.size());
  if (!records.ok()) return records.status();
  for (ZipRecord& record : *records) {
    const auto header = LocalHeaderBytes(absl::string_view(file).substr(record.begin), record.name);
    if (!header.ok()) return header.status();
    record.begin += *header;
  }
  const absl::Status layout = CheckZipLayout(*records, *directory);
  if (!layout.ok()) return layout;
  return records;
}

void ExpectRefused(const std::string& file, const std::string& what,
                   absl::StatusCode code = absl::StatusCode::kDataLoss) {
  const auto records = Read(file);
  EXPECT_EQ(records.status().code(), code) << records.status();
  EXPECT_THAT(std::string(records.status().message()), HasSubstr(what));
}

/// `file` with `bytes` put at the place of the `skip`th from last occurrence of `signature`, plus
/// `offset`.
std::string Patch(std::string file, const std::string& signature, size_t offset,
                  const std::string& bytes) {
  const size_t at = file.rfind(signature);
  EXPECT_NE(at, std::string::npos);
  return file.replace(at + offset, bytes.size(), bytes);
}

constexpr char kEnd[] = "PK\x05\x06";
constexpr char kEnd64[] = "PK\x06\x06";
constexpr char kLocator[] = "PK\x06\x07";
constexpr char kRecord[] = "PK\x01\x02";

TEST(TorchZip, FindsEveryRecordsBytes) {
  for (const bool zip64_end : {true, false}) {
    for (const std::string& comment : {std::string(), std::string("PK\x05\x06 not the end")}) {
      ZipSample sample = Sample();
      sample.zip64_end = zip64_end;
      sample.comment = comment;
      const std::string file = sample.Write();
      const auto records = Read(file);
      ASSERT_TRUE(records.ok()) << records.status();
      ASSERT_EQ(records->size(), 4u);
      for (size_t i = 0; i < records->size(); ++i) {
        const ZipRecord& record = (*records)[i];
        EXPECT_EQ(record.name, sample.records[i].name);
        EXPECT_EQ(file.substr(record.begin, record.bytes), sample.records[i].data);
        EXPECT_EQ(record.begin % 64, 0u);
        EXPECT_EQ(record.crc32, Crc32(0, file.data() + record.begin, record.bytes));
      }
    }
  }
}

TEST(TorchZip, ReadsAnArchiveWithoutRecords) {
  const auto records = Read(ZipSample().Write());
  ASSERT_TRUE(records.ok()) << records.status();
  EXPECT_TRUE(records->empty());
}

TEST(TorchZip, RefusesEveryShorterFile) {
  const std::string file = Sample().Write();
  for (size_t bytes = 0; bytes < file.size(); ++bytes) {
    EXPECT_EQ(Read(file.substr(0, bytes)).status().code(), absl::StatusCode::kDataLoss) << bytes;
  }
}

TEST(TorchZip, RefusesBytesInFrontAndBehind) {
  const std::string file = Sample().Write();
  ExpectRefused("x" + file, "");
  ExpectRefused(file + "x", "no end record");
  ZipSample plain = Sample();
  plain.zip64_end = false;
  ExpectRefused("x" + plain.Write(), "does not end at byte");
}

TEST(TorchZip, RefusesCompressedAndEncryptedRecords) {
  ZipSample sample = Sample();
  sample.records[1].method = 8;
  ExpectRefused(sample.Write(), "compressed or encrypted", absl::StatusCode::kUnimplemented);
  sample.records[1].method = 0;
  sample.records[1].flags |= 1;
  ExpectRefused(sample.Write(), "compressed or encrypted", absl::StatusCode::kUnimplemented);
}

TEST(TorchZip, RefusesRecordsThatReadersRefuse) {
  const std::string file = Sample().Write();
  for (const char* const flags : {"\x01\x08", "\x20\x08", "\x40\x08"}) {
    ExpectRefused(Patch(file, kRecord, 8, flags), "compressed or encrypted",
                  absl::StatusCode::kUnimplemented);
  }
  ExpectRefused(Patch(file, kRecord, 9, "\x20"), "compressed or encrypted",
                absl::StatusCode::kUnimplemented);
  ExpectRefused(Patch(file, kRecord, 6, "\x40"), "a later version",
                absl::StatusCode::kUnimplemented);
  ExpectRefused(Patch(file, kRecord, 34, "\x01"), "several disks",
                absl::StatusCode::kUnimplemented);
}

TEST(TorchZip, RefusesDataThatReadersTakeForADirectory) {
  ZipSample sample = Sample();
  const std::string with_empty = sample.Write();
  // torch.load returns uninitialized memory for such a record.
  sample.records.pop_back();
  ExpectRefused(Patch(sample.Write(), kRecord, 38, "\x10"), "marked as a directory");
  sample.records.back().name += '/';
  ExpectRefused(sample.Write(), "marked as a directory");
  // A directory itself has no data.
  EXPECT_TRUE(Read(Patch(with_empty, kRecord, 38, "\x10")).ok());
}

TEST(TorchZip, RefusesRecordsOfOneName) {
  ZipSample sample = Sample();
  sample.records[1].name = sample.records[0].name;
  ExpectRefused(sample.Write(), "occurs twice");
}

TEST(TorchZip, RefusesEndRecordsThatDisagree) {
  const std::string file = Sample().Write();
  ExpectRefused(Patch(file, kEnd, 10, "\x03"), "disagree");
  ExpectRefused(Patch(file, kEnd, 8, "\x03"), "disagree");
  ExpectRefused(Patch(file, kEnd, 12, "\x03"), "disagree");
  ExpectRefused(Patch(file, kEnd, 16, "\x03"), "disagree");
  ExpectRefused(Patch(file, kEnd64, 24, "\x03"), "disagree");
  ExpectRefused(Patch(file, kEnd64, 0, "QK"), "no zip64 end record");
  ExpectRefused(Patch(file, kEnd64, 4, "\x2d"), "no zip64 end record");
  ExpectRefused(Patch(file, kLocator, 8, "\x01"), "not in front of its locator");
  // What the old record leaves to the new one.
  EXPECT_TRUE(Read(Patch(file, kEnd, 8, std::string(12, '\xff'))).ok());
  ZipSample plain = Sample();
  plain.zip64_end = false;
  ExpectRefused(Patch(plain.Write(), kEnd, 8, "\x03"), "disagrees with itself");
  ExpectRefused(Patch(plain.Write(), kEnd, 8, "\x03\0\x03"), "disagrees with itself");
}

TEST(TorchZip, RefusesSeveralDisks) {
  const std::string file = Sample().Write();
  const absl::StatusCode code = absl::StatusCode::kUnimplemented;
  ExpectRefused(Patch(file, kLocator, 4, "\x01"), "several disks", code);
  ExpectRefused(Patch(file, kEnd64, 16, "\x01"), "several disks", code);
  ZipSample plain = Sample();
  plain.zip64_end = false;
  ExpectRefused(Patch(plain.Write(), kEnd, 4, "\x01"), "several disks", code);
}

TEST(TorchZip, RefusesMoreRecordsThanThereIsRoomFor) {
  const std::string many = "\xff\xff\xff\xff\xff\xff\xff\x0f\xff\xff\xff\xff\xff\xff\xff\x0f";
  std::string file = Patch(Sample().Write(), kEnd64, 24, many);
  ExpectRefused(Patch(file, kEnd, 8, "\xff\xff\xff\xff"), "do not fit");
}

TEST(TorchZip, RefusesADirectoryThatIsNotItsRecords) {
  ZipSample sample = Sample();
  sample.zip64_end = false;
  const std::string file = sample.Write();
  ExpectRefused(Patch(file, kEnd, 8, std::string("\x03\0\x03\0", 4)), "after the directory's last");
  ExpectRefused(Patch(file, kRecord, 0, "QK"), "no directory record");
  ExpectRefused(Patch(file, kRecord, 28, "\xff"), "goes beyond the directory");
  ExpectRefused(Patch(file, kRecord, 20, "\x01"), "two sizes differ");
  ExpectRefused(Patch(file, kRecord, 20, std::string("\xff\xff\xff\x7f\xff\xff\xff\x7f", 8)),
                "reaches into the directory");
  ExpectRefused(Patch(file, kRecord, 42, "\xff\xff\xff\x7f"), "reaches into the directory");
}

TEST(TorchZip, RefusesARecordThatReachesOneByteIntoTheDirectory) {
  // The local header has 30 bytes and the name here, nothing behind the data.
  const auto parse = [](uint32_t bytes) {
    std::string record = std::string("PK\x01\x02") + std::string(43, '\0');
    for (const size_t at : {20, 24}) record[at] = static_cast<char>(bytes);
    record[28] = 1;
    record[46] = 'a';
    const ZipDirectory where = {.begin = 31 + 100, .bytes = record.size(), .records = 1};
    return ParseZipDirectory(record, where, where.begin + where.bytes + 22).status();
  };
  EXPECT_TRUE(parse(100).ok()) << parse(100);
  EXPECT_EQ(parse(101).code(), absl::StatusCode::kDataLoss);
}

TEST(TorchZip, RefusesZip64FieldsThatAreTooShort) {
  ZipSample sample;
  sample.records = {{.name = "a", .data = "b", .zip64 = true}};
  const std::string file = sample.Write();
  ExpectRefused(Patch(file, kRecord, 47 + 2, "\x10"), "too short");
  ExpectRefused(Patch(file, kRecord, 47 + 2, "\xff"), "goes beyond its record");
  // Without the field the sizes are what they say, 4 GiB.
  ExpectRefused(Patch(file, kRecord, 47, "\x02"), "reaches into the directory");
}

TEST(TorchZip, RefusesOverlap) {
  const ZipDirectory where = {.begin = 100, .bytes = 0, .records = 2};
  const auto check = [&](uint64_t begin_a, uint64_t bytes_a, uint64_t begin_b, uint64_t bytes_b) {
    return CheckZipLayout({{.name = "a", .begin = begin_a, .bytes = bytes_a},
                           {.name = "b", .begin = begin_b, .bytes = bytes_b}},
                          where);
  };
  EXPECT_TRUE(check(0, 50, 50, 50).ok());
  EXPECT_TRUE(check(50, 50, 0, 50).ok());
  EXPECT_EQ(check(0, 51, 50, 50).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(check(0, 50, 50, 51).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(check(0, 50, 101, 0).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(check(0, ~uint64_t{0}, 50, 1).code(), absl::StatusCode::kDataLoss);
}

TEST(TorchZip, RefusesLocalHeadersThatAreNone) {
  EXPECT_FALSE(LocalHeaderBytes("PK\x03\x04", "").ok());
  EXPECT_FALSE(LocalHeaderBytes(std::string(30, 'x'), "").ok());
  std::string header = std::string("PK\x03\x04") + std::string(26, '\0');
  header[26] = 3;
  header[29] = 1;
  EXPECT_EQ(*LocalHeaderBytes(header + "abc", "abc"), 30u + 3 + 256);
  EXPECT_FALSE(LocalHeaderBytes(header + "ab", "abc").ok());
  EXPECT_FALSE(LocalHeaderBytes(header + "abcd", "abcd").ok());
}

TEST(TorchZip, RefusesARecordOfTwoNames) {
  const std::string file = Sample().Write();
  const size_t local = file.find("archive/data/0");
  for (const std::string name : {"archive/data/1", "archive/DATA/0"}) {
    std::string other = file;
    ExpectRefused(other.replace(local, name.size(), name), "has another name");
  }
}

TEST(TorchZip, RefusesANameThatIsNoUtf8) {
  ZipSample sample = Sample();
  sample.records[1].name = "archive/\xff\xfe";
  ExpectRefused(sample.Write(), "no UTF-8");
}

TEST(TorchZip, RefusesToBeGivenTheWrongBytes) {
  EXPECT_EQ(FindZipDirectory("12345", 4).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ParseZipDirectory("", {.begin = 0, .bytes = 1, .records = 0}, 100).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(ZipLength, TakesArchivesApartThatStandOneAfterTheOther) {
  for (const bool zip64_end : {true, false}) {
    ZipSample first = Sample();
    first.zip64_end = zip64_end;
    ZipSample second = Sample();
    second.zip64_end = zip64_end;
    second.records.pop_back();
    const std::string a = first.Write();
    const std::string b = second.Write();
    const std::string file = a + b;
    const auto length = ZipLength(file);
    ASSERT_TRUE(length.ok()) << length.status();
    EXPECT_EQ(*length, b.size());
    EXPECT_TRUE(Read(file.substr(file.size() - *length)).ok());
    EXPECT_EQ(*ZipLength(file.substr(0, file.size() - *length)), a.size());
  }
}

TEST(ZipLength, RefusesWhatIsNoEnd) {
  const std::string file = Sample().Write();
  EXPECT_EQ(ZipLength("").status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ZipLength(file + "x").status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ZipLength(Patch(file, kEnd64, 0, "QK")).status().code(), absl::StatusCode::kDataLoss);
  for (const size_t field : {40, 48}) {
    EXPECT_EQ(ZipLength(Patch(file, kEnd64, field, std::string(8, '\xff'))).status().code(),
              absl::StatusCode::kDataLoss);
  }
}

TEST(Crc32, IsThatOfTheWholeFromItsParts) {
  EXPECT_EQ(Crc32Combine(Crc32(0, "1234", 4), Crc32(0, "56789", 5), 5), 0xcbf43926u);
  EXPECT_EQ(Crc32Combine(0xcbf43926u, Crc32(0, "", 0), 0), 0xcbf43926u);
}

TEST(Crc32, IsTheOneOfZip) {
  EXPECT_EQ(Crc32(0, "123456789", 9), 0xcbf43926u);
  EXPECT_EQ(Crc32(Crc32(0, "1234", 4), "56789", 5), 0xcbf43926u);
  EXPECT_EQ(Crc32(0, "", 0), 0u);
}

}  // namespace
}  // namespace holdfast::format
