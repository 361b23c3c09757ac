// Verify while saves replace what it checks: a sound checkpoint is never called damaged.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "holdfast/checkpointer.h"
#include "holdfast/verify.h"
#include "runtime/format/file_names.h"
#include "runtime/sys/system.h"
#include "tests/testing/checkpoint_files.h"
#include "tests/testing/save_test.h"
#include "tests/testing/settings.h"
#include "tests/testing/single_file.h"
#include "tests/testing/training_state.h"

namespace holdfast::testing {
namespace {

namespace fs = std::filesystem;

constexpr char kFile[] = "last.pt";

// The hooks are plain functions. A count below zero: never.
std::atomic<int> g_calls_left = -1;
std::function<void()> g_replace;

void Count() {
  if (g_calls_left.fetch_sub(1) == 0) g_replace();
}
int OpenAt(int directory, const char* path, int flags, mode_t mode) {
  Count();
  return sys::kKernel.openat(directory, path, flags, mode);
}
int StatAt(int directory, const char* path, struct stat* out, int flags) {
  Count();
  return sys::kKernel.fstatat(directory, path, out, flags);
}
int OpenAndReplace(int directory, const char* path, int flags, mode_t mode) {
  if (absl::EndsWith(path, kFile)) g_replace();
  return sys::kKernel.openat(directory, path, flags, mode);
}

class Replaced : public SaveTest {
 protected:
  void TearDown() override {
    sys::g_system = sys::kKernel;
    g_calls_left = -1;
    g_replace = nullptr;
    SaveTest::TearDown();
  }

  std::string At(const std::string& name) const { return absl::StrCat(directory(), "/", name); }

  /// One save of a file, in a directory of its own.
  std::string SaveFile(uint64_t number) {
    const AttemptId attempt = {.high = number, .low = 7};
    const std::string contents =
        SingleFileArchive(attempt, std::string(100'000, static_cast<char>('a' + number)));
    const std::string where = At(absl::StrCat("save-", number));
    fs::create_directory(where);
    CheckpointerOptions options = SmallOptions(where);
    options.launcher = Launcher::kThread;
    const auto checkpointer = Make(options);
    const SavePlan plan = SingleFilePlan(kFile, contents);
    const auto save = checkpointer->SaveAsync(
        {.name = kFile, .plan = &plan, .attempt = attempt, .single_file = true});
    EXPECT_TRUE(save.ok()) << save.status();
    if (save.ok()) {
      EXPECT_EQ(save->WaitDurable(kLong).status(), absl::OkStatus());
    }
    return where;
  }

  /// Puts the save's manifest, then its file, and removes other manifests, as a worker does.
  static void Put(const std::string& from, const std::string& to) {
    std::vector<fs::path> older;
    for (const auto& entry : fs::directory_iterator(to)) {
      if (entry.path().filename() != kFile) older.push_back(entry.path());
    }
    for (const auto& entry : fs::directory_iterator(from)) {
      if (entry.path().filename() == kFile) continue;
      fs::copy_file(entry.path(), fs::path(to) / entry.path().filename(),
                    fs::copy_options::skip_existing);
      std::erase(older, fs::path(to) / entry.path().filename());
    }
    fs::copy_file(from + "/" + kFile, to + "/.new");
    fs::rename(to + "/.new", to + "/" + kFile);
    for (const fs::path& manifest : older) fs::remove(manifest);
  }

  static VerifyReport Verified(const std::string& path) {
    auto report = Verify(path, {.threads = 1});
    EXPECT_TRUE(report.ok()) << report.status();
    return report.ok() ? *std::move(report) : VerifyReport{};
  }

  /// Verifies `path` with `replace` before each of the check's calls in turn.
  static void ExpectSoundAtEveryCall(const std::string& path, const std::function<void()>& reset,
                                     const std::function<void()>& replace) {
    g_replace = replace;
    int call = 0;
    for (bool reached = true; reached; ++call) {
      reset();
      g_calls_left = call;
      sys::g_system.openat = OpenAt;
      sys::g_system.fstatat = StatAt;
      const VerifyReport report = Verified(path);
      sys::g_system = sys::kKernel;
      reached = g_calls_left.exchange(-1) < 0;
      EXPECT_EQ(report.verdict, Verdict::kSound)
          << path << ", replaced before call " << call << ": " << report.note << " "
          << (report.faults.empty() ? "" : report.faults[0].reason + report.faults[0].found);
      EXPECT_EQ(report.checked, "XXH3-128 digests of the seal") << path << ", call " << call;
      EXPECT_EQ(report.files, 1u) << path << ", call " << call;
    }
    EXPECT_GT(call, 5) << "calls of the check";
  }
};

TEST_F(Replaced, AFileUnderTheCheckIsSound) {
  const std::string first = SaveFile(1);
  const std::string second = SaveFile(2);
  const std::string where = At("run");
  fs::create_directory(where);
  for (const std::string& path : {where + "/" + kFile, where}) {
    ExpectSoundAtEveryCall(
        path, [&] { Put(first, where); }, [&] { Put(second, where); });
  }
}

TEST_F(Replaced, AFileThatNeverStaysIsNotCalledDamaged) {
  const std::string first = SaveFile(1);
  const std::string second = SaveFile(2);
  const std::string where = At("run");
  fs::create_directory(where);
  Put(first, where);
  int calls = 0;
  g_replace = [&] { Put(++calls % 2 == 0 ? first : second, where); };
  sys::g_system.openat = OpenAndReplace;
  const VerifyReport report = Verified(where + "/" + kFile);
  EXPECT_EQ(report.verdict, Verdict::kUnreadable);
  ASSERT_EQ(report.faults.size(), 1u);
  EXPECT_EQ(report.faults[0].found, "saves replaced it 8 times");
}

TEST_F(Replaced, ADirectoryUnderTheCheckIsSound) {
  const std::string path = At("step-7");
  const std::string other = At("other");
  const std::string aside = At("aside");
  const auto reset = [&] {
    fs::remove_all(path);
    fs::remove_all(other);
    fs::create_directory(path);
    fs::create_directory(other);
    WriteRank(path, {.attempt = {.high = 1, .low = 1}}, TrainingState::Assorted(1).Sources());
    WriteRank(other, {.attempt = {.high = 2, .low = 2}}, TrainingState::Assorted(2).Sources());
  };
  ExpectSoundAtEveryCall(path, reset, [&] {
    fs::rename(path, aside);
    fs::rename(other, path);
    fs::remove_all(aside);
  });
}

TEST_F(Replaced, ADirectoryThatRetentionRemovesIsNotThere) {
  const std::string path = At("step-7");
  fs::create_directory(path);
  WriteRank(path, {}, TrainingState::Assorted(1).Sources());
  g_replace = [&] { fs::remove_all(path); };
  g_calls_left = 3;
  sys::g_system.openat = OpenAt;
  const VerifyReport report = Verified(path);
  EXPECT_EQ(report.verdict, Verdict::kUnreadable);
  ASSERT_EQ(report.faults.size(), 1u);
  EXPECT_EQ(report.faults[0].found, "nothing of that name");
}

}  // namespace
}  // namespace holdfast::testing
