// How a checkpoint is retired and removed.
#include "runtime/directory/removal.h"

#include <dirent.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/directory/entries.h"
#include "runtime/format/directory_names.h"
#include "runtime/sys/system.h"
#include "runtime/worker/contents.h"
#include "runtime/worker/exchange.h"
#include "runtime/worker/job_run.h"
#include "runtime/worker/listing.h"
#include "tests/testing/small_checkpoint.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using testing::SmallRank;
using testing::TemporaryDirectory;
using testing::WriteSmallCheckpoint;

class RemovalTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto opened = directory::OpenDirectory(AT_FDCWD, directory_.path());
    ASSERT_TRUE(opened.ok());
    parent_ = *std::move(opened);
    WriteSmallCheckpoint(directory_ / "step-7", rank_);
  }
  void TearDown() override { sys::g_system = sys::kKernel; }

  absl::StatusOr<directory::RetiredCheckpoint> Retire() const {
    HOLDFAST_ASSIGN_OR_RETURN(const CheckpointInfo info, InspectCheckpoint(directory_ / "step-7"));
    return directory::RetireCheckpoint(parent_.get(), info);
  }

  TemporaryDirectory directory_;
  const SmallRank rank_ = {
      .checkpoint = "step-7", .attempt = {.high = 3, .low = 4}, .world_size = 2, .step = 7};
  base::UniqueFd parent_;
};

// Calls in the order that they were made, for the hooks, which are plain functions.
std::vector<std::string>* g_calls = nullptr;
void LogInto(std::vector<std::string>* calls) {
  g_calls = calls;
  sys::g_system.unlinkat = [](int directory, const char* name, int flags) {
    g_calls->push_back(name);
    return sys::kKernel.unlinkat(directory, name, flags);
  };
  sys::g_system.fsync = [](int fd) {
    g_calls->push_back("fsync");
    return sys::kKernel.fsync(fd);
  };
}

TEST_F(RemovalTest, RemovesManifestsThenFilesThenTheMarkEachDurably) {
  std::vector<std::string> calls;
  LogInto(&calls);
  std::ofstream(directory_ / "step-7/holdfast.commit.json") << rank_.record_text();
  ASSERT_TRUE(directory::RemoveDirectory(parent_.get(), "step-7").ok());
  ASSERT_EQ(calls.size(), 9u);
  std::sort(calls.begin(), calls.begin() + 2);
  std::sort(calls.begin() + 3, calls.begin() + 5);
  EXPECT_THAT(
      calls,
      ElementsAre("rank-00000-of-00002.manifest.json", "rank-00001-of-00002.manifest.json", "fsync",
                  "model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors", "fsync",
                  "holdfast.commit.json.tmp", "step-7", "fsync"));
  EXPECT_FALSE(std::filesystem::exists(directory_ / "step-7"));
}

/// What some file systems have (exFAT, FUSE), and no local one here: a name of 700 bytes.
ssize_t WithALongName(int fd, void* buffer, size_t bytes) {
  const ssize_t got = sys::kKernel.getdents64(fd, buffer, bytes - 1024);
  if (got <= 0) return got;
  struct Head {
    uint64_t inode = 1;
    int64_t next = 0;
    uint16_t bytes = 728;
    uint8_t type = DT_REG;
  } head;
  char* const at = static_cast<char*>(buffer) + got;
  std::memset(at, 0, head.bytes);
  std::memcpy(at, &head, sizeof(head));
  std::memset(at + offsetof(worker::ListedEntry, name), 'n', 700);
  return got + head.bytes;
}

TEST_F(RemovalTest, AForeignNameOfAnyLengthIsNamedAsFarAsItFits) {
  sys::g_system.getdents64 = WithALongName;
  sys::g_system.fstatat = [](int directory, const char* name, struct stat* out, int flags) {
    return sys::kKernel.fstatat(directory, name[0] == 'n' ? "." : name, out, flags);
  };
  const auto file = [](int directory, const char* name, struct stat* out, int flags) {
    const int result = sys::kKernel.fstatat(directory, name[0] == 'n' ? "." : name, out, flags);
    if (name[0] == 'n') out->st_mode = S_IFREG | 0644;
    return result;
  };
  std::vector<char> buffer(worker::kDirectoryBufferBytes);
  const auto opened = directory::OpenDirectory(parent_.get(), "step-7");
  ASSERT_TRUE(opened.ok());
  for (const bool directory : {true, false}) {
    if (!directory) sys::g_system.fstatat = file;
    const worker::Contents contents = worker::LookInto(opened->get(), buffer.data());
    EXPECT_EQ(contents.error_number, 0);
    EXPECT_EQ(contents.foreign, std::string(kNameBytes - 1, 'n'));
    EXPECT_EQ(contents.holds_directory, directory);
  }
  const absl::Status removed = directory::RemoveDirectory(parent_.get(), "step-7");
  EXPECT_TRUE(absl::IsFailedPrecondition(removed)) << removed;
}

TEST_F(RemovalTest, RemovesTheManifestsOfARetiredOneDurablyAfterAnythingElse) {
  std::ofstream(directory_ / "step-7/holdfast.commit.json") << rank_.record_text();
  const auto retired = Retire();
  ASSERT_TRUE(retired.ok()) << retired.status();
  std::vector<std::string> calls;
  LogInto(&calls);
  ASSERT_TRUE(directory::RemoveDirectory(parent_.get(), retired->name).ok());
  ASSERT_EQ(calls.size(), 9u);
  std::sort(calls.begin() + 2, calls.begin() + 4);
  std::sort(calls.begin() + 5, calls.begin() + 7);
  EXPECT_THAT(
      calls,
      ElementsAre("fsync", "holdfast.commit.json", "model-00000-of-00002.safetensors",
                  "model-00001-of-00002.safetensors", "fsync", "rank-00000-of-00002.manifest.json",
                  "rank-00001-of-00002.manifest.json", retired->name, "fsync"));
}

TEST_F(RemovalTest, DoesNotRetireACheckpointThatASaveIsReplacing) {
  const auto standing = directory::OpenDirectory(parent_.get(), "step-7");
  ASSERT_TRUE(standing.ok());
  int lock = -1;
  ASSERT_TRUE(worker::LockManifest(standing->get(), "rank-00000-of-00002.manifest.json", &lock));
  base::UniqueFd held(lock);
  EXPECT_TRUE(absl::IsAborted(Retire().status()));
  EXPECT_TRUE(std::filesystem::exists(directory_ / "step-7"));
  held.Reset();
  EXPECT_TRUE(Retire().ok());
}

TEST_F(RemovalTest, HoldsTheLockOfReplacementsDuringTheRename) {
  static bool locked;
  locked = false;
  const auto info = InspectCheckpoint(directory_ / "step-7");
  ASSERT_TRUE(info.ok()) << info.status();
  sys::g_system.renameat2 = [](int from, const char* name, int to, const char* target,
                               unsigned flags) {
    const auto standing = directory::OpenDirectory(from, name);
    int lock = -1;
    locked = !worker::LockManifest(standing->get(), "rank-00000-of-00002.manifest.json", &lock);
    base::UniqueFd closes(lock);
    return sys::kKernel.renameat2(from, name, to, target, flags);
  };
  EXPECT_TRUE(directory::RetireCheckpoint(parent_.get(), *info).ok());
  EXPECT_TRUE(locked);
}

TEST_F(RemovalTest, KeepsAFileThatComesWhileARetiredOneIsRemoved) {
  const auto retired = Retire();
  ASSERT_TRUE(retired.ok()) << retired.status();
  static std::string path;
  path = directory_ / retired->name;
  sys::g_system.unlinkat = [](int directory, const char* name, int flags) {
    std::ofstream(path + "/config.json") << "precious";
    return sys::kKernel.unlinkat(directory, name, flags);
  };
  const absl::Status told = directory::RemoveDirectory(parent_.get(), retired->name);
  EXPECT_TRUE(absl::IsFailedPrecondition(told)) << told;
  EXPECT_THAT(std::string(told.message()), ::testing::HasSubstr("config.json"));
  EXPECT_EQ(testing::ReadFileBytes(path + "/config.json"), "precious");
  EXPECT_FALSE(std::filesystem::exists(path + "/model-00000-of-00002.safetensors"));
}

TEST_F(RemovalTest, FreesLargeFilesInSteps) {
  std::filesystem::resize_file(directory_ / "step-7/model-00000-of-00002.safetensors", 600 << 20);
  static int steps;
  steps = 0;
  sys::g_system.ftruncate = [](int fd, off_t bytes) {
    ++steps;
    return sys::kKernel.ftruncate(fd, bytes);
  };
  EXPECT_TRUE(directory::RemoveDirectory(parent_.get(), "step-7").ok());
  EXPECT_EQ(steps, 2);
}

TEST_F(RemovalTest, RemovesTheCheckpointOfOneAttemptByItsPath) {
  const std::string path = directory_ / "step-7";
  std::ofstream(path + "/holdfast.commit.json") << rank_.record_text();
  EXPECT_TRUE(absl::IsAborted(RemoveCheckpoint(path, {.high = 3, .low = 5})));
  EXPECT_TRUE(InspectCheckpoint(path).ok());
  EXPECT_TRUE(RemoveCheckpoint(path, rank_.attempt).ok());
  EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
  EXPECT_TRUE(absl::IsNotFound(RemoveCheckpoint(path, rank_.attempt)));
  EXPECT_TRUE(absl::IsNotFound(RemoveCheckpoint(directory_ / "none/step-7", rank_.attempt)));
}

TEST_F(RemovalTest, CanBeRepeated) {
  ASSERT_TRUE(directory::RemoveDirectory(parent_.get(), "step-7").ok());
  EXPECT_TRUE(directory::RemoveDirectory(parent_.get(), "step-7").ok());
}

TEST_F(RemovalTest, LeavesADirectoryWithAForeignDirectoryInsideWhole) {
  std::filesystem::create_directory(directory_ / "step-7/mine");
  EXPECT_TRUE(absl::IsFailedPrecondition(directory::RemoveDirectory(parent_.get(), "step-7")));
  EXPECT_TRUE(InspectCheckpoint(directory_ / "step-7").ok());
}

TEST_F(RemovalTest, TouchesNoDataFileWhenTheManifestsRemovalIsNotDurable) {
  sys::g_system.fsync = [](int) {
    errno = EIO;
    return -1;
  };
  EXPECT_TRUE(absl::IsDataLoss(directory::RemoveDirectory(parent_.get(), "step-7")));
  EXPECT_TRUE(std::filesystem::exists(directory_ / "step-7/model-00000-of-00002.safetensors"));
}

TEST_F(RemovalTest, RemovesTheTracesOfASaveWhereDirectoriesCannotBeSynced) {
  const std::string partial = format::PartialName("step-8", {.high = 5, .low = 6});
  std::filesystem::create_directory(directory_ / partial);
  std::ofstream(directory_ / (partial + "/holdfast.commit.json.tmp")) << "";
  sys::g_system.fsync = [](int) {
    errno = EINVAL;
    return -1;
  };
  EXPECT_TRUE(directory::RemoveDirectory(parent_.get(), partial).ok());
  EXPECT_FALSE(std::filesystem::exists(directory_ / partial));
}

TEST_F(RemovalTest, LeavesACheckpointWithALinkInsideWhole) {
  WriteSmallCheckpoint(directory_ / "other", rank_);
  std::filesystem::create_symlink("../other", directory_ / "step-7/link");
  EXPECT_TRUE(absl::IsFailedPrecondition(directory::RemoveDirectory(parent_.get(), "step-7")));
  EXPECT_TRUE(InspectCheckpoint(directory_ / "step-7").ok());
  EXPECT_TRUE(std::filesystem::exists(directory_ / "other/model-00000-of-00002.safetensors"));
}

TEST_F(RemovalTest, LeavesACheckpointWithAForeignFileCalledLikeAManifestWhole) {
  for (const char* const name :
       {"rank-notes.manifest.json", "rank-0-of-2.manifest.json",
        "rank-00002-of-00002.manifest.json", "rank-00000-of-00002-0123.manifest.json",
        "rank-000000-of-00002.manifest.json"}) {
    SCOPED_TRACE(name);
    const std::string file = absl::StrCat(directory_ / "step-7/", name);
    std::ofstream(file) << "mine";
    const auto info = InspectCheckpoint(directory_ / "step-7");
    ASSERT_TRUE(info.ok()) << info.status();
    const absl::Status refused = directory::RetireCheckpoint(parent_.get(), *info).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr(name));
    EXPECT_TRUE(absl::IsFailedPrecondition(directory::RemoveDirectory(parent_.get(), "step-7")));
    EXPECT_TRUE(InspectCheckpoint(directory_ / "step-7").ok());
    EXPECT_EQ(testing::ReadFileBytes(file), "mine");
    std::filesystem::remove(file);
  }
}

TEST_F(RemovalTest, LeavesACheckpointThatLacksAManifestUnderItsName) {
  const auto info = InspectCheckpoint(directory_ / "step-7");
  ASSERT_TRUE(info.ok()) << info.status();
  std::filesystem::remove(directory_ / "step-7/rank-00001-of-00002.manifest.json");
  const absl::Status refused = directory::RetireCheckpoint(parent_.get(), *info).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_TRUE(std::filesystem::exists(directory_ / "step-7/model-00000-of-00002.safetensors"));
}

TEST_F(RemovalTest, RetiresUnderANameThatRecoveryRemovesWhenNobodyIsAtWork) {
  const auto info = InspectCheckpoint(directory_ / "step-7");
  ASSERT_TRUE(info.ok());
  {
    const auto retired = directory::RetireCheckpoint(parent_.get(), *info);
    ASSERT_TRUE(retired.ok()) << retired.status();
    EXPECT_EQ(format::ParseDirectoryName(retired->name).kind, format::DirectoryKind::kRetired);
    EXPECT_FALSE(std::filesystem::exists(directory_ / "step-7"));
    // Its lock makes a second removal keep away.
    const int fd = open((directory_ / retired->name).c_str(), O_RDONLY);
    EXPECT_NE(flock(fd, LOCK_EX | LOCK_NB), 0);
    close(fd);
  }
  const auto report = Recover(directory_.path(), {});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->removed.size(), 1u);
  EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
}

TEST_F(RemovalTest, RecoverySyncsTheExchangeOfARunningSaveBeforeItRemovesTheOldOne) {
  SmallRank successor = rank_;
  successor.attempt = {.high = 77, .low = 77};
  WriteSmallCheckpoint(directory_ / "next", successor);
  // A running save exchanges the names behind the recovery's fsync of the parent, and has not made
  // them durable yet.
  static std::string path;
  static bool exchanged;
  static std::vector<std::string> calls;
  path = directory_.path();
  exchanged = false;
  calls.clear();
  sys::g_system.fsync = [](int fd) {
    if (exchanged) calls.push_back("fsync");
    const int result = sys::kKernel.fsync(fd);
    if (exchanged) return result;
    exchanged = true;
    const std::string retired =
        format::FormatDirectoryName({.checkpoint = "step-7",
                                     .kind = format::DirectoryKind::kRetired,
                                     .attempt = {.high = 3, .low = 4}});
    std::filesystem::rename(path + "/step-7", path + "/" + retired);
    std::filesystem::rename(path + "/next", path + "/step-7");
    return result;
  };
  sys::g_system.unlinkat = [](int directory, const char* name, int flags) {
    calls.push_back("unlink");
    return sys::kKernel.unlinkat(directory, name, flags);
  };
  const auto report = Recover(directory_.path(), {});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->removed.size(), 1u);
  ASSERT_GE(calls.size(), 2u);
  EXPECT_EQ(calls[0], "fsync") << "power loss would give the name back to a half removed directory";
}

TEST_F(RemovalTest, DoesNotRetireWhatHasReplacedItMeanwhile) {
  const auto info = InspectCheckpoint(directory_ / "step-7");
  ASSERT_TRUE(info.ok());
  std::filesystem::remove_all(directory_ / "step-7");
  SmallRank successor = rank_;
  successor.attempt = {.high = 77, .low = 77};
  WriteSmallCheckpoint(directory_ / "step-7", successor);
  EXPECT_TRUE(absl::IsAborted(directory::RetireCheckpoint(parent_.get(), *info).status()));
  EXPECT_TRUE(InspectCheckpoint(directory_ / "step-7").ok());
}

TEST_F(RemovalTest, DoesNotRetireWhatIsReplacedAndRemovedDuringALook) {
  static int calls_left;
  static std::string path;
  path = directory_.path();
  int struck = 0;
  for (int calls = 0;; ++calls) {
    std::filesystem::remove_all(directory_ / "step-7");
    std::filesystem::remove_all(directory_ / "old");
    WriteSmallCheckpoint(directory_ / "step-7", rank_);
    const auto info = InspectCheckpoint(directory_ / "step-7");
    ASSERT_TRUE(info.ok());
    calls_left = calls;
    sys::g_system.fstatat = [](int directory, const char* name, struct stat* found, int flags) {
      if (std::string(name) == "rank-00001-of-00002.manifest.json" && calls_left-- == 0) {
        std::filesystem::rename(path + "/step-7", path + "/old");
        WriteSmallCheckpoint(path + "/step-7",
                             {.checkpoint = "step-7", .attempt = {77, 77}, .world_size = 2});
        std::filesystem::remove(path + "/old/" + name);
      }
      return sys::kKernel.fstatat(directory, name, found, flags);
    };
    const absl::Status retired = directory::RetireCheckpoint(parent_.get(), *info).status();
    sys::g_system = sys::kKernel;
    if (calls_left >= 0) break;
    EXPECT_TRUE(absl::IsAborted(retired)) << retired << " at call " << calls;
    ++struck;
  }
  EXPECT_GE(struck, 2);
}

TEST_F(RemovalTest, GivesNoRetiredNameToWhatReplacedItBeforeTheLock) {
  const auto info = InspectCheckpoint(directory_ / "step-7");
  ASSERT_TRUE(info.ok());
  static std::string path;
  path = directory_.path();
  static SmallRank successor;
  successor = rank_;
  successor.attempt = {.high = 77, .low = 77};
  static int renames;
  renames = 0;
  sys::g_system.flock = [](int fd, int operation) {
    sys::g_system.flock = sys::kKernel.flock;
    std::filesystem::rename(path + "/step-7", path + "/old");
    WriteSmallCheckpoint(path + "/step-7", successor);
    return sys::kKernel.flock(fd, operation);
  };
  sys::g_system.renameat2 = [](int a, const char* from, int b, const char* to, unsigned flags) {
    ++renames;
    return sys::kKernel.renameat2(a, from, b, to, flags);
  };
  EXPECT_TRUE(absl::IsAborted(directory::RetireCheckpoint(parent_.get(), *info).status()));
  EXPECT_EQ(renames, 0) << "a recovery after a crash would remove the newer checkpoint";
  EXPECT_TRUE(InspectCheckpoint(directory_ / "step-7").ok());
}

TEST_F(RemovalTest, GivesTheNameBackToWhatReplacedItAtTheLastMoment) {
  const auto info = InspectCheckpoint(directory_ / "step-7");
  ASSERT_TRUE(info.ok());
  static std::string path;
  path = directory_.path();
  static SmallRank successor;
  successor = rank_;
  successor.attempt = {.high = 77, .low = 77};
  sys::g_system.renameat2 = [](int a, const char* from, int b, const char* to, unsigned flags) {
    sys::g_system.renameat2 = sys::kKernel.renameat2;
    std::filesystem::rename(path + "/step-7", path + "/old");
    WriteSmallCheckpoint(path + "/step-7", successor);
    return sys::kKernel.renameat2(a, from, b, to, flags);
  };
  EXPECT_TRUE(absl::IsAborted(directory::RetireCheckpoint(parent_.get(), *info).status()));
  const auto still = InspectCheckpoint(directory_ / "step-7");
  ASSERT_TRUE(still.ok()) << still.status();
  EXPECT_TRUE(still->attempt == successor.attempt);
}

TEST_F(RemovalTest, RetiresTheSameAttemptTwice) {
  const auto info = InspectCheckpoint(directory_ / "step-7");
  ASSERT_TRUE(info.ok());
  const auto first = directory::RetireCheckpoint(parent_.get(), *info);
  WriteSmallCheckpoint(directory_ / "step-7", rank_);
  const auto second = directory::RetireCheckpoint(parent_.get(), *info);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_NE(first->name, second->name);
}

}  // namespace
}  // namespace holdfast
