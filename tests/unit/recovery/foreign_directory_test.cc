// A user's own directory with the name of a save's, and what is no directory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "holdfast/recovery.h"
#include "tests/testing/small_checkpoint.h"

namespace holdfast::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

TEST(ForeignDirectory, WithTheNameOfASavesIsKept) {
  const TemporaryDirectory directory;
  const std::vector<std::string> names = {
      "mine.partial-00000000000000010000000000000002",
      ".mine.fenced-00000000000000010000000000000002",
      "mine.retired-00000000000000010000000000000002",
  };
  for (const std::string& name : names) {
    std::filesystem::create_directory(directory / name);
    std::ofstream(directory / (name + "/notes.txt")) << "mine";
    // What a crash leaves of a save: at first nothing, and from its first file on a mark.
    for (const char* mark : {"", "holdfast.commit.json.tmp", "ranks.board"}) {
      const std::string ours = directory / absl::StrCat("save", mark, name);
      std::filesystem::create_directory(ours);
      if (*mark == '\0') continue;
      std::ofstream(absl::StrCat(ours, "/", mark)) << "";
      std::ofstream(ours + "/model-00000-of-00001.safetensors.tmp") << "half";
    }
  }
  const auto report = Recover(directory.path(), {});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_THAT(report->removed, SizeIs(9));
  EXPECT_THAT(report->kept_incomplete,
              UnorderedElementsAre(AllOf(StartsWith(names[0]), HasSubstr("no mark of a save")),
                                   StartsWith(names[1]), StartsWith(names[2])));
  for (const std::string& name : names)
    EXPECT_TRUE(std::filesystem::exists(directory / (name + "/notes.txt"))) << name;
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory.path()), {}), 3);
}

TEST(ForeignDirectory, ThatIsNoneIsKeptAndNamed) {
  const TemporaryDirectory directory;
  const std::string file = "mine.partial-00000000000000010000000000000002";
  const std::string link = "mine.retired-00000000000000010000000000000002";
  std::ofstream(directory / file) << "of another file";
  std::filesystem::create_symlink("elsewhere", directory / link);
  const auto report = Recover(directory.path(), {});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_THAT(report->removed, IsEmpty());
  EXPECT_THAT(report->kept_incomplete,
              UnorderedElementsAre(AllOf(StartsWith(file), HasSubstr("is no directory")),
                                   AllOf(StartsWith(link), HasSubstr("is no directory"))));
  EXPECT_TRUE(std::filesystem::is_regular_file(directory / file));
  EXPECT_TRUE(std::filesystem::is_symlink(directory / link));
}

}  // namespace
}  // namespace holdfast::testing
