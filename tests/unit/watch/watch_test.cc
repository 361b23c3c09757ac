// A watched save shows its job table's content; no other file and no damaged table does harm.
#include "holdfast/watch.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "runtime/layout/job.h"
#include "runtime/worker/rank_board.h"
#include "runtime/writer/job_table.h"
#include "tests/testing/child_process.h"
#include "tests/testing/random_bytes.h"
#include "tests/testing/save_test.h"

namespace holdfast::testing {
namespace {

constexpr uint64_t kSlow = 4u << 20;

/// Bytes of the job tables that a process holds open.
std::vector<std::string> TablesOf(pid_t pid) {
  std::vector<std::string> tables;
  for (const auto& [fd, target] : Holdings::Of(pid).fds) {
    if (!absl::StartsWith(target, absl::StrCat("/memfd:", kJobTableName))) continue;
    const int opened = open(absl::StrCat("/proc/", pid, "/fd/", fd).c_str(), O_RDONLY | O_CLOEXEC);
    if (opened < 0) continue;  // closed meanwhile
    std::string bytes(static_cast<size_t>(lseek(opened, 0, SEEK_END)), '\0');
    EXPECT_EQ(pread(opened, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    close(opened);
    tables.push_back(std::move(bytes));
  }
  return tables;
}

/// Reads a file with these bytes.
absl::StatusOr<SaveInFlight> Read(const std::string& bytes) {
  const int fd = memfd_create("copy", MFD_CLOEXEC);
  EXPECT_EQ(pwrite(fd, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  auto save = ReadSaveInFlight(fd);
  close(fd);
  return save;
}

class Watch : public LauncherTest {
 protected:
  /// Begins a save that takes seconds.
  absl::StatusOr<SaveHandle> BeginSlow(Checkpointer* checkpointer, uint32_t tensors = 4) {
    auto handle = Begin(checkpointer, "slow", TrainingState::Uniform(tensors, 4u << 20, 1), 7);
    EXPECT_TRUE(handle.ok()) << handle.status();
    EXPECT_TRUE(WaitFor([&] {
      const SaveProgress now = handle->progress();
      return now.bytes_written > 0 && now.bytes_sealed == now.bytes_total;
    }));
    return handle;
  }
  CheckpointerOptions SlowOptions() const {
    CheckpointerOptions options = Options();
    options.qos.bytes_per_second_max = kSlow;
    return options;
  }
};
INSTANTIATE_TEST_SUITE_P(All, Watch, kEveryLauncher, LauncherName);

TEST_P(Watch, ShowsTheSameOfTrainerAndWorker) {
  const auto checkpointer = Make(SlowOptions());
  ASSERT_NE(checkpointer, nullptr);
  const auto handle = BeginSlow(checkpointer.get());
  ASSERT_TRUE(handle.ok());
  for (const pid_t holder : {getpid(), static_cast<pid_t>(handle->worker_pid())}) {
    const std::vector<std::string> tables = TablesOf(holder);
    // The thread's worker holds a descriptor of its own.
    ASSERT_EQ(tables.size(), IsThread() ? 2u : 1u);
    const auto save = Read(tables[0]);
    ASSERT_TRUE(save.ok()) << save.status();
    const SaveProgress now = handle->progress();
    EXPECT_EQ(save->name, "slow");
    EXPECT_TRUE(absl::StartsWith(save->partial, "slow.partial-")) << save->partial;
    EXPECT_NE(save->attempt, AttemptId());
    EXPECT_EQ(save->step, 7u);
    EXPECT_EQ(save->rank, 0u);
    EXPECT_EQ(save->world_size, 1u);
    EXPECT_EQ(save->launcher, GetParam());
    EXPECT_NE(save->engine, EngineRung::kAuto);
    EXPECT_EQ(save->worker_pid, handle->worker_pid());
    EXPECT_EQ(save->progress.phase, "writing");
    EXPECT_EQ(save->progress.bytes_total, now.bytes_total);
    EXPECT_EQ(save->progress.bytes_sealed, now.bytes_total);
    EXPECT_GT(save->progress.bytes_written, 0u);
    EXPECT_LE(save->progress.bytes_written, now.bytes_written);
    EXPECT_EQ(save->bytes_held, now.bytes_total);
    EXPECT_FALSE(save->streams);
  }
  ASSERT_TRUE(handle->Cancel().ok());
  EXPECT_TRUE(absl::IsCancelled(handle->WaitDurable(kLong).status()));
  EXPECT_TRUE(WaitFor([] { return TablesOf(getpid()).empty(); }));
}

class WatchedTable : public Watch {};
INSTANTIATE_TEST_SUITE_P(All, WatchedTable, ::testing::Values(Launcher::kSpawn), LauncherName);

TEST_P(WatchedTable, ShowsTheMemoryThatAStreamReleases) {
  CheckpointerOptions options = SlowOptions();
  options.staging.arena_bytes = 16u << 20;
  const auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  // The call waits for the writes of what exceeds the memory.
  const auto handle = BeginSlow(checkpointer.get(), 6);
  ASSERT_TRUE(handle.ok());
  const std::vector<std::string> tables = TablesOf(getpid());
  ASSERT_FALSE(tables.empty());
  const auto save = Read(tables[0]);
  ASSERT_TRUE(save.ok()) << save.status();
  EXPECT_TRUE(save->streams);
  EXPECT_GT(save->bytes_held, 0u);
  EXPECT_LE(save->bytes_held, uint64_t{16} << 20);
  ASSERT_TRUE(handle->Cancel().ok());
  EXPECT_TRUE(absl::IsCancelled(handle->WaitDurable(kLong).status()));
}

TEST_P(WatchedTable, DamagedDoesNoHarm) {
  std::string table;
  {
    const auto checkpointer = Make(SlowOptions());
    ASSERT_NE(checkpointer, nullptr);
    const auto handle = BeginSlow(checkpointer.get());
    ASSERT_TRUE(handle.ok());
    const std::vector<std::string> tables = TablesOf(getpid());
    ASSERT_EQ(tables.size(), 1u);
    table = tables[0];
    ASSERT_TRUE(handle->Cancel().ok());
    EXPECT_TRUE(absl::IsCancelled(handle->WaitDurable(kLong).status()));
  }
  ASSERT_TRUE(Read(table).ok());
  EXPECT_TRUE(absl::IsUnavailable(Read("").status()));
  EXPECT_TRUE(absl::IsUnavailable(Read(table.substr(0, sizeof(layout::Job) - 1)).status()));
  EXPECT_TRUE(absl::IsUnavailable(Read(table.substr(0, table.size() / 2)).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(Read(RandomBytes(table.size(), 1)).status()));

  std::string other = table;
  other[offsetof(layout::Job, layout_version)] ^= 1;
  const absl::Status version = Read(other).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(version));
  EXPECT_TRUE(absl::StrContains(version.message(), "another version")) << version;

  // A sanitizer finds each access outside of the copy.
  size_t read = 0;
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    std::string damaged = table;
    const uint64_t where = Mix(seed) % sizeof(layout::Job);
    damaged[where] = static_cast<char>(Mix(seed + 1'000'000));
    const auto save = Read(damaged);
    if (!save.ok()) continue;
    ++read;
    EXPECT_LE(save->progress.bytes_written, save->progress.bytes_total) << seed;
    EXPECT_LE(save->bytes_held, save->progress.bytes_sealed) << seed;
    EXPECT_LE(save->progress.bytes_sealed, save->progress.bytes_total) << seed;
  }
  EXPECT_GT(read, 100u);
}

class WatchedBoard : public SaveTest {};

TEST_F(WatchedBoard, NamesTheRanksThatHaveNotVoted) {
  const int place = open(directory().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  constexpr AttemptId kAttempt = {.high = 1, .low = 2};
  constexpr uint32_t kRanks = 1500;  // more slots than one read returns
  worker::RankBoard board;
  ASSERT_EQ(worker::OpenBoard(place, kAttempt, 0, kRanks, &board), 0);
  const auto waited_for = [&](uint32_t world_size) {
    return ReadRanksWaitedFor(board.fd, kAttempt, world_size);
  };
  const auto vote = [&](uint32_t rank) {
    worker::RankBoard other = board;
    other.rank = rank;
    ASSERT_TRUE(worker::WritePulse(other, worker::Side::kWorker, layout::RankState::kVoted));
  };
  for (uint32_t rank = 1; rank < kRanks; ++rank) {
    if (rank != 3 && rank != kRanks - 1) vote(rank);
  }
  EXPECT_EQ(waited_for(kRanks).value(), (std::vector<uint32_t>{3, kRanks - 1}));
  vote(3);
  vote(kRanks - 1);
  EXPECT_EQ(waited_for(kRanks).value(), std::vector<uint32_t>{0});
  EXPECT_TRUE(absl::IsFailedPrecondition(waited_for(1u << 31).status()));
  EXPECT_TRUE(
      absl::IsFailedPrecondition(ReadRanksWaitedFor(board.fd, AttemptId(), kRanks).status()));
  EXPECT_FALSE(ReadRanksWaitedFor(place, kAttempt, kRanks).ok());
  worker::CloseBoard(&board);
  close(place);
}

TEST(WatchedJob, OfRemovalIsNoSave) {
  writer::JobParameters parameters;
  parameters.kind = layout::JobKind::kDelete;
  const auto table = writer::JobTable::ForDelete(parameters, {"old"});
  ASSERT_TRUE(table.ok()) << table.status();
  EXPECT_TRUE(absl::IsNotFound(ReadSaveInFlight((*table)->fd()).status()));
  EXPECT_FALSE(ReadSaveInFlight(-1).ok());
}

}  // namespace
}  // namespace holdfast::testing
