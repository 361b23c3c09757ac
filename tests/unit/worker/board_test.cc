// The rank board: the file under torn, foreign and missing bytes, and the cost of waiting on the
// board.
#include "runtime/layout/board.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "runtime/sys/system.h"
#include "runtime/worker/rank_board.h"
#include "tests/unit/worker/worker_rig.h"

namespace holdfast::worker {
namespace {

constexpr uint64_t kArena = 16ull << 20;
constexpr AttemptId kAttempt = {.high = 1, .low = 2};

struct BoardTest : ::testing::Test {
  BoardTest() : fd(::open(directory.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {}
  ~BoardTest() override {
    CloseBoard(&zero);
    CloseBoard(&one);
    ::close(fd);
    sys::g_system = sys::kKernel;
  }
  void OpenBoth() {
    ASSERT_EQ(OpenBoard(fd, kAttempt, 0, 2, &zero), 0);
    ASSERT_EQ(OpenBoard(fd, kAttempt, 1, 2, &one), 0);
  }
  TestDirectory directory;
  int fd = -1;
  RankBoard zero;
  RankBoard one;
};

layout::RankFailure AFailure(const char* text) {
  layout::RankFailure failure;
  failure.rank = 1;
  failure.kind = static_cast<uint32_t>(layout::RankFailureKind::kFailed);
  failure.code = static_cast<int32_t>(FailureCode::kAborted);
  SetText(&failure, text);
  return failure;
}

TEST_F(BoardTest, RanksSeeWhatEachOtherWrote) {
  OpenBoth();
  ASSERT_TRUE(WritePulse(zero, Side::kTrainer, layout::RankState::kJoined));
  ASSERT_TRUE(WritePulse(one, Side::kWorker, layout::RankState::kVoted));
  layout::RankSlot slots[2];
  ASSERT_TRUE(ReadSlots(zero, 0, 2, slots));
  EXPECT_EQ(StateOf(slots[0]), layout::RankState::kJoined);
  EXPECT_EQ(StateOf(slots[1]), layout::RankState::kVoted);
  ASSERT_TRUE(WriteFailure(one, Side::kTrainer, AFailure("no space"), /*raise=*/true));
  layout::BoardTop top;
  ASSERT_TRUE(ReadTop(zero, &top));
  EXPECT_EQ(top.alarm.failed, 2u);
  EXPECT_EQ(top.head.world_size, 2u);
  EXPECT_STREQ(ReadFailure(zero, 1).text, "no space");
  char buffer[256];
  EXPECT_FALSE(AllHaveFailed(zero, buffer, sizeof(buffer)));
  ASSERT_TRUE(WriteFailure(zero, Side::kWorker, AFailure("too"), /*raise=*/false));
  EXPECT_TRUE(AllHaveFailed(zero, buffer, sizeof(buffer)));
}

TEST_F(BoardTest, BoardOfAnotherSaveIsRefused) {
  OpenBoth();
  RankBoard other;
  EXPECT_EQ(OpenBoard(fd, kAttempt, 1, 3, &other), EPROTO);
  EXPECT_EQ(OpenBoard(fd, {.high = 1, .low = 3}, 1, 2, &other), EPROTO);
  layout::BoardHead newer;
  newer.version = layout::kBoardVersion + 1;
  newer.world_size = 2;
  newer.attempt = kAttempt;
  ASSERT_EQ(::pwrite(zero.fd, &newer, sizeof(newer), 0), static_cast<ssize_t>(sizeof(newer)));
  EXPECT_EQ(OpenBoard(fd, kAttempt, 1, 2, &other), EPROTO);
  EXPECT_FALSE(other.is_open());
}

TEST_F(BoardTest, TornRecordNamesTheRankAndNoReason) {
  OpenBoth();
  ASSERT_TRUE(WriteFailure(one, Side::kWorker, AFailure("whole"), true));
  const char byte = 'x';
  ASSERT_EQ(::pwrite(one.fd, &byte, 1, static_cast<off_t>(layout::RankFailureAt(1, 2) + 100)), 1);
  const layout::RankFailure read = ReadFailure(zero, 1);
  EXPECT_EQ(read.kind, static_cast<uint32_t>(layout::RankFailureKind::kUnknown));
  EXPECT_EQ(read.rank, 1u);
  // A record cannot name a rank that is not there.
  layout::RankFailure foreign = AFailure("");
  foreign.rank = 2;
  foreign.check = CheckOf(foreign);
  ASSERT_EQ(
      ::pwrite(one.fd, &foreign, sizeof(foreign), static_cast<off_t>(layout::RankFailureAt(1, 2))),
      static_cast<ssize_t>(sizeof(foreign)));
  EXPECT_EQ(ReadFailure(zero, 1).kind, static_cast<uint32_t>(layout::RankFailureKind::kUnknown));
}

TEST_F(BoardTest, TextIsCutAtACharactersBorder) {
  layout::RankFailure failure;
  std::string text = "x";
  while (text.size() < 2 * sizeof(failure.text)) text += "\xc3\xa4";
  SetText(&failure, text.c_str());
  EXPECT_EQ(std::strlen(failure.text) % 2, 1u);
  EXPECT_EQ(text.compare(0, std::strlen(failure.text), failure.text), 0);
}

TEST_F(BoardTest, RecordHasItsBlocksFromTheBeginning) {
  OpenBoth();
  struct stat found = {};
  ASSERT_EQ(::fstat(one.fd, &found), 0);
  // A full disk is what a rank may have to report.
  EXPECT_GE(found.st_size,
            static_cast<off_t>(layout::RankFailureAt(1, 2) + sizeof(layout::RankFailure)));
}

TEST_F(BoardTest, OpeningThatFailsLeavesNoFd) {
  const int before = OpenFds();
  for (const int error : {EIO, ENOSPC}) {
    static int g_error = 0;
    g_error = error;
    sys::g_system.pwrite = [](int, const void*, size_t, off_t) -> ssize_t {
      errno = g_error;
      return -1;
    };
    RankBoard board;
    EXPECT_EQ(OpenBoard(fd, kAttempt, 0, 2, &board), error);
    EXPECT_FALSE(board.is_open());
    sys::g_system = sys::kKernel;
  }
  EXPECT_EQ(OpenFds(), before);
}

// ---- What waiting costs.

std::atomic<int> g_metadata_calls{0};
std::atomic<int> g_data_calls{0};

void CountCalls() {
  g_metadata_calls = g_data_calls = 0;
  sys::g_system.openat = [](int a, const char* b, int c, mode_t d) {
    ++g_metadata_calls;
    return sys::kKernel.openat(a, b, c, d);
  };
  sys::g_system.close = [](int a) { return ++g_metadata_calls, sys::kKernel.close(a); };
  sys::g_system.fstat = [](int a, struct stat* b) {
    ++g_metadata_calls;
    return sys::kKernel.fstat(a, b);
  };
  sys::g_system.fstatat = [](int a, const char* b, struct stat* c, int d) {
    ++g_metadata_calls;
    return sys::kKernel.fstatat(a, b, c, d);
  };
  sys::g_system.unlinkat = [](int a, const char* b, int c) {
    ++g_metadata_calls;
    return sys::kKernel.unlinkat(a, b, c);
  };
  sys::g_system.getdents64 = [](int a, void* b, size_t c) {
    ++g_metadata_calls;
    return sys::kKernel.getdents64(a, b, c);
  };
  sys::g_system.fsync = [](int a) { return ++g_metadata_calls, sys::kKernel.fsync(a); };
  sys::g_system.pread = [](int a, void* b, size_t c, off_t d) {
    ++g_data_calls;
    return sys::kKernel.pread(a, b, c, d);
  };
}

constexpr int kSeconds = 3;
constexpr uint32_t kRanks = 1000;

struct Waiting {
  Waiting(const std::string& path, uint32_t rank) : trainer(kArena), save(&trainer, path) {
    save.parameters.rank = rank;
    save.parameters.world_size = kRanks;
    save.AddFile("model-" + std::to_string(rank), {1000});
    save.Build();
    save.SealAll();
  }
  void Start() {
    worker = std::make_unique<TestWorker>(Launcher::kThread, trainer);
    save.StartOn(worker.get());
    ASSERT_TRUE(save.AwaitPhase(layout::Phase::kWaitingForRanks));
  }
  Trainer trainer;
  TestSave save;
  std::unique_ptr<TestWorker> worker;
};

TEST_F(BoardTest, WaitingRankMakesNoMetadataCallsAndAboutOneReadASecond) {
  Waiting rank(directory.path(), 7);
  CountCalls();
  rank.Start();
  ::usleep(500'000);  // the naps grow with the wait
  g_metadata_calls = g_data_calls = 0;
  ::usleep(kSeconds * 1'000'000);
  const int metadata = g_metadata_calls;
  const int data = g_data_calls;
  RecordProperty("data_calls", data);
  EXPECT_EQ(metadata, 0) << "in " << kSeconds << " s";
  EXPECT_LE(data, 40) << "in " << kSeconds << " s";
  rank.save.job()->cancel.store(1);
  // Its vote is taken back; rank 0, which would answer, is played by the test.
  RankBoard board;
  OpenBoardOf(rank.save, rank.save.partial_path(), 0, &board);
  layout::RankFailure failure = AFailure("it is over");
  failure.is_final = 1;
  ASSERT_TRUE(WriteFailure(board, Side::kWorker, failure, true));
  CloseBoard(&board);
  ASSERT_TRUE(rank.save.AwaitDone());
  rank.worker.reset();
}

TEST_F(BoardTest, ThousandRanksCommitSoonAfterTheLastVoteForFewMetadataCalls) {
  Waiting deciding(directory.path(), 0);
  CountCalls();
  deciding.Start();
  for (uint32_t rank = 1; rank + 1 < kRanks; ++rank) VoteAs(deciding.save, rank);
  // Until rank 0 has looked at every vote.
  do {
    g_metadata_calls = 0;
    ::usleep(500'000);
  } while (g_metadata_calls > 10);
  g_metadata_calls = 0;
  ::usleep(kSeconds * 1'000'000);
  const int metadata = g_metadata_calls;
  EXPECT_LE(metadata, 20 * kSeconds) << "of the whole job";
  EXPECT_FALSE(deciding.save.AwaitDone(0));
  VoteAs(deciding.save, kRanks - 1);
  const uint64_t last_vote_ns = sys::NowNs();
  ASSERT_TRUE(deciding.save.AwaitDone());
  const uint64_t after = sys::NowNs() - last_vote_ns;
  deciding.worker.reset();
  EXPECT_TRUE(deciding.save.failure().ok());
  // The promise is two seconds. A vote that is looked for at the liveness deadline alone takes 30.
  EXPECT_LT(after, 20'000'000'000u);
  std::printf("%d metadata calls in %d s; committed %.0f ms after the last vote\n", metadata,
              kSeconds, static_cast<double>(after) / 1e6);
}

TEST_F(BoardTest, LookOfRankZeroAtAThousandRanksIsTwoReads) {
  Waiting deciding(directory.path(), 0);
  CountCalls();
  deciding.Start();
  ::usleep(2'500'000);  // naps of 200 ms by then
  const uint64_t begin_ns = sys::NowNs();
  g_data_calls = 0;
  ::usleep(2'000'000);
  const int data = g_data_calls;
  const uint64_t looks = (sys::NowNs() - begin_ns) / 200'000'000 + 2;
  EXPECT_LE(data, static_cast<int>(3 * looks)) << "two reads a look, and now and then a beat";
  deciding.save.job()->cancel.store(1);
  deciding.save.Ring();
  ASSERT_TRUE(deciding.save.AwaitDone());
  deciding.worker.reset();
}

}  // namespace
}  // namespace holdfast::worker
