#include "holdfast/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "tests/unit/format/sample.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

class ValidatePlanTest : public ::testing::Test {
 protected:
  ValidatePlanTest() {
    tensors_.Add("a", "F32", {4}, 16);
    tensors_.Add("b", "U8", {3}, 3);
    tensors_.Add("none", "U8", {0}, 0);
    plan_ = *PlanSafetensors("one.safetensors", tensors_.sources, {});
  }

  void ExpectRefused(const std::string& what) {
    const absl::Status status = ValidatePlan(plan_);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(what));
  }

  format::SampleTensors tensors_;
  SavePlan plan_;
};

TEST_F(ValidatePlanTest, TakesWhatThePlannerMakes) {
  EXPECT_TRUE(ValidatePlan(plan_).ok()) << ValidatePlan(plan_);
}

TEST_F(ValidatePlanTest, TakesPlansWithoutFilesAndFilesWithoutBytes) {
  EXPECT_TRUE(ValidatePlan(SavePlan()).ok());
  plan_.files.push_back({.name = "empty"});
  EXPECT_TRUE(ValidatePlan(plan_).ok()) << ValidatePlan(plan_);
}

TEST_F(ValidatePlanTest, RefusesFileNamesThatLeadElsewhere) {
  for (const auto& [name, what] : std::vector<std::pair<std::string, std::string>>{
           {"", "empty"},
           {".", "directory's"},
           {"..", "directory's"},
           {"a/b", "'/'"},
           {"/etc/passwd", "'/'"},
           {std::string("a\0b", 3), "zero byte"},
           {"\xff", "UTF-8"},
           {std::string(256, 'x'), "255"},
           {std::string(252, 'x'), "more than 251 bytes, and the file is written as NAME.tmp"},
           {"rank-00000-of-00001.manifest.json", "rank manifest's"},
           {"rank-x.manifest.json", "rank manifest's"},
           {"holdfast.beside.json", "a drain's record"},
           {"model.tmp", ".tmp"}}) {
    plan_.files[0].name = name;
    ExpectRefused(what);
  }
  plan_.files[0].name = std::string(251, 'x');
  EXPECT_TRUE(ValidatePlan(plan_).ok());
}

TEST_F(ValidatePlanTest, RefusesTwoFilesOfOneName) {
  plan_.files.push_back({.name = "one.safetensors"});
  ExpectRefused("file \"one.safetensors\": the name occurs twice");
}

TEST_F(ValidatePlanTest, RefusesFilesThatAreTooLarge) {
  plan_.files.push_back({.name = "huge", .bytes = uint64_t{1} << 63});
  ExpectRefused("too many");
}

TEST_F(ValidatePlanTest, RefusesMoreChunksThanAreCounted) {
  static const char kByte = 0;
  for (uint32_t i = 0; i < 3; ++i) {
    const uint64_t bytes = uint64_t{1} << 53;
    PlannedTensor tensor = {.name = "t" + std::to_string(i), .dtype = "U8"};
    tensor.file = 1 + i;
    tensor.end = bytes;
    plan_.tensors.push_back(tensor);
    PlannedFile& file = plan_.files.emplace_back();
    file.name = "f" + std::to_string(i);
    file.bytes = bytes;
    Segment& segment = file.segments.emplace_back();
    segment.bytes = bytes;
    segment.tensor = static_cast<uint32_t>(plan_.tensors.size() - 1);
    segment.data = &kByte;
  }
  ExpectRefused("chunks");
}

TEST_F(ValidatePlanTest, RefusesGapsAndOverlapsOfSegments) {
  plan_.files[0].segments[1].file_offset += 1;
  ExpectRefused("a segment begins at byte 4097, the one before it ends at 4096 (a gap)");
  plan_.files[0].segments[1].file_offset -= 2;
  ExpectRefused("(an overlap)");
}

TEST_F(ValidatePlanTest, RefusesAFileThatIsNotCovered) {
  plan_.files[0].bytes += 1;
  ExpectRefused("no segment for bytes [4115, 4116)");
  plan_.files[0].bytes -= 2;
  plan_.tensors[2].begin = plan_.tensors[2].end = 4114;
  plan_.tensors[1].end -= 1;
  ExpectRefused("goes beyond the file's end at 4114");
}

TEST_F(ValidatePlanTest, RefusesSegmentsWithoutBytes) {
  Segment empty;
  empty.file_offset = plan_.files[0].bytes;
  plan_.files[0].segments.push_back(empty);
  ExpectRefused("is empty");
}

TEST_F(ValidatePlanTest, RefusesSegmentsWithoutData) {
  plan_.files[0].segments[1].data = nullptr;
  ExpectRefused("tensor \"a\" has no data");
}

TEST_F(ValidatePlanTest, RefusesLiteralsOfAnotherLength) {
  plan_.files[0].segments[0].literal.pop_back();
  ExpectRefused("is a literal of 4095 bytes");
}

TEST_F(ValidatePlanTest, RefusesSegmentsOfNoTensor) {
  plan_.files[0].segments[1].tensor = 3;
  ExpectRefused("is of tensor 3 of 3");
}

TEST_F(ValidatePlanTest, RefusesSegmentsThatAreNotTheirTensorsPlace) {
  plan_.files[0].segments[1].tensor = 1;
  ExpectRefused("is not the place of tensor \"b\"");
}

TEST_F(ValidatePlanTest, RefusesATensorInTwoSegments) {
  std::vector<Segment>& segments = plan_.files[0].segments;
  Segment half = segments[1];
  half.bytes = 8;
  segments[1].file_offset += 8;
  segments[1].bytes -= 8;
  segments.insert(segments.begin() + 1, half);
  ExpectRefused("is not the place of tensor \"a\"");
}

TEST_F(ValidatePlanTest, RefusesTensorsWithoutASegment) {
  Segment& segment = plan_.files[0].segments[2];
  segment.tensor = Segment::kLiteral;
  segment.literal = "abc";
  ExpectRefused("tensor \"b\" at bytes 4112 to 4115 has no segment");
}

TEST_F(ValidatePlanTest, RefusesTensorsOutsideTheirFile) {
  plan_.tensors[2].begin = plan_.tensors[2].end = 4116;
  ExpectRefused("tensor \"none\" at bytes 4116 to 4116 of 4115");
  plan_.tensors[2].begin = 2;
  plan_.tensors[2].end = 1;
  ExpectRefused("at bytes 2 to 1");
  plan_.tensors[2].file = 1;
  ExpectRefused("file 1 of 1");
}

TEST_F(ValidatePlanTest, RefusesTensorNames) {
  plan_.tensors[1].name = "a";
  ExpectRefused("tensor \"a\": the name occurs twice");
  plan_.tensors[1].name = "";
  ExpectRefused("name is empty");
  plan_.tensors[1].name = "\xc3";
  ExpectRefused("name is not UTF-8");
  plan_.tensors[1].name = "b";
  plan_.tensors[1].dtype = "\xc3";
  ExpectRefused("dtype is not UTF-8");
  plan_.tensors[1].dtype = "U8";
  plan_.tensors[1].shape = {-1};
  ExpectRefused("dimension -1 is negative");
}

/// A tensor's segment, a literal with places for its checksum, another tensor's segment.
class ChecksumPlacesTest : public ValidatePlanTest {
 protected:
  ChecksumPlacesTest() {
    PlannedFile& file = plan_.files[0];
    file.bytes = 4112 + 8 + 3;
    Segment places;
    places.file_offset = 4112;
    places.literal = std::string(8, '?');
    places.bytes = 8;
    places.crc32_slots = {{.offset = 0, .segment = 1}, {.offset = 4, .segment = 1}};
    file.segments[2].file_offset += 8;
    file.segments.insert(file.segments.begin() + 2, places);
    plan_.tensors[1].begin += 8;
    plan_.tensors[1].end += 8;
    plan_.tensors[2].begin = plan_.tensors[2].end = 4120;
  }
  Segment& places() { return plan_.files[0].segments[2]; }
};

TEST_F(ChecksumPlacesTest, AreTakenInLiteralsBehindTheirTensors) {
  EXPECT_TRUE(ValidatePlan(plan_).ok()) << ValidatePlan(plan_);
}

TEST_F(ChecksumPlacesTest, AreRefusedInSegmentsOfTensors) {
  plan_.files[0].segments[3].crc32_slots = places().crc32_slots;
  ExpectRefused("the segment [4120, 4123) has places for checksums and is no literal");
}

TEST_F(ChecksumPlacesTest, AreRefusedBeyondTheLiteral) {
  places().crc32_slots[1].offset = 5;
  ExpectRefused("has a place for a checksum at 5 of 8");
  places().crc32_slots[1].offset = ~uint64_t{0};
  ExpectRefused("has a place for a checksum at 18446744073709551615 of 8");
  places().crc32_slots[1].offset = 4;
  plan_.files[0].segments[0].crc32_slots = {{.offset = 4093, .segment = 1}};
  ExpectRefused("has a place for a checksum at 4093 of 4096");
}

TEST_F(ChecksumPlacesTest, AreRefusedForWhatIsNoTensorBeforeThem) {
  for (const uint32_t segment : {0u, 2u, 3u, 4u, ~0u}) {
    places().crc32_slots[0].segment = segment;
    ExpectRefused(
        absl::StrCat("the checksum of segment ", segment, ", which is no tensor before it"));
  }
}

TEST(DtypeBytes, KnowsWholeByteDtypes) {
  EXPECT_EQ(DtypeBytes("BF16"), 2u);
  EXPECT_EQ(DtypeBytes("F64"), 8u);
  EXPECT_EQ(DtypeBytes("C64"), 8u);
  EXPECT_EQ(DtypeBytes("BOOL"), 1u);
  EXPECT_EQ(DtypeBytes("F4"), 0u);
  EXPECT_EQ(DtypeBytes("QINT8"), 0u);
  EXPECT_EQ(DtypeBytes(""), 0u);
}

}  // namespace
}  // namespace holdfast
