// Failing system calls, one at a time: whatever fails, a save is either durable and sound
// or a failure that nobody can take for a checkpoint. (The order of successful calls:
// order_test.)
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/base/status.h"
#include "runtime/sys/system.h"
#include "tests/testing/path_of.h"
#include "tests/unit/worker/worker_rig.h"

namespace holdfast::worker {
namespace {

constexpr uint64_t kArena = 16ull << 20;
constexpr uint64_t kSmall = 9000;  // One chunk: as many calls, less time.

// ---- The fault: the Nth call of the worker's thread fails with `g_errno`.

thread_local bool g_in_worker = false;
long g_calls = 0;
long g_fail_at = 0;
int g_errno = EIO;
const char* g_failed = "";

bool FailNow(const char* name) {
  if (!g_in_worker) return false;
  if (++g_calls != g_fail_at) return false;
  g_failed = name;
  errno = g_errno;
  return true;
}

#define FAULT(type, name, failed, parameters, arguments) \
  type Faulty_##name parameters {                        \
    if (FailNow(#name)) return failed;                   \
    return sys::kKernel.name arguments;                  \
  }
FAULT(int, openat, -1, (int d, const char* p, int f, mode_t m), (d, p, f, m))
FAULT(ssize_t, read, -1, (int f, void* b, size_t n), (f, b, n))
FAULT(ssize_t, write, -1, (int f, const void* b, size_t n), (f, b, n))
FAULT(ssize_t, pread, -1, (int f, void* b, size_t n, off_t o), (f, b, n, o))
FAULT(ssize_t, pwrite, -1, (int f, const void* b, size_t n, off_t o), (f, b, n, o))
FAULT(int, fsync, -1, (int f), (f))
FAULT(int, sync_file_range, -1, (int f, off_t o, off_t n, unsigned w), (f, o, n, w))
FAULT(int, fallocate, -1, (int f, int m, off_t o, off_t n), (f, m, o, n))
FAULT(int, ftruncate, -1, (int f, off_t n), (f, n))
FAULT(int, fstat, -1, (int f, struct stat* s), (f, s))
FAULT(int, fstatat, -1, (int d, const char* p, struct stat* s, int f), (d, p, s, f))
FAULT(int, statx, -1, (int d, const char* p, int f, unsigned m, struct statx* s), (d, p, f, m, s))
FAULT(int, mkdirat, -1, (int d, const char* p, mode_t m), (d, p, m))
FAULT(int, unlinkat, -1, (int d, const char* p, int f), (d, p, f))
FAULT(int, renameat2, -1, (int a, const char* p, int b, const char* q, unsigned f), (a, p, b, q, f))
FAULT(ssize_t, getdents64, -1, (int f, void* b, size_t n), (f, b, n))
FAULT(void*, mmap, reinterpret_cast<void*>(-1), (void* a, size_t n, int p, int f, int d, off_t o),
      (a, n, p, f, d, o))
FAULT(int, poll, -1, (struct pollfd * f, nfds_t n, int t), (f, n, t))
FAULT(int, uring_queue_init_params, -EPERM, (unsigned e, io_uring* r, io_uring_params* p),
      (e, r, p))
#undef FAULT
// A close that fails has closed.
int Faulty_close(int fd) {
  const int result = sys::kKernel.close(fd);
  return FailNow("close") ? -1 : result;
}
// The first call of a worker's thread: from here on its calls count.
ssize_t Faulty_recvmsg(int fd, struct msghdr* message, int flags) {
  g_in_worker = true;
  return sys::kKernel.recvmsg(fd, message, flags);
}

void InstallFaults() {
  sys::SystemCalls& system = sys::g_system;
  system.openat = Faulty_openat;
  system.close = Faulty_close;
  system.read = Faulty_read;
  system.write = Faulty_write;
  system.pread = Faulty_pread;
  system.pwrite = Faulty_pwrite;
  system.fsync = Faulty_fsync;
  system.sync_file_range = Faulty_sync_file_range;
  system.fallocate = Faulty_fallocate;
  system.ftruncate = Faulty_ftruncate;
  system.fstat = Faulty_fstat;
  system.fstatat = Faulty_fstatat;
  system.statx = Faulty_statx;
  system.mkdirat = Faulty_mkdirat;
  system.unlinkat = Faulty_unlinkat;
  system.renameat2 = Faulty_renameat2;
  system.getdents64 = Faulty_getdents64;
  system.mmap = Faulty_mmap;
  system.poll = Faulty_poll;
  system.recvmsg = Faulty_recvmsg;
  system.uring_queue_init_params = Faulty_uring_queue_init_params;
}

struct FaultTest : ::testing::Test {
  FaultTest() {
    sys::g_system = sys::kKernel;
    g_errno = EIO;
  }
  ~FaultTest() override { sys::g_system = sys::kKernel; }

  Trainer trainer{kArena};
};

constexpr size_t kReadBackBytes = 4 * size_t{kChunkBytes};
size_t g_refused_bytes = 0;
void* NoAnonymousMemory(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
  if ((flags & MAP_ANONYMOUS) == 0 || bytes != g_refused_bytes)
    return sys::kKernel.mmap(at, bytes, protection, flags, fd, offset);
  errno = ENOMEM;
  return MAP_FAILED;
}

TEST_F(FaultTest, NoMemoryIsReportedForTheWorkersMemoryOrTheReadBackBuffer) {
  // A small job's own memory is one block.
  for (const size_t bytes : {size_t{kIoAlignment}, kReadBackBytes}) {
    TestDirectory directory;
    TestSave save(&trainer, directory.path());
    save.parameters.engine = EngineRung::kPwrite;
    save.parameters.flags |= layout::kReadBack;
    save.AddFile("model.bin", {1000});
    save.Build();
    save.SealAll();
    g_refused_bytes = bytes;
    sys::g_system.mmap = NoAnonymousMemory;
    TestWorker worker(Launcher::kThread, trainer);
    save.StartOn(&worker);
    ASSERT_TRUE(save.AwaitDone());
    worker.Join();
    sys::g_system = sys::kKernel;
    EXPECT_EQ(base::ToStatus(save.failure(), {.checkpoint = "/run/step-1"}).message(),
              bytes == kReadBackBytes
                  ? "map the read-back buffer for /run/step-1: Cannot allocate memory"
                  : "map the worker's memory for /run/step-1: Cannot allocate memory");
  }
}

const std::string kOldManifest = "rank-00003-of-00004.manifest.json";

enum class Target { kNew, kOld, kFrameworks };

// One run with call `n` failing. False when the job made fewer calls.
bool RunWithFault(Trainer* trainer, EngineRung engine, uint64_t bytes, Target target, long n) {
  const bool old_target = target == Target::kOld;
  const bool files_only = target == Target::kFrameworks;
  TestDirectory directory;
  TestSave save(trainer, directory.path());
  save.parameters.engine = engine;
  save.parameters.pwrite_threads = 0;
  // Synchronous pwrite, so that every call is this thread's.
  save.parameters.launcher = Launcher::kFork;
  save.parameters.flags |= layout::kReadBack;
  if (old_target) save.parameters.flags |= layout::kReplaceExisting;
  if (files_only) {
    save.parameters.flags |= layout::kFilesOnly;
    ::mkdir(save.target_path().c_str(), 0755);
  }
  save.parameters.older = {kManifestAttempt};
  save.AddFile("a.bin", {bytes}, 100);
  save.AddFile("empty.bin", {});
  save.AddFile("b.bin", {9});
  save.Build();
  save.SealAll();
  if (old_target) {
    ::mkdir(save.target_path().c_str(), 0755);
    WriteFileAt(save.target_path() + "/" + kOldManifest, ManifestNaming({}));
  }
  const int fds_before = OpenFds();
  g_calls = 0;
  g_fail_at = n;
  g_failed = "";
  InstallFaults();
  bool done = false;
  {
    TestWorker worker(Launcher::kThread, *trainer);
    save.StartOn(&worker);
    worker.Join();
    sys::g_system = sys::kKernel;
    done = save.AwaitDone(0);
  }
  SCOPED_TRACE("call " + std::to_string(n) + ": " + g_failed);
  const bool exists = Exists(save.target_path());
  // A failed look does not mean that another save has the file.
  EXPECT_NE(save.failure().code, FailureCode::kAborted);
  if (done && save.failure().ok()) {
    EXPECT_EQ(save.Unsound(), "");
  } else if (files_only) {
    // Where the manifest stands, the files do: only the fsync after it may fail so late.
    EXPECT_TRUE(NamesIn(save.target_path()).size() <= 3 || save.Unsound().empty());
  } else if (exists && old_target && Exists(save.target_path() + "/" + kOldManifest)) {
    EXPECT_EQ(NamesIn(save.target_path()), std::vector<std::string>{kOldManifest});
  } else if (exists) {
    // Only the fsync after the last rename may fail so late: what stands there is sound.
    EXPECT_EQ(save.failure().operation, Operation::kSyncDirectory);
    EXPECT_EQ(save.Unsound(), "");
  } else {
    EXPECT_FALSE(old_target) << "the old checkpoint is gone and no new one is there";
  }
  if (g_failed[0] != '\0' && !exists && !old_target && std::string(g_failed) != "unlinkat") {
    // Nothing is left that could be taken for anything, unless the clean-up was what failed.
    EXPECT_TRUE(NamesIn(directory.path()).empty() || !done) << NamesIn(directory.path())[0];
  }
  EXPECT_EQ(OpenFds(), fds_before);
  return g_failed[0] != '\0';
}

void FailEveryCall(Trainer* trainer, EngineRung engine, uint64_t bytes, Target target) {
  long n = 1;
  while (RunWithFault(trainer, engine, bytes, target, n)) {
    ++n;
    ASSERT_LT(n, 2000);
    if (::testing::Test::HasFailure()) return;
  }
  // Fewer would mean that the worker's calls were not seen.
  EXPECT_GT(n, 50);
}

TEST_F(FaultTest, AnyFailingCallOfASaveByPwrite) {
  FailEveryCall(&trainer, EngineRung::kPwrite, uint64_t{kChunkBytes} + 5, Target::kNew);
}

TEST_F(FaultTest, AnyFailingCallOfASaveByUring) {
  FailEveryCall(&trainer, EngineRung::kAuto, kSmall, Target::kNew);
}

TEST_F(FaultTest, AnyFailingCallOfAReplacement) {
  FailEveryCall(&trainer, EngineRung::kPwrite, kSmall, Target::kOld);
}

TEST_F(FaultTest, AnyFailingCallOfASaveIntoAFrameworksDirectory) {
  FailEveryCall(&trainer, EngineRung::kPwrite, kSmall, Target::kFrameworks);
}

TEST_F(FaultTest, AnyCallWithoutSpace) {
  for (const int error : {ENOSPC, EDQUOT, EFBIG}) {
    SCOPED_TRACE(error);
    g_errno = error;
    FailEveryCall(&trainer, EngineRung::kPwrite, kSmall, Target::kNew);
  }
}

TEST_F(FaultTest, AnyInterruptedCallEndsSoundOrClean) {
  g_errno = EINTR;
  FailEveryCall(&trainer, EngineRung::kPwrite, kSmall, Target::kNew);
}

// ---- File systems that lack what is asked of them.

int g_rename_errno = EINVAL;
int RenameWithoutFlags(int a, const char* from, int b, const char* to, unsigned flags) {
  if (flags != 0) {
    errno = g_rename_errno;
    return -1;
  }
  return sys::kKernel.renameat2(a, from, b, to, 0);
}
int FallocateUnsupported(int, int, off_t, off_t) {
  errno = EOPNOTSUPP;
  return -1;
}

std::string g_swapped_directory;

/// As another program that puts a copy in the partial directory's place.
void SwapPartial() {
  const std::string partial = g_swapped_directory + "/partial";
  const std::string aside = g_swapped_directory + "/aside";
  std::filesystem::rename(partial, aside);
  std::filesystem::copy(aside, partial);
}
int SwapBeforeTheLook(int a, const char* from, int b, const char* to, unsigned flags) {
  const int done = sys::kKernel.renameat2(a, from, b, to, flags);
  if (std::string(to).ends_with(".manifest.json")) SwapPartial();
  return done;
}
int SwapBeforeTheRename(int a, const char* from, int b, const char* to, unsigned flags) {
  if (std::string(from) == "partial") SwapPartial();
  return sys::kKernel.renameat2(a, from, b, to, flags);
}

TEST_F(FaultTest, ADirectoryThatWasSwappedIsNotReportedDurable) {
  for (const auto hook : {SwapBeforeTheLook, SwapBeforeTheRename}) {
    TestDirectory directory;
    g_swapped_directory = directory.path();
    TestSave save(&trainer, directory.path());
    save.parameters.partial = "partial";
    save.AddFile("a.bin", {1000});
    save.Build();
    save.SealAll();
    sys::g_system.renameat2 = hook;
    ASSERT_TRUE(save.Run(Launcher::kThread));
    sys::g_system = sys::kKernel;
    EXPECT_EQ(save.failure().code, FailureCode::kAborted);
    EXPECT_EQ(save.failure().operation, Operation::kRename);
    EXPECT_TRUE(Exists(directory.path() + "/aside/a.bin"));
  }
}

TEST_F(FaultTest, WorksWithoutRenameFlags) {
  for (int i = 0; i < 6; ++i) {
    constexpr int kErrnos[] = {EINVAL, ENOSYS, EOPNOTSUPP};
    g_rename_errno = kErrnos[i / 2];
    const bool replace = i % 2 == 1;
    SCOPED_TRACE(g_rename_errno);
    TestDirectory directory;
    TestSave save(&trainer, directory.path());
    if (replace) {
      save.parameters.flags |= layout::kReplaceExisting;
      save.parameters.older = {kManifestAttempt};
      ::mkdir(save.target_path().c_str(), 0755);
      WriteFileAt(save.target_path() + "/" + kOldManifest, ManifestNaming({}));
    }
    save.AddFile("a.bin", {1000});
    save.Build();
    save.SealAll();
    sys::g_system.renameat2 = RenameWithoutFlags;
    ASSERT_TRUE(save.Run(Launcher::kThread));
    sys::g_system = sys::kKernel;
    EXPECT_TRUE(save.failure().ok());
    EXPECT_EQ(save.Unsound(), "");
    const std::string left = save.job()->completion.left_behind;
    std::vector<std::string> expected = {"step-7"};
    if (replace) expected = {RetiredName("step-7", kManifestAttempt), "step-7"};
    EXPECT_EQ(left, replace ? expected[0] : "");
    EXPECT_EQ(NamesIn(directory.path()), expected);
  }
}

std::vector<off_t>* g_lengths = nullptr;
int LoggedFtruncate(int fd, off_t bytes) {
  g_lengths->push_back(bytes >> 20);
  return sys::kKernel.ftruncate(fd, bytes);
}

TEST_F(FaultTest, FreesALargeFileOfACancelledSaveInSteps) {
  TestDirectory directory;
  TestSave save(&trainer, directory.path());
  save.AddFile("a.bin", {1000});
  save.Build();
  std::vector<off_t> lengths;
  g_lengths = &lengths;
  sys::g_system.ftruncate = LoggedFtruncate;
  TestWorker worker(Launcher::kThread, trainer);
  save.StartOn(&worker);
  const std::string file = save.partial_path() + "/a.bin.tmp";
  while (!Exists(file)) ::usleep(500);
  ASSERT_EQ(::truncate(file.c_str(), 600ll << 20), 0);  // as if so much had been written
  const uint64_t steps = save.job()->steps.load();
  save.job()->cancel.store(1);
  save.Ring();
  ASSERT_TRUE(save.AwaitDone());
  worker.Join();
  sys::g_system = sys::kKernel;
  EXPECT_EQ(lengths, (std::vector<off_t>{344, 88}));
  EXPECT_GE(save.job()->steps.load() - steps, 3u) << "no stall deadline hears of the removal";
  EXPECT_TRUE(NamesIn(directory.path()).empty());
}

TEST_F(FaultTest, RefusesAnExistingTargetWithoutRenameFlags) {
  TestDirectory directory;
  TestSave save(&trainer, directory.path());
  save.AddFile("a.bin", {1000});
  save.Build();
  sys::g_system.renameat2 = RenameWithoutFlags;
  TestWorker worker(Launcher::kThread, trainer);
  save.StartOn(&worker);
  while (save.job()->phase.load() != static_cast<uint32_t>(layout::Phase::kWriting)) ::usleep(500);
  // After the early look, before the rename.
  ::mkdir(save.target_path().c_str(), 0755);
  WriteFileAt(save.target_path() + "/theirs", "theirs");
  save.SealAll();
  ASSERT_TRUE(save.AwaitDone());
  worker.Join();
  EXPECT_EQ(save.failure().code, FailureCode::kAlreadyExists);
  EXPECT_EQ(save.failure().operation, Operation::kRename);
  EXPECT_EQ(NamesIn(directory.path()), std::vector<std::string>{"step-7"});
  EXPECT_EQ(NamesIn(save.target_path()), std::vector<std::string>{"theirs"});
}

// A file through the page cache, larger than what is written back at once.
struct WriteBackTest : ::testing::Test {
  WriteBackTest() {
    save.parameters.flags |= layout::kBuffered;
    save.AddFile("a.bin", {100ull << 20});
    save.Build();
    save.SealAll();
    g_job = save.job();
    g_steps = 0;
    g_steps_at_fsync = -1;
    sys::g_system.fsync = [](int fd) {
      struct stat status = {};
      if (::fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && g_steps_at_fsync < 0) {
        g_steps_at_fsync = static_cast<int>(g_job->steps.load());
      }
      return sys::kKernel.fsync(fd);
    };
  }
  ~WriteBackTest() override { sys::g_system = sys::kKernel; }

  Trainer trainer{128ull << 20};
  TestDirectory directory;
  TestSave save{&trainer, directory.path()};
  static inline layout::Job* g_job = nullptr;
  static inline int g_steps = 0;
  static inline int g_steps_at_fsync = -1;
};

TEST_F(WriteBackTest, ShowsProgressBeforeTheFsync) {
  ASSERT_TRUE(save.Run(Launcher::kThread));
  EXPECT_TRUE(save.failure().ok());
  EXPECT_EQ(save.Unsound(), "");
  EXPECT_GE(g_steps_at_fsync, 3);
}

TEST_F(WriteBackTest, ObeysACancelBeforeTheFsync) {
  sys::g_system.sync_file_range = [](int fd, off_t offset, off_t bytes, unsigned flags) {
    g_job->cancel = 1;
    return sys::kKernel.sync_file_range(fd, offset, bytes, flags);
  };
  ASSERT_TRUE(save.Run(Launcher::kThread));
  EXPECT_EQ(save.failure().code, FailureCode::kCancelled);
  EXPECT_EQ(g_steps_at_fsync, -1) << "no fsync before the cancel was obeyed";
}

TEST_F(WriteBackTest, AnErrorIsAnswered) {
  // Pages that the kernel could not keep are written once more, into a new file.
  sys::g_system.sync_file_range = [](int fd, off_t offset, off_t bytes, unsigned flags) {
    if (++g_steps != 2) return sys::kKernel.sync_file_range(fd, offset, bytes, flags);
    errno = EIO;
    return -1;
  };
  ASSERT_TRUE(save.Run(Launcher::kThread));
  EXPECT_TRUE(save.failure().ok());
  EXPECT_EQ(save.job()->completion.figures.write_attempts, 2u);
  EXPECT_EQ(save.Unsound(), "");
}

TEST_F(WriteBackTest, GoesOnWhereTheCallIsRefused) {
  sys::g_system.sync_file_range = [](int, off_t, off_t, unsigned) {
    ++g_steps;
    errno = ENOSYS;
    return -1;
  };
  ASSERT_TRUE(save.Run(Launcher::kThread));
  EXPECT_TRUE(save.failure().ok());
  EXPECT_EQ(g_steps, 1);
  EXPECT_EQ(save.Unsound(), "");
}

TEST_F(FaultTest, AFileThatCannotBeRemovedIsAnErrorOfTheSystem) {
  sys::g_system.unlinkat = [](int directory, const char* name, int flags) {
    if (!std::string(name).ends_with(".tmp")) return sys::kKernel.unlinkat(directory, name, flags);
    errno = EIO;
    return -1;
  };
  for (const bool is_manifest : {false, true}) {
    SCOPED_TRACE(is_manifest);
    const TestDirectory below;
    TestSave save(&trainer, below.path());
    save.parameters.flags = layout::kFilesOnly | layout::kWriteManifest;
    save.parameters.target = "iter_0000007";
    ::mkdir(save.target_path().c_str(), 0755);
    save.AddFile("a.bin", {kSmall});
    save.Build();
    save.SealAll();
    const std::string left =
        save.target_path() + "/" + (is_manifest ? save.manifest_name() : "a.bin") + ".tmp";
    WriteFileAt(left, "of an attempt that was killed");
    ASSERT_TRUE(save.Run(Launcher::kThread));
    EXPECT_EQ(save.failure().code, FailureCode::kDataLoss);
    EXPECT_EQ(save.failure().error_number, EIO);
    EXPECT_TRUE(Exists(left));
  }
  sys::g_system = sys::kKernel;
}

bool IsDirect(int fd) { return (::fcntl(fd, F_GETFL) & O_DIRECT) != 0; }

bool IsCommon(int fd) { return testing::PathOf(fd).ends_with("common.bin.tmp"); }

/// A file system that wants more of direct I/O than it says: whole pages of 64 KiB, of all files
/// but one.
bool RefusesDirect(int fd, const void* buffer, size_t bytes, off_t offset) {
  constexpr uintptr_t kMask = 64 * 1024 - 1;
  return IsDirect(fd) && !IsCommon(fd) &&
         ((reinterpret_cast<uintptr_t>(buffer) | bytes | static_cast<uintptr_t>(offset)) & kMask) !=
             0;
}

int g_direct_reads_of_common = 0;

TEST_F(FaultTest, WritesThroughThePageCacheAfterARefusedDirectWrite) {
  TestDirectory directory;
  TestSave save(&trainer, directory.path());
  save.parameters.engine = EngineRung::kPwrite;
  save.parameters.flags |= layout::kReadBack;
  save.AddFile("a.bin", {3 * uint64_t{kChunkBytes} + 5}, 100);
  save.AddFile("b.bin", {9});
  save.AddFile("common.bin", {9});
  save.Build();
  save.SealAll();
  g_direct_reads_of_common = 0;
  sys::g_system.pwrite = [](int fd, const void* buffer, size_t bytes, off_t offset) -> ssize_t {
    if (!RefusesDirect(fd, buffer, bytes, offset))
      return sys::kKernel.pwrite(fd, buffer, bytes, offset);
    errno = EINVAL;
    return -1;
  };
  sys::g_system.pread = [](int fd, void* buffer, size_t bytes, off_t offset) -> ssize_t {
    if (IsCommon(fd) && IsDirect(fd)) ++g_direct_reads_of_common;
    if (!RefusesDirect(fd, buffer, bytes, offset))
      return sys::kKernel.pread(fd, buffer, bytes, offset);
    errno = EINVAL;
    return -1;
  };
  ASSERT_TRUE(save.Run(Launcher::kThread));
  sys::g_system = sys::kKernel;
  EXPECT_TRUE(save.failure().ok());
  EXPECT_EQ(save.job()->completion.figures.direct_io, DirectIo::kNo);
  EXPECT_GT(g_direct_reads_of_common, 0);
  EXPECT_EQ(save.Unsound(), "");
}

TEST_F(FaultTest, GoesOnWithoutReservationAndSaysSo) {
  TestDirectory directory;
  TestSave save(&trainer, directory.path());
  save.AddFile("a.bin", {5'000'000});
  save.Build();
  save.SealAll();
  sys::g_system.fallocate = FallocateUnsupported;
  ASSERT_TRUE(save.Run(Launcher::kThread));
  EXPECT_TRUE(save.failure().ok());
  EXPECT_FALSE(save.job()->completion.figures.space_reserved);
  EXPECT_EQ(save.Unsound(), "");
}

}  // namespace
}  // namespace holdfast::worker
