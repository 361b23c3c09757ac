// Workers that are missing, of another version, killed at any point, or stopped.
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "holdfast/recovery.h"
#include "runtime/layout/job.h"
#include "runtime/layout/wire.h"
#include "runtime/sys/system.h"
#include "tests/testing/child_process.h"
#include "tests/testing/save_test.h"
#include "tests/testing/slow_device.h"

namespace holdfast::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class WorkerProgram : public LauncherTest {
 protected:
  void ExpectRefusedAtCreate(const std::string& program, const std::string& reason) {
    CheckpointerOptions options = Options();
    options.worker_program = program;
    const auto made = Checkpointer::Create(options);
    EXPECT_FALSE(made.ok());
    EXPECT_THAT(Text(made.status()),
                AllOf(HasSubstr("worker program"), HasSubstr(program), HasSubstr(reason)));
  }
  /// Saves with a program that ends at once instead of serving; expects `reason`, not a broken
  /// pipe.
  void ExpectError(const std::string& program, const std::string& reason) {
    SavePrevious(directory());
    CheckpointerOptions options = Options();
    options.worker_program = program;
    auto made = Checkpointer::Create(options);
    absl::Status status = made.status();
    if (made.ok()) {
      const absl::Time begin = absl::Now();
      status = Save(made->get(), "step-1", TrainingState::Uniform(2, 100'000, 1)).status();
      EXPECT_LT(absl::Now() - begin, kLong);  // not after a deadline
      EXPECT_THAT(Text(status), HasSubstr("step-1"));
      ExpectMemoryBack(made->get());
      made->reset();
    }
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(Text(status), HasSubstr(reason));
    const auto sound = Make(Options());
    ASSERT_NE(sound, nullptr);
    ExpectRecovered(sound.get());
  }
};
INSTANTIATE_TEST_SUITE_P(All, WorkerProgram,
                         ::testing::Values(Launcher::kSpawn, Launcher::kPersistent), LauncherName);

TEST_P(WorkerProgram, MissingIsAnErrorOfCreate) {
  ExpectRefusedAtCreate("/nowhere/holdfast-worker", "No such file or directory");
}

TEST_P(WorkerProgram, ADirectoryIsAnErrorOfCreate) {
  ExpectRefusedAtCreate(directory(), "not a file");
}

TEST_P(WorkerProgram, NotExecutableIsAnErrorOfCreate) {
  const std::string file = absl::StrCat(directory(), "/worker");
  std::ofstream(file) << "#!/bin/sh\n";
  ExpectRefusedAtCreate(file, "not executable");
}

TEST_P(WorkerProgram, NotAProgramIsAnError) {
  const ScratchDirectory elsewhere;
  const std::string file = absl::StrCat(elsewhere.path(), "/worker");
  std::ofstream(file) << std::string(100, '\1');
  ASSERT_EQ(chmod(file.c_str(), 0755), 0);
  ExpectError(file, "Exec format error");
}

TEST_P(WorkerProgram, OfAnotherVersionIsAnError) {
  ExpectError(HOLDFAST_MISMATCHED_WORKER, "another version");
}

TEST_P(WorkerProgram, OfAnotherVersionThatDoesNotReadIsAnError) {
  const ScratchDirectory elsewhere;
  const std::string script = absl::StrCat(elsewhere.path(), "/worker");
  std::ofstream(script) << "#!/bin/sh\nexit " << layout::kExitMismatch << "\n";
  ASSERT_EQ(chmod(script.c_str(), 0755), 0);
  ExpectError(script, "another version");
}

TEST_P(WorkerProgram, EndingAtOnceIsAnError) { ExpectError("/bin/false", "exited with status 1"); }

TEST_P(WorkerProgram, RemovedBetweenSavesIsAnErrorUntilRestored) {
  SavePrevious(directory());
  const ScratchDirectory elsewhere;
  const std::string program = absl::StrCat(elsewhere.path(), "/worker");
  std::filesystem::copy_file(std::getenv("HOLDFAST_WORKER"), program);
  CheckpointerOptions options = Options();
  options.worker_program = program;
  const auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  const std::string away = program + ".away";
  std::filesystem::rename(program, away);
  const auto report = Save(checkpointer.get(), "step-1", TrainingState::Uniform(2, 100'000, 1));
  if (GetParam() == Launcher::kPersistent) {
    EXPECT_TRUE(report.ok()) << report.status();  // the worker was started before
    std::filesystem::remove_all(absl::StrCat(directory(), "/step-1"));
  } else {
    EXPECT_TRUE(absl::IsNotFound(report.status())) << report.status();
    EXPECT_THAT(Text(report.status()), HasSubstr(program));
  }
  std::filesystem::rename(away, program);
  ExpectRecovered(checkpointer.get());
}

/// Saves whose workers are killed, stopped or damaged.
class WorkerTest : public LauncherTest {
 protected:
  struct StoppedSave {
    std::unique_ptr<Checkpointer> checkpointer;
    absl::StatusOr<SaveHandle> handle;
  };
  /// Begins a slow save behind a durable one, and stops its worker after the first write.
  StoppedSave SaveWithStoppedWorker() {
    SavePrevious(directory());
    CheckpointerOptions options = Options();
    options.time_stalled_max = absl::Seconds(1);
    options.qos.bytes_per_second_max = 16u << 20;
    StoppedSave save{.checkpointer = Make(options), .handle = absl::UnknownError("not begun")};
    if (save.checkpointer == nullptr) return save;
    save.handle = Begin(save.checkpointer.get(), "stopped", TrainingState::Uniform(4, 4u << 20, 1));
    if (!save.handle.ok()) return save;
    EXPECT_TRUE(WaitFor([&] { return save.handle->progress().bytes_written > 0; }));
    EXPECT_TRUE(SendSignal(save.handle->worker_pid(), SIGSTOP));
    return save;
  }
};

class KilledWorker : public WorkerTest {
 protected:
  struct Counts {
    int failed = 0;
    int saved = 0;
  };
  /// Runs one save and kills the worker once `now` returns true, or lets the worker end by itself.
  void KillOnce(Checkpointer* checkpointer, const TrainingState& state,
                const std::function<bool(const SaveHandle&)>& now, Counts* counts) {
    const auto handle = Begin(checkpointer, "victim", state);
    ASSERT_TRUE(handle.ok()) << handle.status();
    pid_t worker = 0;
    WaitFor([&] {
      const pid_t pid = handle->worker_pid();
      if (pid != 0) worker = pid;
      return handle->IsDone() || (worker != 0 && now(*handle));
    });
    // Still this process's child or zombie: no other process can have the pid during the save.
    if (!handle->IsDone() && worker != 0) SendSignal(worker, SIGKILL);
    const auto report = handle->WaitDurable(kLong);
    if (report.ok()) {
      ++counts->saved;
    } else {
      ++counts->failed;
      EXPECT_TRUE(absl::IsAborted(report.status())) << report.status();
      EXPECT_THAT(Text(report.status()), AllOf(HasSubstr("victim"), HasSubstr("signal 9")));
    }
    ExpectMemoryBack(checkpointer);
    // A worker killed right after its rename cannot report: the trainer finds the save committed.
    const std::string path = absl::StrCat(directory(), "/victim");
    if (std::filesystem::exists(path)) {
      EXPECT_TRUE(report.ok()) << report.status();
      ExpectSound(path);
      EXPECT_TRUE(state.CompareWith(path).ok());
      std::filesystem::remove_all(path);
    } else {
      EXPECT_FALSE(report.ok());
    }
    ExpectPreviousAnd(directory(), {});
  }
};
INSTANTIATE_TEST_SUITE_P(All, KilledWorker, kProcessLaunchers, LauncherName);

TEST_P(KilledWorker, InEachPhase) {
  SavePrevious(directory());
  CheckpointerOptions options = Options();
  options.read_back = true;
  const auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  const TrainingState state = TrainingState::Uniform(3, 3u << 20, 1);
  Counts counts;
  for (const char* phase :
       {"queued", "staging", "writing", "syncing", "reading back", "manifest", "committing"}) {
    SCOPED_TRACE(phase);
    KillOnce(
        checkpointer.get(), state,
        [phase](const SaveHandle& handle) { return handle.progress().phase == phase; }, &counts);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(counts.failed, 0) << "short phases are missed here; AtEveryCall misses none";
  ExpectRecovered(checkpointer.get());
}

TEST_P(KilledWorker, AtRandomMoments) {
  SavePrevious(directory());
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  const TrainingState state = TrainingState::Uniform(2, 2u << 20, 1);
  const char* const given = std::getenv("HOLDFAST_SEED");
  const unsigned seed = given != nullptr ? static_cast<unsigned>(std::atoi(given)) : 20240607u;
  RecordProperty("seed", static_cast<int>(seed));
  std::mt19937 random(seed);
  Counts counts;
  const int rounds = std::getenv("HOLDFAST_LONG") != nullptr ? 300 : 12;
  constexpr int kFailedMin = 4;  // on a machine so fast that most saves end before the kill
  for (int i = 0; i < rounds || (counts.failed < kFailedMin && i < 20 * rounds); ++i) {
    SCOPED_TRACE(absl::StrCat("seed ", seed, ", round ", i));
    // From the worker's first step: most saves of this size take 10 to 40 ms.
    const absl::Time at =
        absl::Now() + absl::Microseconds(std::uniform_int_distribution<int>(0, 40'000)(random));
    KillOnce(
        checkpointer.get(), state, [at](const SaveHandle&) { return absl::Now() >= at; }, &counts);
    if (HasFatalFailure()) return;
  }
  EXPECT_GE(counts.failed, kFailedMin);
  ExpectRecovered(checkpointer.get());
}

TEST_P(KilledWorker, BeforeItReadsItsJob) {
  SavePrevious(directory());
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  if (GetParam() == Launcher::kPersistent) {
    // Between two saves: the next save starts another worker.
    const std::vector<pid_t> children = Holdings::OfSelf().children;
    ASSERT_EQ(children.size(), 1u);
    SendSignal(children[0], SIGKILL);
    ASSERT_TRUE(WaitFor([&] { return !IsAlive(children[0]); }));
    ExpectRecovered(checkpointer.get());
    return;
  }
  const TrainingState state = TrainingState::Uniform(2, 2u << 20, 1);
  int failed = 0;
  for (int i = 0; i < 3 || (failed == 0 && i < 50); ++i) {
    const auto handle = Begin(checkpointer.get(), "victim", state);
    ASSERT_TRUE(handle.ok()) << handle.status();
    for (const pid_t child : Holdings::OfSelf().children) SendSignal(child, SIGKILL);
    const auto report = handle->WaitDurable(kLong);
    if (!report.ok()) {
      ++failed;
      EXPECT_TRUE(absl::IsAborted(report.status())) << report.status();
    }
    ExpectMemoryBack(checkpointer.get());
    std::filesystem::remove_all(absl::StrCat(directory(), "/victim"));
    ExpectPreviousAnd(directory(), {});
  }
  EXPECT_GT(failed, 0);
  ExpectRecovered(checkpointer.get());
}

TEST_P(KilledWorker, StreamingSaveEndsInTheCallWithTheWorkersDeath) {
  SavePrevious(directory());
  CheckpointerOptions options = Options();
  options.staging.arena_bytes = 16u << 20;
  options.qos.bytes_per_second_max = 32u << 20;
  const auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  // The call itself waits for the worker, so another thread must kill the worker.
  ASSERT_TRUE(GetParam() != Launcher::kPersistent || !Holdings::OfSelf().children.empty());
  std::thread killer([&] {
    WaitFor([&] { return checkpointer->staging().waits > 0; });
    for (const pid_t child : Holdings::OfSelf().children) SendSignal(child, SIGKILL);
  });
  const auto report = Save(checkpointer.get(), "victim", TrainingState::Uniform(8, 4u << 20, 1));
  killer.join();
  EXPECT_TRUE(absl::IsAborted(report.status())) << report.status();
  EXPECT_THAT(Text(report.status()), AllOf(HasSubstr("victim"), HasSubstr("signal 9")));
  ExpectRecovered(checkpointer.get());
}

// ---- At every system call that makes or names an entry: a forked worker inherits the table.

pid_t g_trainer = 0;
long g_calls = 0;
long g_kill_at = 0;
// Shared with the children: only the save's worker dies, not the worker that cleans up afterwards.
std::atomic<bool>* g_killed = nullptr;

void CountCall() {
  if (getpid() == g_trainer || ++g_calls != g_kill_at || g_killed->exchange(true)) return;
  SendSignal(getpid(), SIGKILL);
}
#define KILLING(type, name, parameters, arguments) \
  type Killing_##name parameters {                 \
    CountCall();                                   \
    return sys::kKernel.name arguments;            \
  }
KILLING(int, openat, (int d, const char* p, int f, mode_t m), (d, p, f, m))
KILLING(ssize_t, write, (int f, const void* b, size_t n), (f, b, n))
KILLING(ssize_t, pwrite, (int f, const void* b, size_t n, off_t o), (f, b, n, o))
KILLING(int, fsync, (int f), (f))
KILLING(int, fallocate, (int f, int m, off_t o, off_t n), (f, m, o, n))
KILLING(int, ftruncate, (int f, off_t n), (f, n))
KILLING(int, mkdirat, (int d, const char* p, mode_t m), (d, p, m))
KILLING(int, unlinkat, (int d, const char* p, int f), (d, p, f))
KILLING(int, renameat2, (int a, const char* p, int b, const char* q, unsigned f), (a, p, b, q, f))
KILLING(int, close, (int f), (f))
#undef KILLING

class KilledForkedWorker : public SaveTest {
 protected:
  /// Saves "victim" with a worker that dies at its call number 1, 2, ... until a save succeeds.
  void KillAtEveryCall(bool replace) {
    SavePrevious(directory());
    CheckpointerOptions options = SmallOptions(directory());
    options.launcher = Launcher::kFork;
    options.engine = EngineRung::kPwrite;
    options.read_back = true;
    const auto checkpointer = Make(options);
    ASSERT_NE(checkpointer, nullptr);
    const TrainingState older = TrainingState::Uniform(2, 100'000, 1);
    const TrainingState newer = TrainingState::Uniform(2, 100'000, 2);
    const std::string path = absl::StrCat(directory(), "/victim");
    const std::vector<TensorSource> sources = newer.Sources();
    int failed = 0;
    bool saved = false;
    g_trainer = getpid();
    void* const shared =
        mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(shared, MAP_FAILED);
    g_killed = new (shared) std::atomic<bool>(false);
    for (g_kill_at = 1; !saved && g_kill_at < 1000; ++g_kill_at) {
      SCOPED_TRACE(g_kill_at);
      if (replace) {
        ASSERT_TRUE(Save(checkpointer.get(), "victim", older).ok());
      }
      g_calls = 0;
      *g_killed = false;
      Install();
      const auto handle = checkpointer->SaveAsync(
          {.name = "victim", .step = 2, .tensors = sources, .replace = replace});
      // A worker that dies before the last copy fails the call itself.
      const absl::Status ended =
          handle.ok() ? handle->WaitDurable(kLong).status() : handle.status();
      sys::g_system = sys::kKernel;
      saved = ended.ok();
      EXPECT_TRUE(saved || absl::IsAborted(ended)) << ended;
      if (!saved) ++failed;
      const absl::Status cleared = checkpointer->Flush(kLong);
      ASSERT_TRUE(cleared.ok()) << cleared;
      ExpectMemoryBack(checkpointer.get());
      // At every moment the old or the new checkpoint has the name, whole.
      const bool exists = std::filesystem::exists(path);
      EXPECT_TRUE(exists || (!replace && !saved));
      if (exists) {
        ExpectSound(path);
        EXPECT_TRUE(newer.CompareWith(path).ok() || (replace && older.CompareWith(path).ok()));
        // A worker killed behind its rename cannot report: the trainer finds the save committed.
        EXPECT_EQ(newer.CompareWith(path).ok(), saved);
        std::filesystem::remove_all(path);
      }
      ExpectPreviousAnd(directory(), {});
      if (HasFailure()) return;
    }
    munmap(shared, 4096);
    EXPECT_TRUE(saved);
    EXPECT_GT(failed, 20) << "files, names, manifest, directory";
  }

 private:
  static void Install() {
    sys::g_system.openat = Killing_openat;
    sys::g_system.write = Killing_write;
    sys::g_system.pwrite = Killing_pwrite;
    sys::g_system.fsync = Killing_fsync;
    sys::g_system.fallocate = Killing_fallocate;
    sys::g_system.ftruncate = Killing_ftruncate;
    sys::g_system.mkdirat = Killing_mkdirat;
    sys::g_system.unlinkat = Killing_unlinkat;
    sys::g_system.renameat2 = Killing_renameat2;
    sys::g_system.close = Killing_close;
  }
};

TEST_F(KilledForkedWorker, AtEveryCallOfASave) { KillAtEveryCall(false); }
TEST_F(KilledForkedWorker, AtEveryCallOfAReplacement) { KillAtEveryCall(true); }

// The report of a recovery that runs right before the removal of a dead worker's files.
std::atomic<bool> g_save_has_ended{false};
absl::StatusOr<RecoveryReport> g_recovered = absl::UnknownError("no recovery ran");
std::string* g_directory = nullptr;

int DieInCommit(int a, const char* from, int b, const char* to, unsigned flags) {
  if (getpid() != g_trainer && strcmp(to, "victim") == 0) SendSignal(getpid(), SIGKILL);
  return sys::kKernel.renameat2(a, from, b, to, flags);
}
int RecoverBeforeRemoval(int fd) {
  thread_local bool recovering = false;
  if (getpid() == g_trainer && !recovering && absl::IsUnknown(g_recovered.status())) {
    recovering = true;
    WaitFor([] { return g_save_has_ended.load(); });
    g_recovered = Recover(*g_directory, {.wait_for_orphans = absl::ZeroDuration()});
    recovering = false;
  }
  return sys::kKernel.fsync(fd);
}

TEST_F(KilledForkedWorker, LeavesFilesThatNoRecoveryPromotesWhileTheyAreRemoved) {
  SavePrevious(directory());
  CheckpointerOptions options = SmallOptions(directory());
  options.launcher = Launcher::kFork;
  const auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  std::string path = directory();
  g_directory = &path;
  g_trainer = getpid();
  sys::g_system.renameat2 = DieInCommit;
  sys::g_system.fsync = RecoverBeforeRemoval;
  const auto report = Save(checkpointer.get(), "victim", TrainingState::Uniform(2, 100'000, 1));
  g_save_has_ended = true;
  EXPECT_TRUE(absl::IsAborted(report.status())) << report.status();
  const absl::Status cleared = checkpointer->Flush(kLong);
  sys::g_system = sys::kKernel;
  EXPECT_TRUE(cleared.ok()) << cleared;
  // The directory is complete, and the trainer has reported the save as failed and removes it.
  ASSERT_TRUE(g_recovered.ok()) << g_recovered.status();
  EXPECT_THAT(g_recovered->promoted, ::testing::IsEmpty());
  EXPECT_THAT(g_recovered->kept_incomplete, ::testing::ElementsAre(HasSubstr("a save is running")));
  ExpectPreviousAnd(directory(), {});
  ExpectRecovered(checkpointer.get());
}

TEST_P(KilledWorker, StoppedOneIsKilledAtTheStallDeadline) {
  const auto [checkpointer, handle] = SaveWithStoppedWorker();
  ASSERT_TRUE(handle.ok()) << handle.status();
  const auto report = handle->WaitDurable(absl::Seconds(30));
  EXPECT_TRUE(absl::IsDeadlineExceeded(report.status())) << report.status();
  EXPECT_THAT(Text(report.status()), AllOf(HasSubstr("stopped"), HasSubstr("killed")));
  ExpectRecovered(checkpointer.get());
}

/// The job table of the last save, by its memfd, for writes of a damaged worker.
std::atomic<int> g_job_fd{-1};
int NoteJobFd(const char* name, unsigned flags) {
  const int fd = sys::kKernel.memfd_create(name, flags);
  if (absl::StrContains(name, "job")) g_job_fd = fd;
  return fd;
}

class DamagedWorker : public WorkerTest {
 protected:
  void SetUp() override {
    WorkerTest::SetUp();
    sys::g_system.memfd_create = NoteJobFd;
  }
  void TearDown() override {
    sys::g_system = sys::kKernel;
    WorkerTest::TearDown();
  }

  /// Starts a streaming save of device tensors with one acknowledged extent; `damage` then writes
  /// to its table. Expects one failed save, with `reason` unless it is empty.
  void ExpectOneFailedSave(const std::function<void(layout::Job*)>& damage,
                           const std::string& reason) {
    SlowDevice device;
    CheckpointerOptions options = Options();
    options.staging.arena_bytes = 4 * kChunkBytes;
    options.time_stalled_max = absl::Seconds(20);
    const auto checkpointer = Make(options);
    ASSERT_NE(checkpointer, nullptr);
    constexpr uint64_t kBytes = 12 * uint64_t{kChunkBytes};
    const std::vector<TensorSource> sources = {{.name = "device",
                                                .dtype = "U8",
                                                .shape = {int64_t{kBytes}},
                                                .data = device.Allocate(kBytes),
                                                .bytes = kBytes,
                                                .device = &device}};
    const auto begun = checkpointer->SaveAsync({.name = "damaged", .step = 1, .tensors = sources});
    ASSERT_TRUE(begun.ok()) << begun.status();
    struct stat size = {};
    ASSERT_EQ(fstat(g_job_fd, &size), 0);
    const auto bytes = static_cast<size_t>(size.st_size);
    void* const table = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, g_job_fd, 0);
    ASSERT_NE(table, MAP_FAILED);
    auto* const job = static_cast<layout::Job*>(table);
    ASSERT_TRUE(device.WaitForPending(1, kLong));
    device.CompleteOldest();
    ASSERT_TRUE(WaitFor([&] { return Log(job)[0].load() != layout::kEmptyEntry; }));
    damage(job);
    // The copies hold the save; further copies are refused.
    ASSERT_TRUE(WaitFor([&] { return job->trainer_failed.load() != 0; }));
    munmap(table, bytes);
    device.CompleteAtOnce(true);
    device.CompleteAll();
    const auto report = begun->WaitDurable(kLong);
    EXPECT_FALSE(report.ok());
    if (!reason.empty()) {
      EXPECT_TRUE(absl::IsInternal(report.status())) << report.status();
      EXPECT_THAT(Text(report.status()),
                  AllOf(HasSubstr("damaged"), HasSubstr("worker"), HasSubstr(reason)));
    }
    ExpectRecovered(checkpointer.get());
    std::filesystem::remove_all(absl::StrCat(directory(), "/next"));
  }
  static layout::SharedU32* Log(layout::Job* job) {
    return layout::At<layout::SharedU32>(job, job->acknowledged);
  }
};
INSTANTIATE_TEST_SUITE_P(All, DamagedWorker, kEveryLauncher, LauncherName);

TEST_P(DamagedWorker, AcknowledgesWhatItMayNot) {
  SavePrevious(directory());
  const std::string reason = "acknowledged extent";
  ExpectOneFailedSave([](layout::Job* job) { Log(job)[1] = Log(job)[0].load(); }, reason);
  ExpectOneFailedSave([](layout::Job* job) { Log(job)[1] = job->extent_count; }, reason);
  ExpectOneFailedSave([](layout::Job* job) { Log(job)[1] = job->extent_count - 1; }, reason);
}

/// A worker process; a thread shares the trainer's memory.
class DamagedProcess : public DamagedWorker {};
INSTANTIATE_TEST_SUITE_P(All, DamagedProcess, kProcessLaunchers, LauncherName);

TEST_P(DamagedProcess, ReportsWhatCannotBe) {
  SavePrevious(directory());
  const auto reports = [](const std::function<void(layout::CompletionSlot*)>& fill) {
    return [fill](layout::Job* job) {
      fill(&job->completion);
      job->completion.state = static_cast<uint32_t>(layout::CompletionState::kDone);
    };
  };
  ExpectOneFailedSave(reports([](layout::CompletionSlot*) {}), "before it had every byte");
  ExpectOneFailedSave(reports([](layout::CompletionSlot* slot) {
                        slot->failure.code = static_cast<FailureCode>(77);
                      }),
                      "a code that there is not");
  ExpectOneFailedSave(reports([](layout::CompletionSlot* slot) {
                        memset(slot->left_behind, 'n', sizeof(slot->left_behind));
                      }),
                      "no name of an entry");
  ExpectOneFailedSave([](layout::Job* job) { job->completion.state = 2; }, "a result that is none");
  ExpectOneFailedSave([](layout::Job* job) { job->staging_released = 7; }, "a flag");
  ExpectOneFailedSave([](layout::Job* job) { job->engine_used = 9; }, "an engine");
}

TEST_P(DamagedProcess, LosesItsWholeTable) {
  SavePrevious(directory());
  std::mt19937_64 random(20261122);
  for (const int fill : {0x100, 0x00, 0xff, 0x100, 0x100}) {
    SCOPED_TRACE(fill);
    // Every offset, index, count and limit, while the trainer goes on with the save.
    ExpectOneFailedSave(
        [fill, &random](layout::Job* job) {
          const uint64_t bytes = job->table_bytes;
          for (uint64_t i = 0; i < bytes; ++i)
            reinterpret_cast<char*>(job)[i] = static_cast<char>(fill > 0xff ? random() : fill);
        },
        "");
  }
}

TEST_P(DamagedProcess, CannotRaiseItsOwnDeadline) {
  const auto [checkpointer, handle] = SaveWithStoppedWorker();
  ASSERT_TRUE(handle.ok()) << handle.status();
  layout::Job head;
  const uint64_t forever = UINT64_MAX;
  const auto at =
      reinterpret_cast<char*>(&head.time_stalled_max_ns) - reinterpret_cast<char*>(&head);
  ASSERT_EQ(pwrite(g_job_fd, &forever, sizeof(forever), at), ssize_t{sizeof(forever)});
  const auto report = handle->WaitDurable(absl::Seconds(30));
  EXPECT_THAT(Text(report.status()), AllOf(HasSubstr("no progress"), HasSubstr("killed")));
  ExpectRecovered(checkpointer.get());
}

}  // namespace
}  // namespace holdfast::testing
