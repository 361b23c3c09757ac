#include "runtime/layout/manifest_slots.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>

namespace holdfast::layout {
namespace {

/// What stands in a slot of `width` in the middle of dots, after filling it; the dots must stay.
std::string Text(uint32_t width, const char* text) {
  std::string manifest(width + 4, '.');
  FillText(manifest.data(), {.offset = 2, .width = width}, text);
  EXPECT_EQ(manifest.substr(0, 2) + manifest.substr(width + 2), "....");
  return manifest.substr(2, width);
}

std::string Number(uint32_t width, uint64_t value) {
  std::string manifest(width + 4, '.');
  FillNumber(manifest.data(), {.offset = 2, .width = width}, value);
  EXPECT_EQ(manifest.substr(0, 2) + manifest.substr(width + 2), "....");
  return manifest.substr(2, width);
}

TEST(FillText, PutsBlanksBehind) {
  EXPECT_EQ(Text(10, "pwrite"), "\"pwrite\"  ");
  EXPECT_EQ(Text(8, "pwrite"), "\"pwrite\"");
  EXPECT_EQ(Text(4, ""), "\"\"  ");
}

TEST(FillText, LeavesOutWhatDoesNotFitButStaysAString) {
  EXPECT_EQ(Text(7, "pwrite"), "\"pwrit\"");
  EXPECT_EQ(Text(2, "pwrite"), "\"\"");
  EXPECT_EQ(Text(5, "ab\"c"), "\"ab\" ");  // never half an escape
  EXPECT_EQ(Text(6, "ab\"c"), "\"ab\\\"\"");
}

TEST(FillText, EscapesToPlainJson) {
  EXPECT_EQ(Text(12, "a\"b\\c"), "\"a\\\"b\\\\c\"   ");
  EXPECT_EQ(Text(12, "a\nb\x01z"), "\"a b z\"     ");
  EXPECT_EQ(Text(6, "\xc3\xa9"), "\"??\"  ");
}

TEST(FillText, LeavesASlotAloneThatHasNoRoom) {
  EXPECT_EQ(Text(0, "a"), "");
  EXPECT_EQ(Text(1, "a"), ".");
}

TEST(FillNumber, PutsBlanksInFront) {
  EXPECT_EQ(Number(4, 0), "   0");
  EXPECT_EQ(Number(4, 1200), "1200");
  EXPECT_EQ(Number(kNumberSlotBytes, std::numeric_limits<uint64_t>::max()), "18446744073709551615");
}

TEST(FillNumber, NeverWritesAWrongFigure) { EXPECT_EQ(Number(3, 1200), "   "); }

TEST(ManifestWord, FitsItsSlot) {
  for (const EngineRung rung :
       {EngineRung::kAuto, EngineRung::kUringFixed, EngineRung::kUring, EngineRung::kPwrite}) {
    EXPECT_LE(std::string(ManifestWord(rung)).size() + 2, kEngineSlotBytes);
  }
  for (const DirectIo direct_io : {DirectIo::kNo, DirectIo::kClaimed, DirectIo::kProven}) {
    EXPECT_LE(std::string(ManifestWord(direct_io)).size() + 2, kDirectIoSlotBytes);
  }
  EXPECT_LE(sizeof(CompletionSlot::reason) - 1 + 2, kReasonSlotBytes);
}

}  // namespace
}  // namespace holdfast::layout
