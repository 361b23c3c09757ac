// Names of partial, fenced and retired directories, and what must not be taken for one.
#include "runtime/format/directory_names.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

namespace holdfast::format {
namespace {

constexpr AttemptId kAttempt = {.high = 0x0123456789abcdef, .low = 0xfedcba9876543210};

TEST(DirectoryNames, FormatsKindAndAttempt) {
  EXPECT_EQ(PartialName("step-7", kAttempt), "step-7.partial-0123456789abcdeffedcba9876543210");
}

TEST(DirectoryNames, ReadsBackWhatItFormats) {
  for (DirectoryKind kind :
       {DirectoryKind::kPartial, DirectoryKind::kFenced, DirectoryKind::kRetired}) {
    const DirectoryName name = ParseDirectoryName(
        FormatDirectoryName({.checkpoint = "a.b-c", .kind = kind, .attempt = kAttempt}));
    EXPECT_EQ(name.checkpoint, "a.b-c");
    EXPECT_EQ(name.kind, kind);
    EXPECT_EQ(name.attempt, kAttempt);
  }
}

TEST(DirectoryNames, HidesWhatIsToBeRemovedAndReadsTheNamesOfEarlierVersions) {
  const std::string digits = "0123456789abcdeffedcba9876543210";
  for (const auto& [kind, infix] : {std::pair(DirectoryKind::kFenced, ".fenced-"),
                                    std::pair(DirectoryKind::kRetired, ".retired-")}) {
    const DirectoryName wanted = {.checkpoint = "step-7", .kind = kind, .attempt = kAttempt};
    EXPECT_EQ(FormatDirectoryName(wanted), ".step-7" + (infix + digits));
    const DirectoryName earlier = ParseDirectoryName("step-7" + (infix + digits));
    EXPECT_EQ(earlier.kind, kind);
    EXPECT_EQ(earlier.checkpoint, "step-7");
  }
}

TEST(DirectoryNames, AreNeverLongerThanAFileSystemAllows) {
  const std::string longest(kNameBytes - 1 - PartialName("", kAttempt).size(), 'x');
  for (DirectoryKind kind :
       {DirectoryKind::kPartial, DirectoryKind::kFenced, DirectoryKind::kRetired}) {
    const std::string name =
        FormatDirectoryName({.checkpoint = longest, .kind = kind, .attempt = kAttempt});
    EXPECT_LT(name.size(), kNameBytes);
    EXPECT_EQ(ParseDirectoryName(name).kind, kind);
    EXPECT_EQ(ParseDirectoryName(name).checkpoint, longest);
  }
}

TEST(SeriesOf, ReplacesTheLastRunOfDigits) {
  EXPECT_EQ(SeriesOf("step-80"), "step-{}");
  EXPECT_EQ(SeriesOf("step-100"), "step-{}");
  EXPECT_EQ(SeriesOf("1200"), "{}");
  EXPECT_EQ(SeriesOf("llama-8b-step-7-final"), "llama-8b-step-{}-final");
  EXPECT_EQ(SeriesOf("best"), "best");
  EXPECT_EQ(SeriesOf(""), "");
}

TEST(DirectoryNames, TakesOnlyTheLastSuffix) {
  const std::string inner = PartialName("x", kAttempt);
  const DirectoryName name = ParseDirectoryName(PartialName(inner, {.high = 1, .low = 2}));
  EXPECT_EQ(name.checkpoint, inner);
  EXPECT_EQ(name.attempt.low, 2u);
}

TEST(DirectoryNames, LeavesEveryOtherNameAlone) {
  for (const char* name : {"", "step-7", "step-7.partial-", "step-7.partial-0123",
                           "step-7.partial-0123456789ABCDEFFEDCBA9876543210",   // upper case
                           "step-7.partial-0123456789abcdeffedcba987654321",    // a digit short
                           "step-7.partial-00123456789abcdeffedcba9876543210",  // a digit long
                           "step-7.partial-0123456789abcdeffedcba987654321g",
                           "step-7.Partial-0123456789abcdeffedcba9876543210",
                           ".partial-0123456789abcdeffedcba9876543210",  // no name
                           "0123456789abcdeffedcba9876543210"}) {
    const DirectoryName parsed = ParseDirectoryName(name);
    EXPECT_EQ(parsed.kind, DirectoryKind::kFinal) << name;
    EXPECT_EQ(parsed.checkpoint, name);
  }
}

}  // namespace
}  // namespace holdfast::format
