// The order of the system calls that make a save durable, and of the calls that undo a failed save:
// that of the model of the protocol (model_order.h).
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/sys/system.h"
#include "tests/testing/path_of.h"
#include "tests/unit/worker/model_order.h"
#include "tests/unit/worker/worker_rig.h"

namespace holdfast::worker {
namespace {

constexpr uint64_t kArena = 16ull << 20;

std::mutex g_order_mutex;
std::vector<std::string> g_order;

void Note(const std::string& what) {
  const std::lock_guard<std::mutex> lock(g_order_mutex);
  g_order.push_back(what);
}
std::string NameOf(int fd) {
  const std::string name = std::filesystem::path(testing::PathOf(fd)).filename();
  return name.starts_with("holdfast-worker-") ? "parent" : name;
}
int NotedFsync(int fd) {
  Note("fsync " + NameOf(fd));
  return sys::kKernel.fsync(fd);
}
int NotedFtruncate(int fd, off_t bytes) {
  Note("truncate " + NameOf(fd));
  return sys::kKernel.ftruncate(fd, bytes);
}
int NotedRename(int a, const char* from, int b, const char* to, unsigned flags) {
  Note(std::string("rename ") + from + " " + to);
  return sys::kKernel.renameat2(a, from, b, to, flags);
}
int NotedUnlinkat(int directory, const char* path, int flags) {
  Note(std::string("remove ") + path);
  return sys::kKernel.unlinkat(directory, path, flags);
}
ssize_t NotedPwrite(int fd, const void* buffer, size_t bytes, off_t offset) {
  if (bytes >= kIoAlignment) Note("write " + NameOf(fd));
  return sys::kKernel.pwrite(fd, buffer, bytes, offset);
}

const std::string record = layout::kCommitRecordName;

/// The calls of the model, with the names of a save.
std::vector<std::string> Model(const char* calls, const std::string& manifest = "",
                               const std::string& hidden = "") {
  const std::pair<std::string, std::string> names[] = {
      {"MANIFEST", manifest}, {"RECORD", record}, {"HIDDEN", hidden}};
  std::vector<std::string> order;
  std::istringstream lines(calls);
  for (std::string line; std::getline(lines, line);) {
    for (const auto& [word, name] : names) {
      for (size_t at = 0; (at = line.find(word, at)) != std::string::npos; at += name.size()) {
        line.replace(at, word.size(), name);
      }
    }
    if (!line.empty()) order.push_back(line);
  }
  EXPECT_GE(order.size(), 2u);
  return order;
}

struct OrderTest : ::testing::Test {
  OrderTest() {
    g_order.clear();
    sys::g_system = sys::kKernel;
    sys::g_system.fsync = NotedFsync;
    sys::g_system.ftruncate = NotedFtruncate;
    sys::g_system.renameat2 = NotedRename;
    sys::g_system.unlinkat = NotedUnlinkat;
    sys::g_system.pwrite = NotedPwrite;
  }
  ~OrderTest() override { sys::g_system = sys::kKernel; }
  static std::vector<std::string> Order() {
    // The probe of direct I/O cuts its own traces (tmpfs, where it is taken).
    std::vector<std::string> order;
    bool written = false;
    for (const std::string& step : g_order) {
      written = written || step.starts_with("write ");
      if (written || !step.starts_with("truncate ")) order.push_back(step);
    }
    return order;
  }
  static std::vector<std::string> Tail(size_t count) {
    std::vector<std::string> order = Order();
    EXPECT_GE(order.size(), count);
    order.erase(order.begin(), order.end() - static_cast<long>(std::min(count, order.size())));
    return order;
  }

  Trainer trainer{kArena};
};

TEST_F(OrderTest, DataBeforeNamesBeforeManifestBeforeTheDirectorysName) {
  TestDirectory directory;
  TestSave save(&trainer, directory.path());
  save.parameters.engine = EngineRung::kPwrite;
  save.parameters.partial = "partial";
  save.AddFile("a.bin", {1000});
  save.Build();
  save.SealAll();
  ASSERT_TRUE(save.Run(Launcher::kThread));
  ASSERT_TRUE(save.failure().ok());
  EXPECT_EQ(Order(), Model(model::kOneRank, save.manifest_name()));
}

TEST_F(OrderTest, OldCheckpointIsLeftToTheTrainerOnceTheNewOneIsDurable) {
  TestDirectory directory;
  TestSave save(&trainer, directory.path());
  save.parameters.engine = EngineRung::kPwrite;
  save.parameters.partial = "partial";
  save.parameters.flags |= layout::kReplaceExisting;
  ::mkdir(save.target_path().c_str(), 0755);
  WriteFileAt(save.target_path() + "/old.bin", "old");
  WriteFileAt(save.target_path() + "/rank-00000-of-00001.manifest.json",
              ManifestNaming({"old.bin"}));
  save.parameters.older = {kManifestAttempt};
  save.AddFile("a.bin", {1000});
  save.Build();
  save.SealAll();
  ASSERT_TRUE(save.Run(Launcher::kThread));
  ASSERT_TRUE(save.failure().ok());
  const std::string hidden = RetiredName("step-7", kManifestAttempt);
  const std::vector<std::string> order = Model(model::kReplacing, "", hidden);
  EXPECT_EQ(Tail(order.size()), order);  // the first rename is refused: the name is taken
  EXPECT_EQ(save.job()->completion.left_behind, hidden);
  EXPECT_EQ(NamesIn(directory.path() + "/" + hidden),
            (std::vector<std::string>{"old.bin", "rank-00000-of-00001.manifest.json"}));
  EXPECT_EQ(save.Unsound(), "");
}

TEST_F(OrderTest, RankZeroMakesTheVotesOfTheOthersDurableBeforeItCommits) {
  TestDirectory directory;
  TestSave save(&trainer, directory.path());
  save.parameters.engine = EngineRung::kPwrite;
  save.parameters.partial = "partial";
  save.parameters.world_size = 2;
  save.AddFile("a.bin", {1000});
  save.Build();
  save.SealAll();
  VoteAs(save, 1);
  ASSERT_TRUE(save.Run(Launcher::kThread));
  ASSERT_TRUE(save.failure().ok());
  std::vector<std::string> order = Model(model::kRankZeroOfTwo);
  order.push_back("remove ranks.board");  // which the model does not know
  EXPECT_EQ(Tail(order.size()), order);
}

const TestSave* g_voted = nullptr;

TEST_F(OrderTest, VoteTakenBackBehindTheRecordTakesTheRecordAwayFirst) {
  TestDirectory directory;
  TestSave save(&trainer, directory.path());
  save.parameters.engine = EngineRung::kPwrite;
  save.parameters.partial = "partial";
  save.parameters.world_size = 2;
  save.AddFile("a.bin", {1000});
  save.Build();
  save.SealAll();
  VoteAs(save, 1);
  g_voted = &save;
  sys::g_system.renameat2 = [](int a, const char* from, int b, const char* to, unsigned flags) {
    if (to == record) {
      layout::RankFailure failure;
      failure.rank = 1;
      failure.kind = static_cast<uint32_t>(layout::RankFailureKind::kFailed);
      failure.code = static_cast<int32_t>(FailureCode::kCancelled);
      RankBoard board;
      OpenBoardOf(*g_voted, g_voted->partial_path(), 1, &board);
      EXPECT_TRUE(WriteFailure(board, Side::kTrainer, failure, /*raise=*/true));
      CloseBoard(&board);
    }
    return NotedRename(a, from, b, to, flags);
  };
  ASSERT_TRUE(save.Run(Launcher::kThread));
  EXPECT_EQ(save.failure().code, FailureCode::kAborted);
  EXPECT_EQ(save.seen().rank, 1u);
  const std::vector<std::string> order = Model(model::kVoteTakenBack, save.manifest_name());
  // Behind it the board is removed; the other rank's manifest is still there.
  std::vector<std::string> tail = Tail(order.size() + 2);
  tail.resize(std::min(order.size(), tail.size()));
  EXPECT_EQ(tail, order);
}

// Of rank 1 of 2, and what the worker reports once rank 0 has renamed.
Failure ReportOfRankOne(Trainer* trainer) {
  TestDirectory directory;
  TestSave save(trainer, directory.path());
  save.parameters.engine = EngineRung::kPwrite;
  save.parameters.partial = "partial";
  save.parameters.rank = 1;
  save.parameters.world_size = 2;
  save.AddFile("a.bin", {1000});
  save.Build();
  save.SealAll();
  TestWorker worker(Launcher::kThread, *trainer);
  save.StartOn(&worker);
  EXPECT_TRUE(save.AwaitPhase(layout::Phase::kWaitingForRanks));
  EXPECT_EQ(::rename(save.partial_path().c_str(), save.target_path().c_str()), 0);
  RankBoard board;
  OpenBoardOf(save, save.target_path(), 0, &board);
  EXPECT_TRUE(WriteDecision(board, layout::Decision::kCommitted));
  CloseBoard(&board);
  EXPECT_TRUE(save.AwaitDone());
  worker.Join();
  EXPECT_EQ(save.Unsound(), "") << "it is not this rank's to undo";
  return save.failure();
}

TEST_F(OrderTest, EveryRankMakesTheFinalNameDurable) {
  EXPECT_TRUE(ReportOfRankOne(&trainer).ok());
  const std::vector<std::string> order = Model(model::kRankOneOfTwo);
  EXPECT_EQ(Tail(order.size()), order);  // the vote, and the name that rank 0 gave
}

TEST_F(OrderTest, RankReportsNothingDurableWhoseNameIsNot) {
  // The first one of the parent is that of the new directory, before anything is written.
  static int parents = 0;
  parents = 0;
  sys::g_system.fsync = [](int fd) {
    if (NameOf(fd) != "parent" || ++parents == 1) return sys::kKernel.fsync(fd);
    errno = EIO;
    return -1;
  };
  const Failure failure = ReportOfRankOne(&trainer);
  EXPECT_EQ(failure.code, FailureCode::kDataLoss);
  EXPECT_EQ(failure.operation, Operation::kSyncDirectory);
}

TEST_F(OrderTest, AbortRemovesTheManifestThenTheFilesThenTheMarkEachDurably) {
  TestDirectory directory;
  TestSave save(&trainer, directory.path());
  save.parameters.engine = EngineRung::kPwrite;
  save.parameters.partial = "partial";
  save.AddFile("a.bin", {1000});
  save.Build();
  {
    TestWorker worker(Launcher::kThread, trainer);
    save.StartOn(&worker);
    ASSERT_TRUE(save.AwaitPhase(layout::Phase::kWriting));
    // After the early look, so that only the last rename is refused.
    ::mkdir(save.target_path().c_str(), 0755);
    WriteFileAt(save.target_path() + "/theirs", "bytes");
    save.SealAll();
    ASSERT_TRUE(save.AwaitDone());
  }
  EXPECT_EQ(save.failure().code, FailureCode::kAlreadyExists);
  const std::vector<std::string> order = Model(model::kGivingUp, save.manifest_name());
  EXPECT_EQ(Tail(order.size()), order);  // the first rename is refused: the name is taken
  EXPECT_EQ(NamesIn(directory.path()), std::vector<std::string>{"step-7"});
}

}  // namespace
}  // namespace holdfast::worker
