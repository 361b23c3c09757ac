// What the progress bar shows. The bar shows nothing where nobody can see the movement.
#include "tools/progress_bar.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>

namespace holdfast::tools {
namespace {

using ::testing::HasSubstr;

TEST(FormatBytes, TakesTheLargestUnitThatFits) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1536), "1.5 KiB");
  EXPECT_EQ(FormatBytes(3.0 * (1 << 30)), "3.0 GiB");
  EXPECT_EQ(FormatBytes(5.0 * 1024 * (1ull << 40)), "5120.0 TiB");
}

TEST(FormatBar, ShowsShareRateAndTimeLeft) {
  const std::string half = FormatBar("step-7", 1u << 30, 2u << 30, 2, 100);
  EXPECT_THAT(half, HasSubstr("step-7 [####"));
  EXPECT_THAT(half, HasSubstr(" 50%"));
  EXPECT_THAT(half, HasSubstr("512.0 MiB/s"));
  EXPECT_THAT(half, HasSubstr("0:02 left"));
  EXPECT_THAT(FormatBar("x", 10, 10, 1, 100), ::testing::Not(HasSubstr("left")));
  EXPECT_THAT(FormatBar("x", 11, 10, 1, 100), HasSubstr("100%"));
  EXPECT_THAT(FormatBar("x", 0, 0, 0, 100), HasSubstr("100%"));
}

TEST(FormatBar, NeverFillsTheLastColumn) {
  const std::string label(300, 'l');
  for (int width = 1; width < 200; ++width) {
    EXPECT_LT(FormatBar(label, 1, 3, 1, width).size(), static_cast<size_t>(width)) << width;
  }
}

TEST(ProgressBar, DrawsNothingWhereThereIsNoTerminal) {
  std::FILE* file = std::tmpfile();
  ASSERT_NE(file, nullptr);
  {
    ProgressBar bar("x", file, true);
    bar.Update(1, 2);
    bar.Update(2, 2);
  }
  EXPECT_EQ(std::ftell(file), 0);
  std::fclose(file);
}

}  // namespace
}  // namespace holdfast::tools
