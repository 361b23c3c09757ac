// Another program touches a file between its fsync and the commit of its save.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "holdfast/plan.h"
#include "runtime/sys/system.h"
#include "tests/testing/checkpoint_files.h"
#include "tests/testing/save_test.h"

namespace holdfast::testing {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;

enum class Where { kDirectory, kFramework, kSingleFile };

/// Run once, before the first rename of a name that contains `g_before`.
std::string g_before;
std::function<void(int directory)> g_touch;
std::atomic<bool> g_touched{false};

int TouchingRename(int from_fd, const char* from, int to_fd, const char* to, unsigned flags) {
  if (absl::StrContains(from, g_before) && !g_touched.exchange(true)) {
    absl::SleepFor(absl::Milliseconds(30));  // past a tick of the file system's clock
    g_touch(from_fd);
  }
  return sys::kKernel.renameat2(from_fd, from, to_fd, to, flags);
}

class ChangedFile : public SaveTest, public ::testing::WithParamInterface<Where> {
 protected:
  void SetUp() override {
    SaveTest::SetUp();
    std::filesystem::create_directory(framework());
    CheckpointerOptions options = SmallOptions(directory());
    options.staging.arena_bytes = 16u << 20;
    options.launcher = Launcher::kThread;  // with the calls of this process
    checkpointer_ = Make(options);
    ASSERT_NE(checkpointer_, nullptr);
    sys::g_system.renameat2 = TouchingRename;
  }
  void TearDown() override {
    sys::g_system = sys::kKernel;
    checkpointer_.reset();
    SaveTest::TearDown();
  }
  std::string framework() const { return directory() + "/framework"; }

  absl::Status Save(bool touched) {
    const bool single = GetParam() == Where::kSingleFile;
    SavePlan plan;
    for (uint32_t i = 0; i < (single ? 1u : 2u); ++i) {
      plan.tensors.push_back({.name = absl::StrCat("t", i),
                              .dtype = "U8",
                              .shape = {int64_t(bytes_.size())},
                              .file = i,
                              .end = bytes_.size()});
      plan.files.push_back(
          {.name = i == 0 && !single ? "a.bin" : "b.bin",
           .bytes = bytes_.size(),
           .segments = {{.bytes = bytes_.size(), .tensor = i, .data = bytes_.data()}}});
    }
    g_touched = !touched;
    const auto handle =
        checkpointer_->SaveAsync({.name = single                            ? "b.bin"
                                          : GetParam() == Where::kFramework ? "framework"
                                                                            : "whole",
                                  .step = 1,
                                  .plan = &plan,
                                  .replace = true,
                                  .attempt = NewAttemptId(),
                                  .files_only = GetParam() == Where::kFramework,
                                  .single_file = single});
    return handle.ok() ? handle->WaitDurable(kLong).status() : handle.status();
  }

  /// The name of the file, in a directory, at the time of `g_touch`.
  static std::string NameIn(int directory) {
    for (const std::string& name : Names(absl::StrCat("/proc/self/fd/", directory))) {
      const bool present = GetParam() == Where::kDirectory ? name == "b.bin"
                           : GetParam() == Where::kFramework
                               ? name == "b.bin.tmp"
                               : absl::EndsWith(name, ".tmp") && !absl::StrContains(name, ".json");
      if (present) return name;
    }
    ADD_FAILURE() << "not there";
    return "";
  }

  void ExpectLoss(const std::function<void(int directory, const char* name)>& touch) {
    g_before = GetParam() == Where::kFramework ? "a.bin" : ".json.tmp";
    g_touch = [&touch](int directory) { touch(directory, NameIn(directory).c_str()); };
    const absl::Status lost = Save(/*touched=*/true);
    EXPECT_TRUE(g_touched);
    // Outside of a save's own directory a file that is another one may be another save's.
    const bool may_be_taken_over = absl::IsAborted(lost) && GetParam() != Where::kDirectory;
    EXPECT_TRUE(absl::IsDataLoss(lost) || may_be_taken_over) << lost;
    EXPECT_THAT(Text(lost), AllOf(HasSubstr("b.bin"), HasSubstr("another ")));
    EXPECT_FALSE(std::filesystem::exists(directory() + "/whole"));
    EXPECT_FALSE(std::filesystem::exists(directory() + "/b.bin"));
    // What another program has put in the place of a temporary file is not this save's to remove.
    EXPECT_THAT(Names(framework()), Each(EndsWith(".tmp")));
    EXPECT_EQ(Save(/*touched=*/false), absl::OkStatus());
  }

  const std::vector<char> bytes_ = std::vector<char>(100'000, 'x');
  std::unique_ptr<Checkpointer> checkpointer_;
};
INSTANTIATE_TEST_SUITE_P(All, ChangedFile,
                         ::testing::Values(Where::kDirectory, Where::kFramework,
                                           Where::kSingleFile));

TEST_P(ChangedFile, OfAnotherLengthIsNotCommitted) {
  ExpectLoss([](int directory, const char* name) {
    const int fd = openat(directory, name, O_WRONLY);
    EXPECT_EQ(ftruncate(fd, 1000), 0);
    close(fd);
  });
}

TEST_P(ChangedFile, OfAnotherByteIsNotCommitted) {
  ExpectLoss([](int directory, const char* name) {
    const int fd = openat(directory, name, O_WRONLY);
    EXPECT_EQ(pwrite(fd, "y", 1, 5), 1);
    close(fd);
  });
}

TEST_P(ChangedFile, ThatTakesTheTemporaryNameAtTheRenameIsNotCommitted) {
  if (GetParam() != Where::kFramework) GTEST_SKIP() << "names of files are the attempt's own";
  g_before = "b.bin";
  g_touch = [](int directory) {
    const std::string path = absl::StrCat("/proc/self/fd/", directory, "/b.bin.tmp");
    std::filesystem::copy_file(path, path + ".copy");
    std::filesystem::rename(path + ".copy", path);
  };
  const absl::Status lost = Save(/*touched=*/true);
  EXPECT_TRUE(g_touched);
  EXPECT_TRUE(absl::IsDataLoss(lost)) << lost;
  EXPECT_THAT(Text(lost), HasSubstr("b.bin"));
  // The other program's file has its name again.
  EXPECT_THAT(Names(framework()), ElementsAre("b.bin.tmp"));
  EXPECT_EQ(Save(/*touched=*/false), absl::OkStatus());
}

TEST_P(ChangedFile, ThatIsACopyIsNotCommitted) {
  ExpectLoss([](int directory, const char* name) {
    const std::string path = absl::StrCat("/proc/self/fd/", directory, "/", name);
    std::filesystem::copy_file(path, path + ".copy");
    std::filesystem::rename(path + ".copy", path);
  });
}

TEST_P(ChangedFile, ThatIsGoneIsNotCommitted) {
  ExpectLoss([](int directory, const char* name) { EXPECT_EQ(unlinkat(directory, name, 0), 0); });
}

TEST_P(ChangedFile, WithMoreNamesAndRightsIsCommitted) {
  g_before = GetParam() == Where::kFramework ? "a.bin" : ".json.tmp";
  const std::string other = directory() + "/link";
  g_touch = [&other](int directory) {
    const std::string name = NameIn(directory);
    EXPECT_EQ(linkat(directory, name.c_str(), AT_FDCWD, other.c_str(), 0), 0);
    EXPECT_EQ(fchmodat(directory, name.c_str(), 0640, 0), 0);
  };
  EXPECT_EQ(Save(/*touched=*/true), absl::OkStatus());
  EXPECT_TRUE(g_touched);
}

}  // namespace
}  // namespace holdfast::testing
