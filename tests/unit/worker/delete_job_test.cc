// Removing retired checkpoints: in crash-safe order, in steps, one after the other.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/base/check.h"
#include "runtime/sys/system.h"
#include "tests/unit/worker/worker_rig.h"

namespace holdfast::worker {
namespace {

std::vector<std::string>* g_log = nullptr;
layout::Job* g_cancel_at_truncate = nullptr;

int LoggedUnlinkat(int directory, const char* path, int flags) {
  g_log->push_back("remove " + std::string(path));
  return sys::kKernel.unlinkat(directory, path, flags);
}
int LoggedFsync(int fd) {
  g_log->push_back("fsync");
  return sys::kKernel.fsync(fd);
}
int LoggedFtruncate(int fd, off_t bytes) {
  g_log->push_back("truncate " + std::to_string(bytes >> 20));
  if (g_cancel_at_truncate != nullptr) g_cancel_at_truncate->cancel.store(1);
  return sys::kKernel.ftruncate(fd, bytes);
}

struct DeleteJobTest : ::testing::Test {
  DeleteJobTest() {
    g_log = &log;
    g_cancel_at_truncate = nullptr;
    parent = ::open(directory.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  }
  ~DeleteJobTest() override {
    sys::g_system = sys::kKernel;
    ::close(parent);
  }
  void Make(const std::string& name, const std::vector<std::string>& files) {
    const std::string path = directory.path() + "/" + name;
    ::mkdir(path.c_str(), 0755);
    for (const std::string& file : files) WriteFileAt(path + "/" + file, ManifestNaming(files));
  }
  Failure Delete(const std::vector<std::string>& names) {
    auto made = writer::JobTable::ForDelete({.launcher = Launcher::kThread}, names);
    HOLDFAST_CHECK(made.ok(), "the rig itself must work");
    table = *std::move(made);
    layout::CompletionSlot& slot = table->job()->completion;
    log.clear();  // The table's own making.
    if (cancel_at_truncate) g_cancel_at_truncate = table->job();
    TestWorker worker(Launcher::kThread, trainer);
    worker.Run(*table, parent, parent);
    worker.Send(layout::MessageKind::kExit, 0, {});
    while (slot.state.load(std::memory_order_acquire) == 0) ::usleep(500);
    return slot.failure;
  }

  TestDirectory directory;
  Trainer trainer{1u << 20};
  std::unique_ptr<writer::JobTable> table;
  std::vector<std::string> log;
  bool cancel_at_truncate = false;
  int parent = -1;
};

TEST_F(DeleteJobTest, RemovesManifestsFirstAndDurably) {
  Make("step-1", {"a", "rank-00001-of-00002.manifest.json", "b",
                  "rank-00000-of-00002.manifest.json", layout::kCommitRecordName});
  sys::g_system.unlinkat = LoggedUnlinkat;
  sys::g_system.fsync = LoggedFsync;
  EXPECT_TRUE(Delete({"step-1"}).ok());
  ASSERT_EQ(log.size(), 9u);
  std::sort(log.begin(), log.begin() + 2);
  EXPECT_EQ(log[0], "remove rank-00000-of-00002.manifest.json");
  EXPECT_EQ(log[1], "remove rank-00001-of-00002.manifest.json");
  EXPECT_EQ(log[2], "fsync");
  EXPECT_EQ(log[5], "fsync");
  EXPECT_EQ(log[6], "remove " + std::string(layout::kCommitRecordName) + ".tmp") << "the mark";
  EXPECT_EQ(log[7], "remove step-1");
  EXPECT_EQ(log[8], "fsync");
  EXPECT_TRUE(NamesIn(directory.path()).empty());
}

TEST_F(DeleteJobTest, RemovesManyFilesAndMissingDirectories) {
  std::vector<std::string> files;
  for (int i = 0; i < 1500; ++i) files.push_back("file-with-a-long-name-" + std::to_string(i));
  Make("step-1", files);
  Make("step-2", {});
  EXPECT_TRUE(Delete({"step-1", "gone", "step-2"}).ok());
  EXPECT_TRUE(NamesIn(directory.path()).empty());
  EXPECT_GE(table->job()->steps.load(), files.size()) << "no stall deadline hears of the removal";
}

TEST_F(DeleteJobTest, LeavesWhatIsNotHoldfasts) {
  Make("step-1", {"a"});
  Make("step-1/theirs", {"precious"});
  Make("step-2", {"a"});
  const Failure failure = Delete({"step-1", "step-2"});
  EXPECT_EQ(failure.code, FailureCode::kFailedPrecondition);
  EXPECT_EQ(failure.file, 0u);
  EXPECT_TRUE(Exists(directory.path() + "/step-1/theirs/precious"));
  // The others are removed all the same.
  EXPECT_FALSE(Exists(directory.path() + "/step-2"));
}

TEST_F(DeleteJobTest, KeepsACheckpointWithAFileOfOthersWhole) {
  const std::string manifest = "rank-00000-of-00001.manifest.json";
  const std::vector<std::string> all = {"a", "config.json", manifest};
  for (const std::string name : {"step-1", "step-1.retired-00000000000000050000000000000006",
                                 "step-1.partial-00000000000000050000000000000007"}) {
    Make(name, {"a"});
    WriteFileAt(directory.path() + "/" + name + "/" + manifest, ManifestNaming({"a"}));
    WriteFileAt(directory.path() + "/" + name + "/config.json", "precious");
    const Failure failure = Delete({name});
    EXPECT_EQ(failure.code, FailureCode::kFailedPrecondition);
    EXPECT_STREQ(table->job()->completion.foreign, "config.json");
    EXPECT_EQ(NamesIn(directory.path() + "/" + name), all) << name;
  }
}

TEST_F(DeleteJobTest, RemovesFilesWhoseNamesAManifestEscapes) {
  const std::string manifest = "rank-00000-of-00001.manifest.json";
  Make("step-1", {manifest});
  WriteFileAt(directory.path() + "/step-1/" + manifest,
              ManifestNaming({R"(a\nb)", R"(\"c\\d\")", R"(\u0001\t\u007f)", R"(\r)"}));
  for (const std::string name : {"a\nb", "\"c\\d\"", "\x01\t\x7f", "\r"})
    WriteFileAt(directory.path() + "/step-1/" + name, "x");
  EXPECT_TRUE(Delete({"step-1"}).ok()) << table->job()->completion.foreign;
  EXPECT_TRUE(NamesIn(directory.path()).empty());
}

TEST_F(DeleteJobTest, KeepsACheckpointWhoseManifestHasDamagedEscapes) {
  const std::string manifest = "rank-00000-of-00001.manifest.json";
  Make("step-1", {manifest});
  WriteFileAt(directory.path() + "/step-1/" + manifest,
              ManifestNaming({R"(\u00)", R"(\u00zz)", R"(\u00e9)", R"(\q)", R"(\u0000)"}));
  WriteFileAt(directory.path() + "/step-1/q", "precious");
  EXPECT_EQ(Delete({"step-1"}).code, FailureCode::kFailedPrecondition);
  EXPECT_TRUE(Exists(directory.path() + "/step-1/q"));
}

TEST_F(DeleteJobTest, TakesCommitRecordAndBoardForHoldfasts) {
  const std::string record = layout::kCommitRecordName;
  const std::string manifest = "rank-00000-of-00001.manifest.json";
  Make("step-1", {"a"});
  for (const std::string& name :
       {manifest, record, record + ".tmp", std::string(layout::kBoardName)})
    WriteFileAt(directory.path() + "/step-1/" + name, ManifestNaming({"a"}));
  EXPECT_TRUE(Delete({"step-1"}).ok()) << table->job()->completion.foreign;
  EXPECT_TRUE(NamesIn(directory.path()).empty());
}

TEST_F(DeleteJobTest, RemovesWhatAnAttemptWroteThatNeverCommitted) {
  const std::string name = "step-1.partial-00000000000000050000000000000006";
  Make(name, {"a", "of-a-rank-without-a-manifest"});
  WriteFileAt(directory.path() + "/" + name + "/rank-00000-of-00002.manifest.json",
              ManifestNaming({"a"}));
  WriteFileAt(directory.path() + "/" + name + "/rank-00001-of-00002.manifest.json",
              ManifestNaming({}));
  EXPECT_TRUE(Delete({name}).ok());
  EXPECT_TRUE(NamesIn(directory.path()).empty());
}

TEST_F(DeleteJobTest, DoesNotFollowSymlinks) {
  Make("elsewhere", {"precious"});
  Make("step-1", {});
  ASSERT_EQ(::symlink("../elsewhere/precious", (directory.path() + "/step-1/link").c_str()), 0);
  ASSERT_EQ(::symlink("elsewhere", (directory.path() + "/step-2").c_str()), 0);
  EXPECT_FALSE(Delete({"step-1", "step-2"}).ok());
  EXPECT_FALSE(Exists(directory.path() + "/step-1"));
  EXPECT_TRUE(Exists(directory.path() + "/elsewhere/precious"));
}

TEST_F(DeleteJobTest, FreesLargeFilesInSteps) {
  Make("step-1", {"large"});
  ASSERT_EQ(::truncate((directory.path() + "/step-1/large").c_str(), 600ll << 20), 0);  // a hole
  sys::g_system.ftruncate = LoggedFtruncate;
  EXPECT_TRUE(Delete({"step-1"}).ok());
  EXPECT_EQ(log, (std::vector<std::string>{"truncate 344", "truncate 88"}));
}

TEST_F(DeleteJobTest, CancelStopsBetweenSteps) {
  Make("step-1", {"large"});
  ASSERT_EQ(::truncate((directory.path() + "/step-1/large").c_str(), 2ll << 30), 0);
  sys::g_system.ftruncate = LoggedFtruncate;
  cancel_at_truncate = true;
  EXPECT_EQ(Delete({"step-1"}).code, FailureCode::kCancelled);
  EXPECT_EQ(log.size(), 1u);
}

TEST_F(DeleteJobTest, FileWithAnotherNameKeepsItsBytes) {
  Make("step-1", {"large"});
  const std::string path = directory.path() + "/step-1/large";
  ASSERT_EQ(::truncate(path.c_str(), 300ll << 20), 0);
  ASSERT_EQ(::link(path.c_str(), (directory.path() + "/kept").c_str()), 0);
  EXPECT_TRUE(Delete({"step-1"}).ok());
  struct stat status = {};
  ASSERT_EQ(::stat((directory.path() + "/kept").c_str(), &status), 0);
  EXPECT_EQ(status.st_size, 300ll << 20);
}

}  // namespace
}  // namespace holdfast::worker
