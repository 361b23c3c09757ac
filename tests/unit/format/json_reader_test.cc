#include "runtime/format/json_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>

#include "runtime/format/text.h"
#include "tests/unit/format/sample.h"

namespace holdfast::format {
namespace {

using ::testing::HasSubstr;

/// The string that `json` spells, read by us; what nlohmann says must be the same.
std::string Read(const std::string& json) {
  JsonReader reader(json);
  std::string value;
  if (!reader.String(&value) || !reader.AtEnd()) {
    return "refused: " + std::string(reader.status().message());
  }
  const nlohmann::json other = nlohmann::json::parse(json, nullptr, false);
  EXPECT_FALSE(other.is_discarded()) << json;
  if (!other.is_discarded()) {
    EXPECT_EQ(other.get<std::string>(), value);
  }
  return value;
}

TEST(JsonReader, ReadsStringsAsTheyAreMeant) {
  EXPECT_EQ(Read("\"\""), "");
  EXPECT_EQ(Read(" \t\r\n\"a\" "), "a");
  EXPECT_EQ(Read(R"("\"\\\/\b\f\n\r\t")"), "\"\\/\b\f\n\r\t");
  EXPECT_EQ(Read(R"("A\u00e9\u20AC\ud83d\udc19z")"), "A\xc3\xa9\xe2\x82\xac\xf0\x9f\x90\x99z");
  EXPECT_EQ(Read(R"("\u0000")"), std::string(1, '\0'));
  EXPECT_EQ(Read("\"\xf0\x9f\x90\x99\""), "\xf0\x9f\x90\x99");
}

TEST(JsonReader, RefusesStringsThatAreNone) {
  const std::string refused[] = {"",
                                 "a",
                                 "\"",
                                 "\"\\\"",
                                 "\"a\nb\"",
                                 "\"\\x41\"",
                                 "\"\\u12g4\"",
                                 "\"\\u12\"",
                                 R"("\ud83d")",
                                 R"("\ud83dz")",
                                 R"("\ud83d\n")",
                                 R"("\udc19")",
                                 R"("\ud83d\ud83d")",
                                 R"("\ud83d\u00e9")",
                                 "\"\xc3\"",
                                 "\"\xff\"",
                                 "\"\xc0\x80\"",
                                 "\"\xed\xa0\x80\"",
                                 "\"\xf4\x90\x80\x80\"",
                                 "\"\xe0\x80\x80\"",
                                 "\"a\"b",
                                 "\"\\\n\""};
  for (const std::string& json : refused)
    EXPECT_THAT(Read(json), HasSubstr("refused: byte ")) << json;
}

TEST(JsonReader, NamesTheByte) {
  JsonReader reader("{\"a\":tru}");
  std::string key;
  bool value = false;
  EXPECT_TRUE(reader.EnterObject());
  EXPECT_TRUE(reader.NextKey(&key));
  EXPECT_FALSE(reader.Bool(&value));
  EXPECT_EQ(std::string(reader.status().message()), "byte 5: expected true or false");
  EXPECT_FALSE(reader.NextKey(&key)) << "an error sticks";
  EXPECT_FALSE(reader.Fail("another"));
  EXPECT_EQ(std::string(reader.status().message()), "byte 5: expected true or false");
}

std::string ReadShape(const std::string& json) {
  JsonReader reader(json);
  std::vector<int64_t> shape;
  if (!reader.Shape(&shape) || !reader.AtEnd()) return "refused";
  std::string text;
  AppendShape(shape, &text);
  return text;
}

TEST(JsonReader, ReadsArrays) {
  EXPECT_EQ(ReadShape("[]"), "[]");
  EXPECT_EQ(ReadShape(" [ 1 , 2 ] "), "[1,2]");
  EXPECT_EQ(ReadShape("[9223372036854775807,0]"), "[9223372036854775807,0]");
  for (const char* json :
       {"[1,]", "[,1]", "[1 2]", "[1", "[", "[[1]]", "[1]]", "[1.5]", "[1e3]", "[-1]", "[+1]",
        "[01]", "[9223372036854775808]", "[\"1\"]", "[null]", "[1}", "{}", "[1],"}) {
    EXPECT_EQ(ReadShape(json), "refused") << json;
  }
}

TEST(JsonReader, StopsBeforeNestingGetsDeep) {
  const std::string deep(1000, '[');
  JsonReader reader(deep);
  for (int i = 0; i < JsonReader::kDepthMax; ++i) EXPECT_TRUE(reader.EnterArray());
  EXPECT_FALSE(reader.EnterArray());
  EXPECT_THAT(std::string(reader.status().message()), HasSubstr("nested too deeply"));
}

TEST(AppendJsonString, IsReadBackByAnyReader) {
  const uint32_t seed = Seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int round = 0; round < 2000; ++round) {
    std::string text;
    for (int i = static_cast<int>(random() % 12); i-- > 0;) {
      static const char* const kPieces[] = {"a", "\"",   "\\",    "\xc3\xa9",    "\xf0\x9f\x90\x99",
                                            "/", "\x7f", "u0041", "\xe2\x80\xa8"};
      const size_t pick = random() % 41;
      text += pick < 9 ? std::string(kPieces[pick]) : std::string(1, static_cast<char>(pick - 9));
    }
    ASSERT_TRUE(IsUtf8(text));
    std::string json;
    AppendJsonString(text, &json);
    EXPECT_EQ(Read(json), text);
  }
}

TEST(IsUtf8, AgreesWithAnotherReader) {
  const uint32_t seed = Seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  static constexpr unsigned char kBytes[] = {0x41, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf,
                                             0xc0, 0xc1, 0xc2, 0xdf, 0xe0, 0xe1, 0xed, 0xee,
                                             0xef, 0xf0, 0xf1, 0xf3, 0xf4, 0xf5, 0xff};
  int sound = 0;
  for (int round = 0; round < 200'000; ++round) {
    std::string text;
    for (int i = static_cast<int>(random() % 6); i-- > 0;) {
      text.push_back(static_cast<char>(kBytes[random() % sizeof(kBytes)]));
    }
    const bool other = nlohmann::json::accept("\"" + text + "\"");
    sound += other && !text.empty() ? 1 : 0;
    ASSERT_EQ(IsUtf8(text), other) << testing::PrintToString(text);
  }
  EXPECT_GT(sound, 1000);
}

TEST(Quoted, KeepsMessagesReadable) {
  EXPECT_EQ(Quoted("a\nb"), "\"a\\nb\"");
  EXPECT_EQ(Quoted("\xff"), "\"\\xff\"");
  EXPECT_EQ(Quoted("\xc3\xa9"), "\"\xc3\xa9\"");
  EXPECT_EQ(Quoted(std::string(300, 'a')), "\"" + std::string(200, 'a') + "...\"");
  std::string long_name;
  for (int i = 0; i < 100; ++i) long_name += "\xe2\x82\xac";
  EXPECT_TRUE(IsUtf8(Quoted(long_name)));
}

}  // namespace
}  // namespace holdfast::format
