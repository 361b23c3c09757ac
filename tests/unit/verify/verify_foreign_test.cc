// Files of other programs: what the formats allow to find is found, and no more is claimed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "holdfast/verify.h"
#include "runtime/format/torch_zip.h"
#include "runtime/sys/system.h"
#include "tests/testing/checkpoint_files.h"
#include "tests/testing/random_bytes.h"
#include "tests/testing/training_state.h"
#include "tests/testing/zip_files.h"

namespace holdfast {
namespace {

using testing::FlipBit;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::RandomBytes;
using testing::ReadFileBytes;
using testing::ScratchDirectory;
using ::testing::SizeIs;
using testing::WriteFileBytes;
using testing::ZipArchive;
using testing::ZipEntry;

class VerifyForeign : public ::testing::Test {
 protected:
  std::string Path(const std::string& name = "") const { return scratch_.path() + "/" + name; }
  VerifyReport Verified(const std::string& name = "") const {
    auto report = Verify(Path(name), {});
    EXPECT_TRUE(report.ok()) << report.status();
    return report.ok() ? *std::move(report) : VerifyReport{};
  }
  const std::vector<ZipEntry> entries_ = {{"archive/data.pkl", RandomBytes(500, 1)},
                                          {"archive/data/0", RandomBytes(9'000'000, 2)},
                                          {"archive/data/1", ""},
                                          {"archive/version", "3\n"}};
  ScratchDirectory scratch_;
};

TEST_F(VerifyForeign, ASoundTorchZipIsSoundWhateverItIsCalled) {
  for (bool zip64 : {true, false}) {
    for (const char* comment : {"", "a comment"}) {
      for (const char* name : {"model.pt", "model", "model.distcp"}) {
        WriteFileBytes(Path(name), ZipArchive(entries_, {.zip64_end = zip64, .comment = comment}));
        const VerifyReport report = Verified(name);
        EXPECT_EQ(report.verdict, Verdict::kSound);
        EXPECT_THAT(report.faults, IsEmpty());
        EXPECT_EQ(report.bytes, 500u + 9'000'000 + 2);
        EXPECT_EQ(report.tensors, 4u);
        EXPECT_EQ(report.checked, "torch zip CRC32s");
        EXPECT_THAT(report.note, HasSubstr("less than a digest"));
      }
    }
  }
}

TEST_F(VerifyForeign, AFlippedBitOfARecordIsFoundAndNamed) {
  WriteFileBytes(Path("model.pt"), ZipArchive(entries_, {}));
  const std::string bytes = ReadFileBytes(Path("model.pt"));
  const size_t begin = bytes.find(entries_[1].data.substr(0, 64));
  for (size_t offset : {begin, begin + 5'000'000, begin + 8'999'999}) {
    FlipBit(Path("model.pt"), offset);
    const VerifyReport report = Verified("model.pt");
    EXPECT_EQ(report.verdict, Verdict::kCorrupt);
    ASSERT_THAT(report.faults, SizeIs(1));
    EXPECT_EQ(report.faults[0].reason, "crc32");
    EXPECT_EQ(report.faults[0].tensor, "archive/data/0");
    EXPECT_EQ(report.faults[0].begin, begin);
    EXPECT_EQ(report.faults[0].end, begin + 9'000'000);
    EXPECT_THAT(report.faults[0].expected, SizeIs(8));
    FlipBit(Path("model.pt"), offset);
  }
}

TEST_F(VerifyForeign, FramingThatIsCutOrDamagedIsCorrupt) {
  const std::string whole =
      ZipArchive({{"a", RandomBytes(3000, 1)}, {"b", RandomBytes(50, 2)}}, {});
  for (size_t kept : {whole.size() - 1, whole.size() - 30, whole.size() / 2, size_t{100}}) {
    WriteFileBytes(Path("model.pt"), whole.substr(0, kept));
    EXPECT_EQ(Verified("model.pt").verdict, Verdict::kCorrupt) << kept;
  }
  WriteFileBytes(Path("model.pt"), whole + "tail");
  EXPECT_EQ(Verified("model.pt").verdict, Verdict::kCorrupt);
  // The directory and the end records, byte by byte. (Times and attributes carry nothing.)
  const size_t directory = whole.find("PK\x01\x02");
  int sound = 0;
  for (size_t at = directory; at < whole.size(); ++at) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x10);
    WriteFileBytes(Path("model.pt"), damaged);
    if (Verified("model.pt").verdict == Verdict::kSound) ++sound;
  }
  EXPECT_LT(sound, 2 * (2 + 2 + 2 + 4 + 12 + 1) + 4 + 1)
      << "more than versions, flags, times, attributes and names went unseen";
}

TEST_F(VerifyForeign, RecordsWithoutCrc32AreSaidToBeUnchecked) {
  WriteFileBytes(Path("model.pt"), ZipArchive(entries_, {.record_crc32 = false}));
  const VerifyReport report = Verified("model.pt");
  EXPECT_EQ(report.verdict, Verdict::kSound);
  EXPECT_THAT(report.note, HasSubstr("3 records carry no CRC32"));
}

TEST_F(VerifyForeign, CompressedRecordsCannotBeJudged) {
  WriteFileBytes(Path("model.pt"), ZipArchive(entries_, {.method = 8}));
  EXPECT_EQ(Verified("model.pt").verdict, Verdict::kUnreadable);
}

TEST_F(VerifyForeign, SeveralArchivesInADistcpFileAreAllChecked) {
  const std::string first = ZipArchive({{"archive/data/0", RandomBytes(5000, 1)}}, {});
  const std::string second = ZipArchive({{"archive/data/0", RandomBytes(6000, 2)}}, {});
  const std::string third =
      ZipArchive({{"archive/data/0", RandomBytes(7000, 3)}}, {.zip64_end = false});
  const std::string name = "__0_0.distcp";
  WriteFileBytes(Path(name), first + second + third);
  VerifyReport report = Verified(name);
  EXPECT_EQ(report.verdict, Verdict::kSound);
  EXPECT_EQ(report.bytes, 18'000u);
  FlipBit(Path(name), first.size() + 300);
  report = Verified(name);
  EXPECT_EQ(report.verdict, Verdict::kCorrupt);
  ASSERT_THAT(report.faults, SizeIs(1));
  EXPECT_EQ(report.faults[0].reason, "crc32");
  EXPECT_GT(report.faults[0].begin, first.size());

  // An item that is no zip, in front of, between, and behind.
  for (const std::string& bytes :
       {"raw item" + first + second, first + "raw item" + second, first + second + "raw item"}) {
    WriteFileBytes(Path(name), bytes);
    report = Verified(name);
    EXPECT_EQ(report.verdict, Verdict::kSound);
    EXPECT_EQ(report.bytes, 11'000u);
    EXPECT_THAT(report.note, HasSubstr("8 bytes of .distcp files belong to no zip archive"));
  }
  // An archive with a destroyed end: the rest still begins like a zip.
  std::string damaged = first + second + third;
  damaged[first.size() + second.size() - 22] = 'X';
  WriteFileBytes(Path(name), damaged);
  report = Verified(name);
  EXPECT_EQ(report.verdict, Verdict::kCorrupt);
  ASSERT_THAT(report.faults, SizeIs(1));
  EXPECT_EQ(report.faults[0].reason, "structure");
  EXPECT_EQ(report.faults[0].begin, first.size());
  EXPECT_EQ(report.faults[0].end, first.size() + second.size());
}

TEST_F(VerifyForeign, FindsArchivesFarInFrontOfARawItem) {
  const std::string zip = ZipArchive({{"a", RandomBytes(5000, 1)}}, {});
  // Longer than one step of the search, and the end record lies across its border.
  for (size_t raw : {(size_t{1} << 20) - 2, (size_t{3} << 20) + 11}) {
    WriteFileBytes(Path("x.distcp"), zip + std::string(raw, 'r'));
    const VerifyReport report = Verified("x.distcp");
    EXPECT_EQ(report.verdict, Verdict::kSound) << raw;
    EXPECT_EQ(report.bytes, 5000u);
  }
}

TEST_F(VerifyForeign, ARecordOfTwoNamesAndANameThatIsNoUtf8AreFaults) {
  const std::string zip = ZipArchive({{"archive/data/0", RandomBytes(5000, 1)}}, {});
  const size_t local = zip.find("archive/data/0");
  const size_t directory = zip.rfind("archive/data/0");
  ASSERT_LT(local, directory);
  std::string two_names = zip;
  two_names.replace(local, 14, "archive/DATA/0");
  std::string no_utf8 = zip;
  no_utf8[local] = no_utf8[directory] = '\xff';
  for (const std::string& bytes : {two_names, no_utf8}) {
    WriteFileBytes(Path("model.pt"), bytes);
    const VerifyReport report = Verified("model.pt");
    EXPECT_EQ(report.verdict, Verdict::kCorrupt);
    ASSERT_THAT(report.faults, SizeIs(1));
    EXPECT_EQ(report.faults[0].reason, "structure");
    EXPECT_THAT(report.faults[0].found, HasSubstr("name"));
  }
}

TEST_F(VerifyForeign, EndRecordsThatAllLeadToTheSameBytesAreAFault) {
  std::string file = "PK\x01\x02" + std::string(8 << 20, '\0');
  for (int i = 0; i < 1000; ++i) {
    const auto length = static_cast<uint32_t>(file.size());
    file += std::string("PK\x05\x06\0\0\0\0\1\0\1\0", 12);
    for (const uint32_t value : {length, uint32_t{0}}) {
      for (int shift = 0; shift < 32; shift += 8) file += static_cast<char>(value >> shift);
    }
    file += std::string(2, '\0');
  }
  const std::string archive = ZipArchive({{"archive/data/0", RandomBytes(5000, 1)}}, {});
  WriteFileBytes(Path("x.distcp"), file + archive);
  const VerifyReport report = Verified("x.distcp");
  EXPECT_EQ(report.verdict, Verdict::kCorrupt);
  ASSERT_THAT(report.faults, SizeIs(1));
  EXPECT_EQ(report.faults[0].begin, 0u);
  EXPECT_EQ(report.faults[0].end, file.size());
  EXPECT_THAT(report.faults[0].found, HasSubstr("lead to more than 4 times"));
  EXPECT_EQ(report.bytes, 5000u);
}

TEST_F(VerifyForeign, ASafetensorsFileHasItsStructureChecked) {
  const std::string header = R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  std::string bytes = {static_cast<char>(header.size()), 0, 0, 0, 0, 0, 0, 0};
  bytes += header + "12345678";
  WriteFileBytes(Path("m.safetensors"), bytes);
  VerifyReport report = Verified("m.safetensors");
  EXPECT_EQ(report.verdict, Verdict::kSound);
  EXPECT_EQ(report.checked, "safetensors structure");
  EXPECT_EQ(report.tensors, 1u);
  EXPECT_THAT(report.note, HasSubstr("no checksum"));
  EXPECT_EQ(Verified().verdict, Verdict::kSound) << "a directory of it";
  for (const std::string& wrong :
       {bytes + "9", bytes.substr(0, bytes.size() - 1), bytes.substr(0, 5), std::string()}) {
    WriteFileBytes(Path("m.safetensors"), wrong);
    report = Verified("m.safetensors");
    EXPECT_EQ(report.verdict, Verdict::kCorrupt);
    EXPECT_EQ(report.faults[0].reason, "structure");
  }
}

TEST_F(VerifyForeign, AHeaderBeyondItsLimitIsNotRead) {
  static std::atomic<uint64_t> bytes_read;
  constexpr uint64_t kHeaderBytes = uint64_t{1} << 30;
  const std::string path = Path("model.safetensors");
  WriteFileBytes(path, std::string("\0\0\0\x40\0\0\0\0{", 9));
  std::filesystem::resize_file(path, 8 + kHeaderBytes);
  bytes_read = 0;
  sys::g_system.pread = [](int fd, void* buffer, size_t bytes, off_t offset) -> ssize_t {
    bytes_read += bytes;
    return sys::kKernel.pread(fd, buffer, bytes, offset);
  };
  const VerifyReport report = Verified("model.safetensors");
  sys::g_system = sys::kKernel;
  EXPECT_EQ(report.verdict, Verdict::kCorrupt);
  ASSERT_THAT(report.faults, SizeIs(1));
  EXPECT_THAT(report.faults[0].found, HasSubstr("over the limit"));
  EXPECT_LE(bytes_read, 1u << 20);
}

TEST_F(VerifyForeign, ADirectoryHasEveryFileChecked) {
  WriteFileBytes(Path("a.pt"), ZipArchive(entries_, {}));
  WriteFileBytes(Path("config.json"), "{}");
  std::filesystem::create_directory(Path("sub"));
  VerifyReport report = Verified();
  EXPECT_EQ(report.verdict, Verdict::kSound);
  EXPECT_EQ(report.files, 1u);
  EXPECT_THAT(report.note, HasSubstr("Not looked at: config.json"));
  WriteFileBytes(Path("legacy.pth"), "\x80\x02}q");
  report = Verified();
  EXPECT_EQ(report.verdict, Verdict::kUnreadable) << "a pickle proves nothing";
  ASSERT_THAT(report.faults, SizeIs(1));
  EXPECT_EQ(report.faults[0].file, "legacy.pth");
}

TEST_F(VerifyForeign, TheLockOfADrainIsNoFileToLookAt) {
  WriteFileBytes(Path("a.pt"), ZipArchive(entries_, {}));
  WriteFileBytes(Path(".holdfast-drain-0af5c52a.lock"), "");
  WriteFileBytes(Path(".holdfast-drain-notes.lock"), "");
  const VerifyReport report = Verified();
  EXPECT_EQ(report.verdict, Verdict::kSound);
  EXPECT_THAT(report.note, HasSubstr("Not looked at: .holdfast-drain-notes.lock."));
}

TEST_F(VerifyForeign, NothingKnownIsIncomplete) {
  EXPECT_EQ(Verified().verdict, Verdict::kIncomplete);
  WriteFileBytes(Path("notes.txt"), "hello");
  EXPECT_EQ(Verified().verdict, Verdict::kIncomplete);
  EXPECT_EQ(Verified("notes.txt").verdict, Verdict::kUnreadable);
}

TEST_F(VerifyForeign, AFifoDoesNotBlock) {
  ASSERT_EQ(mkfifo(Path("x.safetensors").c_str(), 0600), 0);
  EXPECT_EQ(Verified().verdict, Verdict::kUnreadable);
}

TEST_F(VerifyForeign, ReadsZipFilesOfAnotherWriter) {
  const std::string script = absl::StrCat(
      "python3 -c \"import zipfile;z=zipfile.ZipFile('", Path("python.pt"),
      "','w');z.writestr('archive/data.pkl',b'x'*100);z.writestr('archive/data/0',bytes(range(256))"
      "*20000);z.close()\" 2>/dev/null");
  if (std::system(script.c_str()) != 0) GTEST_SKIP() << "no python3";
  VerifyReport report = Verified("python.pt");
  EXPECT_EQ(report.verdict, Verdict::kSound);
  EXPECT_EQ(report.bytes, 100u + 256 * 20'000);
  FlipBit(Path("python.pt"), 4'500'000);
  report = Verified("python.pt");
  EXPECT_EQ(report.verdict, Verdict::kCorrupt);
  ASSERT_THAT(report.faults, SizeIs(1));
  EXPECT_EQ(report.faults[0].tensor, "archive/data/0");
}

TEST(Crc32Combine, IsTheCrc32OfBothTogether) {
  const std::string text = RandomBytes(10'000, 3);
  for (size_t cut : {size_t{0}, size_t{1}, size_t{4096}, text.size()}) {
    EXPECT_EQ(format::Crc32Combine(format::Crc32(0, text.data(), cut),
                                   format::Crc32(0, text.data() + cut, text.size() - cut),
                                   text.size() - cut),
              format::Crc32(0, text.data(), text.size()));
  }
}

TEST(ZipLength, IsTheArchivesOwnWhateverStandsInFrontOfIt) {
  for (bool zip64 : {true, false}) {
    const std::string zip =
        ZipArchive({{"a", RandomBytes(50, 1)}}, {.zip64_end = zip64, .comment = "c"});
    const auto length = format::ZipLength("something in front" + zip);
    ASSERT_TRUE(length.ok()) << length.status();
    EXPECT_EQ(*length, zip.size());
  }
  EXPECT_EQ(format::ZipLength("PK").status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(format::ZipLength(std::string(100, 'x')).status().code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace holdfast
