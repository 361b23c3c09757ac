// A worker's life beside its jobs: the trainer's death, unknown messages, tables that are
// not sound, being kept, being told to let go of the arena.
#include <fcntl.h>
#include <liburing.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/sys/system.h"
#include "tests/testing/child_process.h"
#include "tests/testing/settings.h"
#include "tests/unit/worker/worker_rig.h"

namespace holdfast::worker {
namespace {

constexpr uint64_t kArena = 16ull << 20;

class Life : public ::testing::TestWithParam<Launcher> {
 protected:
  TestDirectory directory_;
};

TEST_P(Life, FinishesWithoutItsTrainerWhenEverythingIsSealed) {
  StandIn trainer_process;
  Trainer trainer(kArena, trainer_process.pid());
  TestSave save(&trainer, directory_.path());
  // Slow enough to be under way when the trainer dies.
  save.parameters.qos.bytes_per_second_max = 10 * uint64_t{kChunkBytes};
  save.AddFile("model.bin", {3 * uint64_t{kChunkBytes}});
  save.Build();
  save.SealAll();
  TestWorker worker(GetParam(), trainer);
  save.StartOn(&worker);
  while (save.job()->bytes_completed.load() == 0) ::usleep(500);
  trainer_process.Die();
  ASSERT_TRUE(save.AwaitDone());
  EXPECT_TRUE(save.failure().ok());
  EXPECT_EQ(save.Unsound(), "");
}

TEST(WorkerThread, RunsAJobThatWasSentBeforeTheTrainersDeath) {
  static std::atomic<bool> trainer_is_dead;
  static bool once;
  trainer_is_dead = false;
  once = false;
  // poll(2) looks at the socket, the job and the death come, and it looks at the pidfd.
  sys::g_system.poll = [](pollfd* fds, nfds_t count, int timeout) {
    if (count != 2 || once || fds[1].fd < 0) return sys::kKernel.poll(fds, count, timeout);
    once = true;
    while (!trainer_is_dead) ::usleep(500);
    fds[0].revents = 0;
    fds[1].revents = POLLIN;
    return 1;
  };
  TestDirectory directory;
  StandIn trainer_process;
  Trainer trainer(kArena, trainer_process.pid());
  TestSave save(&trainer, directory.path());
  save.AddFile("model.bin", {uint64_t{kChunkBytes}});
  save.Build();
  save.SealAll();
  {
    TestWorker worker(Launcher::kThread, trainer);
    save.StartOn(&worker);
    trainer_process.Die();
    trainer_is_dead = true;
  }
  sys::g_system = sys::kKernel;
  ASSERT_TRUE(save.AwaitDone(0));
  EXPECT_TRUE(save.failure().ok());
  EXPECT_EQ(save.Unsound(), "");
}

TEST_P(Life, RemovesWhatItReplacedWhenNoTrainerIsLeftToDoSo) {
  StandIn trainer_process;
  Trainer trainer(kArena, trainer_process.pid());
  TestSave save(&trainer, directory_.path());
  save.parameters.qos.bytes_per_second_max = 10 * uint64_t{kChunkBytes};
  save.parameters.flags |= layout::kReplaceExisting;
  std::filesystem::create_directory(save.target_path());
  WriteFileAt(save.target_path() + "/rank-00000-of-00001.manifest.json", ManifestNaming({}));
  save.parameters.older = {kManifestAttempt};
  save.AddFile("model.bin", {3 * uint64_t{kChunkBytes}});
  save.Build();
  save.SealAll();
  TestWorker worker(GetParam(), trainer);
  save.StartOn(&worker);
  while (save.job()->bytes_completed.load() == 0) ::usleep(500);
  trainer_process.Die();
  ASSERT_TRUE(save.AwaitDone());
  EXPECT_TRUE(save.failure().ok());
  EXPECT_STREQ(save.job()->completion.left_behind, "");
  EXPECT_EQ(NamesIn(directory_.path()), std::vector<std::string>{"step-7"});
  EXPECT_EQ(save.Unsound(), "");
}

TEST_P(Life, CleansUpAfterATrainerThatDiedTooEarly) {
  StandIn trainer_process;
  Trainer trainer(kArena, trainer_process.pid());
  TestSave save(&trainer, directory_.path());
  save.AddFile("model.bin", {3 * uint64_t{kChunkBytes}});
  save.Build();
  save.Seal(0);
  TestWorker worker(GetParam(), trainer);
  save.StartOn(&worker);
  while (save.job()->bytes_completed.load() == 0) ::usleep(500);
  trainer_process.Die();
  ASSERT_TRUE(save.AwaitDone());
  EXPECT_EQ(save.failure().code, FailureCode::kAborted);
  EXPECT_EQ(save.failure().operation, Operation::kWaitTrainer);
  EXPECT_TRUE(NamesIn(directory_.path()).empty());
}

TEST_P(Life, StopsWithItsTrainerWhenToldTo) {
  StandIn trainer_process;
  Trainer trainer(kArena, trainer_process.pid());
  TestSave save(&trainer, directory_.path());
  save.parameters.flags &= ~static_cast<uint32_t>(layout::kFinishWithoutTrainer);
  save.parameters.qos.bytes_per_second_max = 10 * uint64_t{kChunkBytes};
  save.AddFile("model.bin", {3 * uint64_t{kChunkBytes}});
  save.Build();
  save.SealAll();
  TestWorker worker(GetParam(), trainer);
  save.StartOn(&worker);
  while (save.job()->bytes_completed.load() == 0) ::usleep(500);
  trainer_process.Die();
  ASSERT_TRUE(save.AwaitDone());
  EXPECT_EQ(save.failure().code, FailureCode::kAborted);
  EXPECT_TRUE(NamesIn(directory_.path()).empty());
}

TEST_P(Life, RefusesAnotherLayoutVersion) {
  Trainer trainer(kArena);
  TestWorker worker(GetParam(), trainer, 1, layout::kLayoutVersion + 1);
  EXPECT_EQ(worker.Join(), layout::kExitMismatch);
}

TEST_P(Life, RefusesATableOfAnotherVersion) {
  Trainer trainer(kArena);
  TestSave save(&trainer, directory_.path());
  save.Build();
  save.job()->layout_version += 1;
  TestWorker worker(GetParam(), trainer);
  save.StartOn(&worker);
  EXPECT_EQ(worker.Join(), layout::kExitMismatch);
  EXPECT_EQ(save.job()->completion.state.load(), 0u);
}

TEST_P(Life, SaysWhatIsWrongWithATable) {
  Trainer trainer(kArena);
  TestSave save(&trainer, directory_.path());
  save.AddFile("model.bin", {1000});
  save.Build();
  layout::Files(save.job())[0].name[0] = '/';
  ASSERT_TRUE(save.Run(GetParam()));
  EXPECT_EQ(save.failure().code, FailureCode::kInvalidArgument);
  EXPECT_EQ(save.failure().operation, Operation::kAttach);
  EXPECT_STREQ(save.job()->completion.reason, "a file's name is not a name");
  EXPECT_TRUE(NamesIn(save.partial_path()).empty());
}

TEST_P(Life, FencedBeforeItBeganMakesNothing) {
  Trainer trainer(kArena);
  TestSave save(&trainer, directory_.path());
  save.AddFile("model.bin", {1000});
  save.Build();
  save.SealAll();
  ASSERT_EQ(::mkdir(save.partial_path().c_str(), 0777), 0);
  const int lock = ::open(save.partial_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::string fenced = directory_.path() + "/fenced";
  ASSERT_EQ(::rename(save.partial_path().c_str(), fenced.c_str()), 0);
  TestWorker worker(GetParam(), trainer);
  worker.Run(save.table(), save.parent(), lock);
  ::close(lock);
  ASSERT_TRUE(save.AwaitDone());
  EXPECT_EQ(save.failure().code, FailureCode::kAborted);
  EXPECT_EQ(NamesIn(directory_.path()), std::vector<std::string>{"fenced"});
  EXPECT_TRUE(NamesIn(fenced).empty());
}

TEST_P(Life, RefusesExtentsOutsideOfTheArena) {
  Trainer trainer(kArena);
  TestSave save(&trainer, directory_.path());
  save.AddFile("model.bin", {2 * uint64_t{kChunkBytes}});
  save.Build();
  save.Seal(0);
  save.Seal(1);
  layout::Extents(save.job())[1].arena_offset = kArena - kIoAlignment;
  ASSERT_TRUE(save.Run(GetParam()));
  EXPECT_EQ(save.failure().code, FailureCode::kInternal);
  EXPECT_TRUE(NamesIn(directory_.path()).empty());
}

TEST_P(Life, EndsWhenTheSocketDoes) {
  Trainer trainer(kArena);
  TestWorker worker(GetParam(), trainer, 0);
  EXPECT_EQ(worker.Join(), 0);
}

TEST_P(Life, ArenaShorterThanSaidIsRefused) {
  Trainer trainer(kArena);
  ASSERT_EQ(::ftruncate(trainer.arena_fd, kArena / 2), 0);
  TestWorker worker(GetParam(), trainer);
  EXPECT_EQ(worker.Join(), layout::kExitAttach);
}

INSTANTIATE_TEST_SUITE_P(All, Life,
                         ::testing::Values(Launcher::kSpawn, Launcher::kFork, Launcher::kThread),
                         [](const auto& setting) {
                           return setting.param == Launcher::kSpawn  ? "Spawn"
                                  : setting.param == Launcher::kFork ? "Fork"
                                                                     : "Thread";
                         });

class KeptWorker : public ::testing::TestWithParam<Launcher> {
 protected:
  TestDirectory directory_;
};

TEST_P(KeptWorker, RunsJobAfterJobAndLetsGoOfTheArenaInBetween) {
  Trainer trainer(kArena);
  TestWorker worker(GetParam(), trainer, 0);
  for (int i = 0; i < 6; ++i) {
    SCOPED_TRACE(i);
    TestSave save(&trainer, directory_.path());
    save.parameters.target = "step-" + std::to_string(i);
    save.parameters.queue_depth = i < 4 ? 8 : 4;  // The ring is opened anew for the fifth.
    save.AddFile("model.bin", {5'000'000});
    save.Build();
    save.SealAll();
    save.StartOn(&worker);
    ASSERT_TRUE(save.AwaitDone());
    EXPECT_TRUE(save.failure().ok());
    EXPECT_EQ(save.Unsound(), "");
    if (i == 2) {
      worker.Send(layout::MessageKind::kDetach, 0, {});
      EXPECT_TRUE(worker.AwaitMessage(layout::MessageKind::kDetached));
      // The pages go, and come back as others.
      ASSERT_EQ(::fallocate(trainer.arena_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                            static_cast<off_t>(kArena)),
                0);
      worker.Send(layout::MessageKind::kAttach, trainer.arena_bytes,
                  {trainer.arena_fd, trainer.pidfd, trainer.to_worker, trainer.to_trainer});
    }
  }
  worker.Send(layout::MessageKind::kExit, 0, {});
  EXPECT_EQ(worker.Join(), 0);
}

TEST_P(KeptWorker, GoesOnAfterAFailedJob) {
  Trainer trainer(kArena);
  TestWorker worker(GetParam(), trainer, 0);
  for (const bool mutate : {true, false, true, false}) {
    TestSave save(&trainer, directory_.path());
    save.parameters.target = mutate ? "bad" : "good";
    save.parameters.flags |= layout::kReplaceExisting;
    save.parameters.older = {save.parameters.attempt};  // the one before has the same
    save.AddFile("model.bin", {10'000'000});
    save.Build();
    save.SealAll();
    if (mutate) save.Memory(1)[9] ^= 1;
    save.StartOn(&worker);
    ASSERT_TRUE(save.AwaitDone());
    EXPECT_EQ(save.failure().ok(), !mutate);
    if (!mutate) {
      EXPECT_EQ(save.Unsound(), "");
    }
    const std::string replaced = save.job()->completion.left_behind;
    if (!replaced.empty()) std::filesystem::remove_all(directory_.path() + "/" + replaced);
  }
  EXPECT_EQ(NamesIn(directory_.path()), std::vector<std::string>{"good"});
}

TEST_P(KeptWorker, LeaksNoFds) {
  Trainer trainer(kArena);
  TestWorker worker(GetParam(), trainer, 0);
  int fds = 0;
  for (int i = 0; i < 30; ++i) {
    TestSave save(&trainer, directory_.path());
    save.parameters.target = "step-" + std::to_string(i);
    save.AddFile("model.bin", {1000});
    save.Build();
    save.SealAll();
    save.StartOn(&worker);
    ASSERT_TRUE(save.AwaitDone());
    const int now =
        GetParam() == Launcher::kThread
            ? OpenFds()
            : static_cast<int>(NamesIn("/proc/" + std::to_string(worker.pid()) + "/fd").size());
    if (i == 5) fds = now;
    // The message's own fds are closed just after the result is there.
    if (i > 5) {
      EXPECT_LE(now, fds + layout::kRunFds + 1);
    }
  }
}

int PollIsInterrupted(pollfd*, nfds_t, int) {
  ::usleep(1000);
  errno = EINTR;
  return -1;
}

bool HasEnded(pid_t pid) {
  siginfo_t info = {};
  return ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
         info.si_pid == pid;
}

TEST(InterruptedWorker, EndsThoughItCannotSeeThatItsTrainerDied) {
  StandIn trainer_process;
  Trainer trainer(kArena, trainer_process.pid());
  sys::g_system.poll = PollIsInterrupted;
  TestWorker worker(Launcher::kPersistent, trainer, 0, layout::kLayoutVersion, true);
  sys::g_system = sys::kKernel;
  trainer_process.Die();
  for (int i = 0; i < 60'000 && !HasEnded(worker.pid()); ++i) ::usleep(1000);
  const bool ended = HasEnded(worker.pid());
  EXPECT_TRUE(ended);
  if (!ended) testing::SendSignal(worker.pid(), SIGKILL);
}

// The kernel may take the old mapping of MAP_FIXED away and then find no memory for the new one.
void* MapForWritingFails(void* address, size_t bytes, int protection, int flags, int fd,
                         off_t offset) {
  const bool for_registration = (protection & PROT_WRITE) != 0 && bytes == kArena;
  if (!for_registration) return sys::kKernel.mmap(address, bytes, protection, flags, fd, offset);
  if ((flags & MAP_FIXED) != 0) sys::kKernel.munmap(address, bytes);
  errno = ENOMEM;
  return MAP_FAILED;
}

TEST(KeptThread, KeepsItsMappingWhenItCannotMapForRegistration) {
  HOLDFAST_SKIP_WITHOUT_RING(EngineRung::kUringFixed);
  Trainer trainer(kArena);
  TestDirectory directory;
  sys::g_system.mmap = MapForWritingFails;
  TestWorker worker(Launcher::kThread, trainer, 0);
  for (const EngineRung engine : {EngineRung::kUringFixed, EngineRung::kPwrite}) {
    TestSave save(&trainer, directory.path());
    save.parameters.engine = engine;
    save.AddFile("model.bin", {1'000'000});
    save.Build();
    save.SealAll();
    save.StartOn(&worker);
    ASSERT_TRUE(save.AwaitDone());
    const bool registers = engine == EngineRung::kUringFixed;
    EXPECT_EQ(save.failure().ok(), !registers);
    EXPECT_EQ(save.failure().error_number, registers ? ENOMEM : 0);
    if (!registers) {
      EXPECT_EQ(save.Unsound(), "");
    }
  }
  EXPECT_EQ(worker.Join(), 0);
  sys::g_system = sys::kKernel;
}

// Of a child that the host forks while the worker, a thread of it, reads back: 1 if the child has
// the buffer, whose pages a copy-on-write would then exchange under the kernel's read.
int g_buffer_in_child = -1;
ssize_t ReadAndFork(int fd, void* buffer, size_t bytes, off_t offset) {
  if (g_buffer_in_child < 0) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(::msync(buffer, 4096, MS_ASYNC) == 0 ? 1 : 0);
    int status = 0;
    ::waitpid(child, &status, 0);
    g_buffer_in_child = WEXITSTATUS(status);
  }
  return sys::kKernel.pread(fd, buffer, bytes, offset);
}

TEST(KeptThread, ReadsBackIntoMemoryThatNoChildHas) {
  Trainer trainer(kArena);
  TestDirectory directory;
  TestWorker worker(Launcher::kThread, trainer, 0);
  sys::g_system.pread = ReadAndFork;
  TestSave save(&trainer, directory.path());
  save.parameters.engine = EngineRung::kPwrite;
  save.parameters.flags |= layout::kReadBack;
  save.AddFile("model.bin", {1'000'000});
  save.Build();
  save.SealAll();
  save.StartOn(&worker);
  ASSERT_TRUE(save.AwaitDone());
  EXPECT_TRUE(save.failure().ok());
  EXPECT_EQ(worker.Join(), 0);
  sys::g_system = sys::kKernel;
  EXPECT_EQ(g_buffer_in_child, 0);
}

INSTANTIATE_TEST_SUITE_P(All, KeptWorker,
                         ::testing::Values(Launcher::kPersistent, Launcher::kThread),
                         [](const auto& setting) {
                           return setting.param == Launcher::kThread ? "Thread" : "Persistent";
                         });

// A ring whose writes never end: the ring pretends that the kernel took the writes.
int SubmitWritesIntoTheVoid(io_uring* ring) {
  static bool writes = false;  // From the first on: a later hand-over would take them along.
  const unsigned tail = ring->sq.sqe_tail;
  for (unsigned i = *ring->sq.khead; i != tail; ++i) {
    const uint8_t opcode = ring->sq.sqes[i & *ring->sq.kring_mask].opcode;
    writes = writes || opcode == IORING_OP_WRITE || opcode == IORING_OP_WRITE_FIXED;
  }
  if (!writes) return sys::kKernel.uring_submit(ring);
  const int count = static_cast<int>(tail - *ring->sq.khead);
  ring->sq.sqe_head = tail;
  *ring->sq.khead = tail;
  return count;
}

TEST(WorkerProcess, StuckTransfersAreReportedByAWorkerThatEnds) {
  HOLDFAST_SKIP_WITHOUT_RING(EngineRung::kUring);
  for (const Launcher launcher : {Launcher::kSpawn, Launcher::kPersistent}) {
    Trainer trainer(kArena);
    TestDirectory directory;
    TestSave save(&trainer, directory.path());
    save.parameters.engine = EngineRung::kUring;
    save.parameters.time_stalled_max_ns = 200'000'000;
    save.AddFile("model.bin", {2 * uint64_t{kChunkBytes}});
    save.Build();
    save.SealAll();
    sys::g_system.uring_submit = SubmitWritesIntoTheVoid;
    TestWorker worker(launcher, trainer, 0, layout::kLayoutVersion, true);
    sys::g_system = sys::kKernel;
    save.StartOn(&worker);
    const Trainer watch(4096, worker.pid());
    pollfd entry = {.fd = watch.pidfd, .events = POLLIN, .revents = 0};
    ASSERT_EQ(::poll(&entry, 1, 20'000), 1)
        << static_cast<int>(save.failure().code) << " " << save.failure().error_number << " "
        << save.job()->completion.reason;
    EXPECT_EQ(save.failure().code, FailureCode::kDeadlineExceeded);
    EXPECT_EQ(save.failure().operation, Operation::kWrite);
    EXPECT_NE(std::string(save.job()->completion.reason).find("in flight"), std::string::npos)
        << save.job()->completion.reason;
    // A kept worker's result would declare the memory free: there is no result.
    EXPECT_EQ(save.AwaitDone(0), launcher == Launcher::kSpawn);
    EXPECT_EQ(worker.Join(), launcher == Launcher::kSpawn ? 0 : layout::kExitStuck);
    EXPECT_FALSE(Exists(save.target_path()));
  }
}

TEST(WorkerProcess, KeptWorkerEndsWithItsTrainer) {
  StandIn trainer_process;
  Trainer trainer(kArena, trainer_process.pid());
  TestDirectory directory;
  TestWorker worker(Launcher::kPersistent, trainer, 0);
  TestSave save(&trainer, directory.path());
  save.Build();
  save.StartOn(&worker);
  ASSERT_TRUE(save.AwaitDone());
  const Trainer watch(4096, worker.pid());
  // The socket stays open here, as in a process that inherited it: only the pidfd tells.
  trainer_process.Die();
  pollfd entry = {.fd = watch.pidfd, .events = POLLIN, .revents = 0};
  EXPECT_EQ(::poll(&entry, 1, 10'000), 1);
}

TEST(WorkerProcess, KeptWorkerFinishesEverySaveThatItsDeadTrainerHasStaged) {
  StandIn trainer_process;
  Trainer trainer(kArena, trainer_process.pid());
  TestDirectory directory;
  TestSave first(&trainer, directory.path());
  first.parameters.qos.bytes_per_second_max = 8 * uint64_t{kChunkBytes};
  TestSave second(&trainer, directory.path());
  second.parameters.target = "step-8";
  second.parameters.partial = "step-8.partial-112233445566778899aabbccddeeff00";
  uint32_t chunk = 0;
  for (TestSave* save : {&first, &second}) {
    save->AddFile("model.bin", {2 * uint64_t{kChunkBytes}});
    save->Build();
  }
  TestWorker worker(Launcher::kPersistent, trainer, 0);
  for (TestSave* save : {&first, &second}) {
    for (uint32_t i = 0; i < save->extent_count(); ++i)
      save->Stage(i, chunk++ * uint64_t{kChunkBytes});
    save->SealAll();
    save->StartOn(&worker);
  }
  while (first.job()->bytes_completed.load() == 0) ::usleep(500);
  trainer_process.Die();
  for (TestSave* save : {&first, &second}) {
    ASSERT_TRUE(save->AwaitDone());
    EXPECT_TRUE(save->failure().ok());
    EXPECT_EQ(save->Unsound(), "");
  }
}

TEST(WorkerProcess, SurvivesTheSignalsOfATerminal) {
  Trainer trainer(kArena);
  TestDirectory directory;
  TestWorker worker(Launcher::kSpawn, trainer);
  TestSave save(&trainer, directory.path());
  save.AddFile("model.bin", {2 * uint64_t{kChunkBytes}});
  save.Build();
  save.Seal(0);
  save.StartOn(&worker);
  while (save.job()->bytes_completed.load() == 0) ::usleep(500);
  EXPECT_EQ(::getsid(worker.pid()), worker.pid());
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1})
    testing::SendSignal(worker.pid(), signal);
  save.Seal(1);
  save.Ring();
  ASSERT_TRUE(save.AwaitDone());
  EXPECT_TRUE(save.failure().ok());
  EXPECT_EQ(save.Unsound(), "");
}

TEST(WorkerProcess, ForkedChildKeepsOnlyItsSocket) {
  Trainer trainer(kArena);
  const int mine = ::open("/dev/null", O_RDONLY);
  TestWorker worker(Launcher::kFork, trainer);
  TestDirectory directory;
  TestSave save(&trainer, directory.path());
  save.parameters.launcher = Launcher::kFork;
  save.AddFile("model.bin", {1000});
  save.Build();
  save.StartOn(&worker);
  while (save.job()->phase.load() != static_cast<uint32_t>(layout::Phase::kWriting)) ::usleep(500);
  // stdin, stdout, stderr, socket; attach 4; run 3; the directory; the ring.
  const int fds = static_cast<int>(NamesIn("/proc/" + std::to_string(worker.pid()) + "/fd").size());
  EXPECT_LE(fds, 4 + layout::kAttachFds + layout::kRunFds + 3);
  save.SealAll();
  ASSERT_TRUE(save.AwaitDone());
  EXPECT_TRUE(save.failure().ok());
  ::close(mine);
}

// ioprio_get(2); no header of the C library has them.
constexpr int kProcess = 1;
constexpr int kBestEffort = 2;

TEST(WorkerProcess, IsPoliteAndHasATellingName) {
  Trainer trainer(kArena);
  TestWorker worker(Launcher::kSpawn, trainer);
  TestDirectory directory;
  TestSave save(&trainer, directory.path());
  save.parameters.qos.nice = 7;
  save.parameters.qos.io_priority_class = kBestEffort;
  save.parameters.qos.io_priority_level = 6;
  save.parameters.qos.cpu_count = 1;
  save.parameters.qos.cpus[0] = 0;
  save.parameters.step = 4711;
  save.AddFile("model.bin", {1000});
  save.Build();
  save.StartOn(&worker);
  while (save.job()->phase.load() != static_cast<uint32_t>(layout::Phase::kWriting)) ::usleep(500);
  const int own = ::getpriority(PRIO_PROCESS, 0);
  EXPECT_EQ(::getpriority(PRIO_PROCESS, static_cast<id_t>(worker.pid())), std::min(own + 7, 19));
  EXPECT_EQ(::syscall(SYS_ioprio_get, kProcess, worker.pid()), kBestEffort << 13 | 6);
  cpu_set_t cpus;
  ASSERT_EQ(::sched_getaffinity(worker.pid(), sizeof(cpus), &cpus), 0);
  EXPECT_EQ(CPU_COUNT(&cpus), 1);
  EXPECT_EQ(ReadFileOf("/proc/" + std::to_string(worker.pid()) + "/comm"), "hf:4711\n");
  save.SealAll();
  ASSERT_TRUE(save.AwaitDone());
}

TEST(WorkerProcess, UmaskIsTheJobs) {
  Trainer trainer(kArena);
  TestDirectory directory;
  TestSave save(&trainer, directory.path());
  save.AddFile("model.bin", {1000});
  save.Build();
  save.job()->umask = 077;
  save.SealAll();
  ASSERT_TRUE(save.Run(Launcher::kSpawn));
  struct stat status = {};
  ASSERT_EQ(::stat((save.target_path() + "/model.bin").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
}

}  // namespace
}  // namespace holdfast::worker
