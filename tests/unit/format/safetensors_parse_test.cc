#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/format/safetensors.h"

namespace holdfast::format {
namespace {

using ::testing::HasSubstr;

std::string Framed(const std::string& json) {
  std::string prefix(8, '\0');
  for (size_t i = 0; i < 8; ++i) prefix[i] = static_cast<char>(json.size() >> (8 * i));
  return prefix + json;
}

absl::StatusOr<SafetensorsHeader> Parse(const std::string& json, uint64_t data_bytes) {
  return ParseSafetensors(Framed(json), 8 + json.size() + data_bytes);
}

void ExpectRefused(const std::string& json, uint64_t data_bytes, const std::string& what) {
  const auto header = Parse(json, data_bytes);
  EXPECT_EQ(header.status().code(), absl::StatusCode::kDataLoss) << json;
  EXPECT_THAT(std::string(header.status().message()), HasSubstr(what)) << json;
}

std::string Tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                   const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
         ",\"data_offsets\":" + offsets + "}";
}

TEST(ParseSafetensors, ReadsTheFormatsOwnExample) {
  const auto header = Parse("{\"__metadata__\":{\"format\":\"pt\"}," +
                                Tensor("b", "F16", "[1,16,256]", "[8,8200]") + "," +
                                Tensor("a", "F32", "[2]", "[0,8]") + "}  \n",
                            8200);
  ASSERT_TRUE(header.ok()) << header.status();
  ASSERT_EQ(header->tensors.size(), 2u);
  EXPECT_EQ(header->tensors[0].name, "a");
  EXPECT_EQ(header->tensors[0].begin, header->data_begin);
  EXPECT_EQ(header->tensors[1].end, header->data_begin + 8200);
  EXPECT_EQ(header->metadata[0].second, "pt");
}

TEST(ParseSafetensors, ReadsEmptyTensorsAnywhere) {
  const auto header = Parse(
      "{" + Tensor("a", "U8", "[4]", "[0,4]") + "," + Tensor("b", "F32", "[0,9]", "[4,4]") + "," +
          Tensor("c", "F32", "[]", "[4,8]") + "," + Tensor("d", "F32", "[0]", "[0,0]") + "}",
      8);
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->tensors[0].name, "d");
  EXPECT_EQ(header->tensors[3].name, "c");
  EXPECT_TRUE(Parse("{}", 0).ok());
}

TEST(ParseSafetensors, RefusesHolesOverlapsAndTrailingBytes) {
  const std::string a = Tensor("a", "U8", "[4]", "[0,4]");
  ExpectRefused("{" + a + "," + Tensor("b", "U8", "[4]", "[5,9]") + "}", 9,
                "tensor \"b\": begins at 5, the data before it ends at 4 (a hole)");
  ExpectRefused("{" + a + "," + Tensor("b", "U8", "[4]", "[3,7]") + "}", 7, "(an overlap)");
  ExpectRefused("{" + a + "," + Tensor("b", "U8", "[4]", "[0,4]") + "}", 4, "(an overlap)");
  ExpectRefused("{" + a + "}", 5, "tensors end at 4, the file has 5");
  ExpectRefused("{" + a + "}", 3, "ends at 4, the file has 3");
  ExpectRefused("{}", 1, "tensors end at 0");
  ExpectRefused("{" + Tensor("a", "U8", "[4]", "[1,5]") + "}", 5, "(a hole)");
}

TEST(ParseSafetensors, RefusesSizesThatDoNotMatch) {
  ExpectRefused("{" + Tensor("a", "F32", "[2]", "[0,7]") + "}", 7, "shape and dtype make 8");
  ExpectRefused("{" + Tensor("a", "F32", "[2]", "[8,0]") + "}", 8, "offsets 8 to 0");
  ExpectRefused("{" + Tensor("a", "F32", "[9223372036854775807,3]", "[0,4]") + "}", 4, "2^64");
  ExpectRefused("{" + Tensor("a", "F32", "[9223372036854775807]", "[0,4]") + "}", 4, "2^64");
  ExpectRefused("{" + Tensor("a", "F4", "[3]", "[0,2]") + "}", 2, "ends within a byte");
  EXPECT_TRUE(Parse("{" + Tensor("a", "F4", "[4]", "[0,2]") + "}", 2).ok());
  EXPECT_TRUE(Parse("{" + Tensor("a", "C64", "[1]", "[0,8]") + "}", 8).ok());
}

TEST(ParseSafetensors, SaysThatItDoesNotKnowADtype) {
  const auto header = Parse("{" + Tensor("a", "F3", "[8]", "[0,3]") + "}", 3);
  EXPECT_EQ(header.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(header.status().message()), HasSubstr("dtype \"F3\" is not known"));
}

TEST(ParseSafetensors, RefusesWrongJson) {
  const std::string a = Tensor("a", "U8", "[0]", "[0,0]");
  ExpectRefused("", 0, "does not begin with '{'");
  ExpectRefused(" {}", 0, "does not begin with '{'");
  ExpectRefused("[]", 0, "does not begin with '{'");
  ExpectRefused("{", 0, "byte 1");
  ExpectRefused("{}x", 0, "something after the end");
  ExpectRefused("{}{}", 0, "something after the end");
  ExpectRefused("{" + a + "," + a + "}", 0, "tensor \"a\" a second time");
  ExpectRefused("{" + a + ",\"\\u0061\":{}}", 0, "tensor \"a\" a second time");
  ExpectRefused("{" + a + ",}", 0, "expected a string");
  ExpectRefused("{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0],\"x\":1}}", 0,
                "unknown key \"x\"");
  ExpectRefused("{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[0]}}", 0, "second time");
  ExpectRefused("{\"a\":{\"dtype\":\"U8\",\"shape\":[0]}}", 0, "no key \"data_offsets\"");
  ExpectRefused("{\"a\":{}}", 0, "no key \"dtype\"");
  ExpectRefused("{\"a\":[]}", 0, "expected '{'");
  ExpectRefused("{" + Tensor("a", "U8", "[0]", "[0]") + "}", 0, "two offsets");
  ExpectRefused("{" + Tensor("a", "U8", "[0]", "[0,0,0]") + "}", 0, "two offsets");
  ExpectRefused("{" + Tensor("a", "U8", "[-1]", "[0,0]") + "}", 0, "whole number");
  ExpectRefused("{" + Tensor("a", "U8", "[0]", "[0,18446744073709551616]") + "}", 0, "2^64");
  ExpectRefused("{" + Tensor("\xff", "U8", "[0]", "[0,0]") + "}", 0, "UTF-8");
}

TEST(ParseSafetensors, RefusesMetadataThatIsNotText) {
  ExpectRefused("{\"__metadata__\":{\"a\":1}}", 0, "expected a string");
  ExpectRefused("{\"__metadata__\":{\"a\":{}}}", 0, "expected a string");
  ExpectRefused("{\"__metadata__\":[]}", 0, "expected '{'");
  ExpectRefused("{\"__metadata__\":{\"a\":\"1\",\"a\":\"1\"}}", 0, "second time");
  ExpectRefused("{\"__metadata__\":{},\"__metadata__\":{}}", 0, "second time");
}

TEST(ParseSafetensors, RefusesDtypesThatAreNotOfThisFile) {
  const auto with = [](const std::string& dtypes) {
    std::string quoted;
    for (const char c : dtypes) quoted += c == '"' ? std::string("\\\"") : std::string(1, c);
    return "{\"__metadata__\":{\"holdfast.dtypes\":\"" + quoted + "\"}," +
           Tensor("a", "U8", "[4]", "[0,4]") + "," + Tensor("b", "I8", "[4]", "[4,8]") + "}";
  };
  const auto good = Parse(with(R"({"a":{"dtype":"X","shape":[2,2]}})"), 8);
  ASSERT_TRUE(good.ok()) << good.status();
  EXPECT_EQ(good->tensors[0].dtype, "X");
  EXPECT_EQ(good->tensors[0].shape, (std::vector<int64_t>{2, 2}));
  ExpectRefused(with(R"({"b":{"dtype":"X","shape":[2]}})"), 8, "not stored as bytes");
  ExpectRefused(with(R"({"c":{"dtype":"X","shape":[2]}})"), 8, "not stored as bytes");
  ExpectRefused(with(R"({"a":{"dtype":"X","shape":[2]},"a":{"dtype":"X","shape":[2]}})"), 8,
                "not stored as bytes");
  ExpectRefused(with(R"({"a":{"dtype":"X"}})"), 8, "no key \"shape\"");
  ExpectRefused(with("[]"), 8, "holdfast.dtypes: byte 0");
  ExpectRefused(with("{} "), 9, "the file has 9");
}

TEST(HeaderLength, IsBoundedByFormatAndFile) {
  const auto length = [](uint64_t value, uint64_t file_bytes) {
    std::string bytes(8, '\0');
    for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(value >> (8 * i));
    return HeaderLength(bytes, file_bytes);
  };
  EXPECT_EQ(*length(2, 10), 2u);
  EXPECT_EQ(*length(kSafetensorsHeaderMax, uint64_t{1} << 40), kSafetensorsHeaderMax);
  EXPECT_EQ(length(kSafetensorsHeaderMax + 1, uint64_t{1} << 40).status().code(),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(length(3, 10).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(length(~uint64_t{0}, ~uint64_t{0}).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(length(0, 7).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(HeaderLength("1234567", 100).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ParseSafetensors(Framed("{}") + "x", 100).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace holdfast::format
