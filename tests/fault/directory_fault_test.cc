// Unusable directories and forbidden names: an error at once, without any change on disk.
#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "tests/testing/child_process.h"
#include "tests/testing/save_test.h"
#include "tests/testing/small_file_system.h"

namespace holdfast::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class DirectoryFault : public LauncherTest {};
INSTANTIATE_TEST_SUITE_P(All, DirectoryFault, kEveryLauncher, LauncherName);

TEST_P(DirectoryFault, MissingIsAnErrorOfCreate) {
  const auto made = Checkpointer::Create(Options(absl::StrCat(directory(), "/nowhere")));
  EXPECT_TRUE(absl::IsNotFound(made.status())) << made.status();
  EXPECT_THAT(Text(made.status()),
              AllOf(HasSubstr("open checkpoint directory"), HasSubstr("/nowhere"),
                    HasSubstr("No such file or directory")));
}

TEST_P(DirectoryFault, AFileIsAnErrorOfCreate) {
  const std::string file = absl::StrCat(directory(), "/file");
  std::ofstream(file) << "mine";
  const auto made = Checkpointer::Create(Options(file));
  EXPECT_FALSE(made.ok());
  EXPECT_THAT(Text(made.status()), AllOf(HasSubstr(file), HasSubstr("Not a directory")));
  std::string content;
  std::ifstream(file) >> content;
  EXPECT_EQ(content, "mine");
}

TEST_P(DirectoryFault, RemovedBetweenSavesIsAnError) {
  const std::string path = absl::StrCat(directory(), "/run");
  std::filesystem::create_directory(path);
  const auto checkpointer = Make(Options(path));
  ASSERT_NE(checkpointer, nullptr);
  std::filesystem::remove_all(path);
  const auto report = Save(checkpointer.get(), "step-1", TrainingState::Uniform(2, 100'000, 1));
  EXPECT_TRUE(absl::IsNotFound(report.status())) << report.status();
  EXPECT_THAT(Text(report.status()),
              AllOf(HasSubstr(path), HasSubstr("step-1"), HasSubstr("No such file or directory")));
  ExpectMemoryBack(checkpointer.get());
  EXPECT_THAT(Names(directory()), IsEmpty());
}

TEST_P(DirectoryFault, ReadOnlyFileSystemIsAnErrorUntilWritable) {
  const auto small = SmallFileSystem::Tmpfs(64u << 20);
  if (!small.ok()) GTEST_SKIP() << small.status();
  SavePrevious((*small)->path());
  const auto checkpointer = Make(Options((*small)->path()));
  ASSERT_NE(checkpointer, nullptr);
  // Refused while the kept worker of the save before is ending.
  ASSERT_TRUE(WaitFor([&] { return (*small)->SetReadOnly(true).ok(); }));
  const auto report = Save(checkpointer.get(), "step-1", TrainingState::Uniform(2, 100'000, 1));
  EXPECT_FALSE(report.ok());
  EXPECT_THAT(Text(report.status()),
              AllOf(HasSubstr("step-1"), HasSubstr("Read-only file system")));
  ASSERT_TRUE((*small)->SetReadOnly(false).ok());
  ExpectRecovered(checkpointer.get());
}

TEST_P(DirectoryFault, ExistingCheckpointIsRefusedBeforeAnythingIsTaken) {
  SavePrevious(directory());
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  const auto begun =
      Begin(checkpointer.get(), "previous", TrainingState::Uniform(2, 100'000, 1), 9);
  EXPECT_TRUE(absl::IsAlreadyExists(begun.status())) << begun.status();
  EXPECT_THAT(Text(begun.status()), AllOf(HasSubstr(directory()), HasSubstr("previous")));
  EXPECT_EQ(checkpointer->staging().leases, 0u);
  ExpectRecovered(checkpointer.get());
}

TEST_P(DirectoryFault, AFileInTheCheckpointsPlaceIsNeverReplaced) {
  SavePrevious(directory());
  const std::string file = absl::StrCat(directory(), "/step-1");
  std::ofstream(file) << "mine";
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  const TrainingState state = TrainingState::Uniform(2, 100'000, 1);
  const std::vector<TensorSource> sources = state.Sources();
  for (const bool replace : {false, true}) {
    const auto begun =
        checkpointer->SaveAsync({.name = "step-1", .tensors = sources, .replace = replace});
    EXPECT_FALSE(begun.ok());
    EXPECT_THAT(Text(begun.status()), HasSubstr("step-1"));
  }
  ASSERT_TRUE(std::filesystem::remove(file));
  ExpectRecovered(checkpointer.get());
}

TEST_P(DirectoryFault, TheNameIsTakenWhileTheSaveRuns) {
  SavePrevious(directory());
  CheckpointerOptions options = Options();
  options.qos.bytes_per_second_max = 16u << 20;
  const auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  const auto handle = Begin(checkpointer.get(), "taken", TrainingState::Uniform(3, 4u << 20, 1));
  ASSERT_TRUE(handle.ok()) << handle.status();
  // A foreign directory appears under the name and stays.
  const std::string theirs = absl::StrCat(directory(), "/taken");
  ASSERT_TRUE(std::filesystem::create_directory(theirs));
  std::ofstream(theirs + "/file") << "theirs";
  const auto report = handle->WaitDurable(kLong);
  EXPECT_TRUE(absl::IsAlreadyExists(report.status())) << report.status();
  EXPECT_THAT(Text(report.status()), AllOf(HasSubstr("rename"), HasSubstr("taken")));
  EXPECT_THAT(Names(theirs), ::testing::ElementsAre("file"));
  std::filesystem::remove_all(theirs);
  ExpectRecovered(checkpointer.get());
}

TEST_P(DirectoryFault, NamesThatAreNoNameAreRefused) {
  SavePrevious(directory());
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  const TrainingState state = TrainingState::Uniform(1, 1000, 1);
  const std::vector<std::string> names = {"",
                                          ".",
                                          "..",
                                          "../escape",
                                          "a/b",
                                          "/absolute",
                                          "a/..",
                                          std::string("zero\0byte", 9),
                                          "not utf-8 \xff",
                                          std::string(215, 'n'),
                                          "step-1.partial-0123456789abcdef0123456789abcdef"};
  for (const std::string& name : names) {
    const auto begun = Begin(checkpointer.get(), name, state);
    EXPECT_TRUE(absl::IsInvalidArgument(begun.status())) << name << ": " << begun.status();
    EXPECT_THAT(Text(begun.status()), HasSubstr("checkpoint name")) << name;
  }
  EXPECT_FALSE(std::filesystem::exists(absl::StrCat(directory(), "/../escape")));
  const std::string longest(214, 'n');
  const auto report = Save(checkpointer.get(), longest, state);
  EXPECT_TRUE(report.ok()) << report.status();
  std::filesystem::remove_all(absl::StrCat(directory(), "/", longest));
  ExpectRecovered(checkpointer.get());
}

TEST_P(DirectoryFault, RelativeDirectorySurvivesAChangeOfTheWorkingDirectory) {
  const int before = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);
  ASSERT_EQ(chdir(directory().c_str()), 0);
  std::filesystem::create_directory("run");
  {
    const auto checkpointer = Make(Options("run"));
    EXPECT_EQ(chdir("/"), 0);
    if (checkpointer != nullptr) {
      const auto report = Save(checkpointer.get(), "step-1", TrainingState::Uniform(1, 5000, 1));
      EXPECT_TRUE(report.ok()) << report.status();
      if (report.ok()) {
        EXPECT_EQ(report->path, absl::StrCat(directory(), "/run/step-1"));
      }
    }
  }
  EXPECT_EQ(fchdir(before), 0);
  close(before);
  ExpectSound(absl::StrCat(directory(), "/run/step-1"));
}

}  // namespace
}  // namespace holdfast::testing
