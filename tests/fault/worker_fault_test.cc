// Workers that are not there, are of another version, are killed at any point, or stop.
#include <signal.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
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
#include "runtime/layout/wire.h"
#include "tests/testing/child_process.h"
#include "tests/testing/save_test.h"

namespace holdfast::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string Text(const absl::Status& status) { return std::string(status.message()); }

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
  /// Whatever ends at once instead of serving: told within a second, and not as a broken pipe.
  void ExpectTold(const std::string& program, const std::string& reason) {
    SavePrevious(directory());
    CheckpointerOptions options = Options();
    options.worker_program = program;
    auto made = Checkpointer::Create(options);
    absl::Status status = made.status();
    if (made.ok()) {
      const absl::Time begin = absl::Now();
      status = Save(made->get(), "step-1", TrainingState::Uniform(2, 100'000, 1)).status();
      EXPECT_LT(absl::Now() - begin, absl::Seconds(10));  // a second, on a machine that has time
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

TEST_P(WorkerProgram, MissingIsToldAtCreate) {
  ExpectRefusedAtCreate("/nowhere/holdfast-worker", "No such file or directory");
}

TEST_P(WorkerProgram, ADirectoryIsToldAtCreate) {
  ExpectRefusedAtCreate(directory(), "not a file");
}

TEST_P(WorkerProgram, NotExecutableIsToldAtCreate) {
  const std::string file = absl::StrCat(directory(), "/worker");
  std::ofstream(file) << "#!/bin/sh\n";
  ExpectRefusedAtCreate(file, "not executable");
}

TEST_P(WorkerProgram, NotAProgramIsTold) {
  const ScratchDirectory elsewhere;
  const std::string file = absl::StrCat(elsewhere.path(), "/worker");
  std::ofstream(file) << std::string(100, '\1');
  ASSERT_EQ(chmod(file.c_str(), 0755), 0);
  ExpectTold(file, "Exec format error");
}

TEST_P(WorkerProgram, OfAnotherVersionIsTold) {
  ExpectTold(HOLDFAST_MISMATCHED_WORKER, "another version");
}

TEST_P(WorkerProgram, OfAnotherVersionThatDoesNotReadIsTold) {
  const ScratchDirectory elsewhere;
  const std::string script = absl::StrCat(elsewhere.path(), "/worker");
  std::ofstream(script) << "#!/bin/sh\nexit " << layout::kExitMismatch << "\n";
  ASSERT_EQ(chmod(script.c_str(), 0755), 0);
  ExpectTold(script, "another version");
}

TEST_P(WorkerProgram, OneThatJustEndsIsTold) { ExpectTold("/bin/false", "exited with status 1"); }

TEST_P(WorkerProgram, RemovedBetweenSavesIsToldAndMayComeBack) {
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
    EXPECT_TRUE(report.ok()) << report.status();  // it was started before
    std::filesystem::remove_all(absl::StrCat(directory(), "/step-1"));
  } else {
    EXPECT_TRUE(absl::IsNotFound(report.status())) << report.status();
    EXPECT_THAT(Text(report.status()), HasSubstr(program));
  }
  std::filesystem::rename(away, program);
  ExpectRecovered(checkpointer.get());
}

class KilledWorker : public LauncherTest {
 protected:
  struct Counts {
    int failed = 0;
    int saved = 0;
  };
  /// One save, whose worker is killed when `now` says so (or, at the latest, has ended by itself).
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
    // Still ours, or a zombie of ours: nobody else can have that pid while the save is in flight.
    if (!handle->IsDone() && worker != 0) kill(worker, SIGKILL);
    const auto report = handle->WaitDurable(kLong);
    if (report.ok()) {
      ++counts->saved;
    } else {
      ++counts->failed;
      EXPECT_TRUE(absl::IsAborted(report.status())) << report.status();
      EXPECT_THAT(Text(report.status()), AllOf(HasSubstr("victim"), HasSubstr("signal 9")));
    }
    ExpectMemoryBack(checkpointer);
    // Killed right behind its rename it could not say so, but what stands under the name is whole.
    const std::string path = absl::StrCat(directory(), "/victim");
    if (std::filesystem::exists(path)) {
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
  for (const char* phase : {"queued", "staging", "writing", "syncing", "reading back", "manifest",
                            "waiting for ranks", "committing"}) {
    SCOPED_TRACE(phase);
    KillOnce(
        checkpointer.get(), state,
        [phase](const SaveHandle& handle) { return handle.progress().phase == phase; }, &counts);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(counts.failed, 0);
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
  for (int i = 0; i < rounds; ++i) {
    SCOPED_TRACE(absl::StrCat("seed ", seed, ", round ", i));
    // From the worker's first step on: most saves of this size take 10 to 40 ms.
    const absl::Time at =
        absl::Now() + absl::Microseconds(std::uniform_int_distribution<int>(0, 40'000)(random));
    KillOnce(
        checkpointer.get(), state, [at](const SaveHandle&) { return absl::Now() >= at; }, &counts);
    if (HasFatalFailure()) return;
  }
  ExpectRecovered(checkpointer.get());
}

TEST_P(KilledWorker, BeforeItReadsItsJob) {
  SavePrevious(directory());
  const auto checkpointer = Make(Options());
  ASSERT_NE(checkpointer, nullptr);
  if (GetParam() == Launcher::kPersistent) {
    // Between two saves: the next one starts another.
    const std::vector<pid_t> children = Holdings::OfSelf().children;
    ASSERT_EQ(children.size(), 1u);
    kill(children[0], SIGKILL);
    ASSERT_TRUE(WaitFor([&] { return !IsAlive(children[0]); }));
    ExpectRecovered(checkpointer.get());
    return;
  }
  const TrainingState state = TrainingState::Uniform(2, 2u << 20, 1);
  for (int i = 0; i < 3; ++i) {
    const auto handle = Begin(checkpointer.get(), "victim", state);
    ASSERT_TRUE(handle.ok()) << handle.status();
    for (const pid_t child : Holdings::OfSelf().children) kill(child, SIGKILL);
    const auto report = handle->WaitDurable(kLong);
    if (!report.ok()) {
      EXPECT_TRUE(absl::IsAborted(report.status())) << report.status();
    }
    ExpectMemoryBack(checkpointer.get());
    std::filesystem::remove_all(absl::StrCat(directory(), "/victim"));
    ExpectPreviousAnd(directory(), {});
  }
  ExpectRecovered(checkpointer.get());
}

TEST_P(KilledWorker, StreamingSaveEndsInTheCallWithTheWorkersDeath) {
  SavePrevious(directory());
  CheckpointerOptions options = Options();
  options.staging.arena_bytes = 16u << 20;
  options.qos.bytes_per_second_max = 32u << 20;
  const auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  // The call itself waits for the worker, so somebody else must kill it.
  ASSERT_TRUE(GetParam() != Launcher::kPersistent || !Holdings::OfSelf().children.empty());
  std::thread killer([&] {
    WaitFor([&] { return checkpointer->staging().waits > 0; });
    for (const pid_t child : Holdings::OfSelf().children) kill(child, SIGKILL);
  });
  const auto report = Save(checkpointer.get(), "victim", TrainingState::Uniform(8, 4u << 20, 1));
  killer.join();
  EXPECT_TRUE(absl::IsAborted(report.status())) << report.status();
  EXPECT_THAT(Text(report.status()), AllOf(HasSubstr("victim"), HasSubstr("signal 9")));
  ExpectRecovered(checkpointer.get());
}

TEST_P(KilledWorker, StoppedOneIsKilledAtTheStallDeadline) {
  SavePrevious(directory());
  CheckpointerOptions options = Options();
  options.time_stalled_max = absl::Seconds(1);
  options.qos.bytes_per_second_max = 16u << 20;
  const auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  const auto handle = Begin(checkpointer.get(), "stopped", TrainingState::Uniform(4, 4u << 20, 1));
  ASSERT_TRUE(handle.ok()) << handle.status();
  ASSERT_TRUE(WaitFor([&] { return handle->progress().bytes_written > 0; }));
  ASSERT_EQ(kill(handle->worker_pid(), SIGSTOP), 0);
  const auto report = handle->WaitDurable(absl::Seconds(30));
  EXPECT_TRUE(absl::IsDeadlineExceeded(report.status())) << report.status();
  EXPECT_THAT(Text(report.status()), AllOf(HasSubstr("stopped"), HasSubstr("killed")));
  ExpectRecovered(checkpointer.get());
}

}  // namespace
}  // namespace holdfast::testing
