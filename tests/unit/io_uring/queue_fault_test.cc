// Every rung of the queue under interrupted, refused, short and failed calls.
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mount.h>
#include <sys/resource.h>

#include <atomic>
#include <cerrno>
#include <mutex>
#include <set>

#include "tests/testing/child_process.h"
#include "tests/unit/io_uring/queue_fixture.h"

namespace holdfast::io {
namespace {

INSTANTIATE_TEST_SUITE_P(Rungs, QueueTest, ::testing::ValuesIn(kRungs), RungName);

std::string RingName(const ::testing::TestParamInfo<Rung>& info) { return info.param.name; }

/// Faults of the ring itself, which the pwrite rungs do not have.
class RingTest : public QueueTest {};
INSTANTIATE_TEST_SUITE_P(Rungs, RingTest, ::testing::Values(kRungs[0], kRungs[1]), RingName);

// --- Results of transfers ------------------------------------------------------------------------

// A device that takes only the first 5000 bytes of each request on its first attempt.
struct ShortDevice {
  int second_fd = -1;  // buffered, to erase bytes that a short write must not have written
  std::mutex mutex;
  std::set<uint64_t> seen;
  static constexpr int32_t kShort = 5000;
  bool FirstTime(uint64_t key) {
    const std::lock_guard lock(mutex);
    return seen.insert(key).second;
  }
};
ShortDevice* short_device = nullptr;

// The tag of these requests is their offset; each has 1 MiB.
int32_t ShortResult(uint8_t opcode, uint64_t tag, int32_t result) {
  if (!short_device->FirstTime(tag)) return result;
  if (opcode == static_cast<uint8_t>(Opcode::kWrite)) {
    const std::string zeros((1u << 20) - ShortDevice::kShort, '\0');
    const auto at = static_cast<off_t>(tag + ShortDevice::kShort);
    EXPECT_EQ(pwrite(short_device->second_fd, zeros.data(), zeros.size(), at),
              static_cast<ssize_t>(zeros.size()));
  }
  return ShortDevice::kShort;
}

ssize_t ShortWrite(int fd, const void* buffer, size_t bytes, off_t offset) {
  if (!short_device->FirstTime(static_cast<uint64_t>(offset))) {
    return pwrite(fd, buffer, bytes, offset);
  }
  // Direct I/O takes whole blocks only, so the rest of the last block stays unwritten.
  const ssize_t written = pwrite(fd, buffer, 4096, offset);
  return written < 0 ? written : ShortDevice::kShort;
}

TEST_P(QueueTest, ContinuesShortWritesFromTheRightByte) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  ASSERT_NO_FATAL_FAILURE(MakeFile());
  ShortDevice device;
  device.second_fd = open(path_.c_str(), O_WRONLY | O_CLOEXEC);
  short_device = &device;
  {
    Planted planted(queue_.get());
    planted->uring_result = ShortResult;
    planted->pwrite = ShortWrite;
    for (uint64_t i = 0; i < 8; ++i) {
      ASSERT_EQ(queue_->Submit(WriteAt(i << 20, 1u << 20, i << 20)), 0);
    }
    const auto all = Drain();
    ASSERT_EQ(all.size(), 8u);
    for (const Completion& end : all) {
      EXPECT_EQ(end.error, 0);
      EXPECT_EQ(end.bytes, 1u << 20);
    }
  }
  EXPECT_GE(device.seen.size(), 8u);
  EXPECT_TRUE(FileHolds(0, 8u << 20));
  queue_->Close();
  close(device.second_fd);
}

std::atomic<int> refusals_left{0};
std::atomic<int> refusal{0};

int32_t RefusedResult(uint8_t, uint64_t, int32_t result) {
  return refusals_left-- > 0 ? -refusal.load() : result;
}
ssize_t RefusedWrite(int fd, const void* buffer, size_t bytes, off_t offset) {
  if (refusals_left-- > 0) {
    errno = refusal;
    return -1;
  }
  return pwrite(fd, buffer, bytes, offset);
}

TEST_P(QueueTest, RetriesInterruptedAndRefusedTransfers) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  ASSERT_NO_FATAL_FAILURE(MakeFile());
  Planted planted(queue_.get());
  planted->uring_result = RefusedResult;
  planted->pwrite = RefusedWrite;
  for (const int error : {EINTR, EAGAIN}) {
    refusal = error;
    refusals_left = 6;
    const Completion end = Run(WriteAt(0, 1u << 20));
    EXPECT_EQ(end.error, 0);
    EXPECT_EQ(end.bytes, 1u << 20);
  }
  EXPECT_TRUE(FileHolds(0, 1u << 20));
  refusals_left = 1'000'000;
  EXPECT_EQ(Run(WriteAt(0, 4096)).error, EAGAIN);
}

std::atomic<int> g_own_attempts{0};

TEST_P(QueueTest, MakesTransfersItselfThatTheKernelHasNoThreadFor) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  ASSERT_NO_FATAL_FAILURE(MakeFile());
  g_own_attempts = 0;
  Planted planted(queue_.get());
  planted->uring_result = [](uint8_t, uint64_t, int32_t) -> int32_t { return -ECANCELED; };
  planted->pwrite = [](int fd, const void* buffer, size_t bytes, off_t offset) {
    ++g_own_attempts;
    return pwrite(fd, buffer, bytes, offset);
  };
  const Completion end = Run(WriteAt(0, 1u << 20));
  EXPECT_EQ(end.error, 0);
  EXPECT_EQ(end.bytes, 1u << 20);
  EXPECT_GE(g_own_attempts, 1);
  EXPECT_TRUE(FileHolds(0, 1u << 20));
}

TEST_P(QueueTest, ReportsTheErrorOfTheOneTransferThatFailed) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  ASSERT_NO_FATAL_FAILURE(MakeFile());
  Planted planted(queue_.get());
  planted->uring_result = [](uint8_t, uint64_t tag, int32_t result) {
    return tag == 3 ? -EIO : result;
  };
  planted->pwrite = [](int fd, const void* buffer, size_t bytes, off_t offset) -> ssize_t {
    if (offset == 3 * 4096) {
      errno = EIO;
      return -1;
    }
    return pwrite(fd, buffer, bytes, offset);
  };
  for (uint64_t i = 0; i < 8; ++i) ASSERT_EQ(queue_->Submit(WriteAt(i * 4096, 4096, i)), 0);
  const auto all = Drain();
  ASSERT_EQ(all.size(), 8u);
  for (const Completion& end : all) {
    EXPECT_EQ(end.error, end.tag == 3 ? EIO : 0) << end.tag;
    EXPECT_EQ(end.bytes, end.tag == 3 ? 0u : 4096u) << end.tag;
  }
}

TEST_P(QueueTest, ReportsABadDescriptor) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  ASSERT_NO_FATAL_FAILURE(MakeFile());
  Request request = WriteAt(0, 4096);
  request.fd = 1 << 20;
  EXPECT_EQ(Run(request).error, EBADF);
}

TEST_P(QueueTest, ReportsAFullFileSystem) {
  const std::string mount_point = scratch_.path() + "/full";
  ASSERT_EQ(mkdir(mount_point.c_str(), 0700), 0);
  if (mount("none", mount_point.c_str(), "tmpfs", 0, "size=1m") != 0) {
    const int error = errno;
    rmdir(mount_point.c_str());
    GTEST_SKIP() << "mounting a tmpfs: " << strerror(error);
  }
  const std::string path = mount_point + "/data";
  DirectOpen file;
  EXPECT_EQ(OpenDirect(AT_FDCWD, path.c_str(), O_CREAT | O_RDWR, 0600, true, &file), 0);
  const bool opened = OpenQueue(Options());
  if (opened) {
    Request request = WriteAt(0, 4u << 20);
    request.fd = file.fd;
    const Completion end = Run(request);
    EXPECT_EQ(end.error, ENOSPC);
    EXPECT_LE(end.bytes, 1u << 20);
  }
  queue_->Close();
  sys::CloseOwned(file.fd);
  umount2(mount_point.c_str(), MNT_DETACH);
  rmdir(mount_point.c_str());
  if (!opened) GTEST_SKIP() << "not on this machine: " << queue_->reason();
}

TEST_P(QueueTest, ReportsAFileSizeLimit) {
  // A limit on a block boundary, and, for buffered files, in the middle of a block.
  for (const bool direct : {true, false}) {
    const uint64_t limit = (1u << 20) + (direct ? 0 : 100);
    const std::string path = scratch_.File(direct ? "direct" : "buffered");
    const int status = InChild([&] {
      // The caller must ignore the limit's signal; worker and threads do.
      signal(SIGXFSZ, SIG_IGN);
      const rlimit bound = {limit, limit};
      if (setrlimit(RLIMIT_FSIZE, &bound) != 0) return 1;
      DirectOpen file;
      if (OpenDirect(AT_FDCWD, path.c_str(), O_CREAT | O_RDWR, 0600, direct, &file) != 0) return 2;
      if (queue_->Open(Options()) != 0) return 77;
      Request request = WriteAt(0, 2u << 20);
      request.fd = file.fd;
      if (queue_->Submit(request) != 0) return 3;
      Completion end;
      if (queue_->Wait(&end, 1, 60'000, nullptr) != 1) return 4;
      queue_->Close();
      if (end.error != EFBIG) return 5;
      return end.bytes == limit ? 0 : 6;
    });
    if (status == 77) GTEST_SKIP() << "this rung does not work here";
    EXPECT_EQ(status, 0) << (direct ? "direct" : "buffered");
  }
}

// --- Handing requests to the ring ----------------------------------------------------------------

std::atomic<int> submit_calls{0};

int RefusingSubmit(io_uring* ring) {
  ++submit_calls;
  if (refusals_left-- > 0) return -refusal.load();
  return sys::kKernel.uring_submit(ring);
}

TEST_P(RingTest, SubmitsRefusedRequestsAgain) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  ASSERT_NO_FATAL_FAILURE(MakeFile());
  Planted planted(queue_.get());
  planted->uring_submit = RefusingSubmit;
  for (const int error : {EINTR, EAGAIN, EBUSY}) {
    for (const int times : {1, 5, 100}) {  // 100: more than Submit's own attempts
      refusal = error;
      refusals_left = times;
      region_.FillRandom(static_cast<uint64_t>(error * 1000 + times));
      const Completion end = Run(WriteAt(0, 1u << 20));
      EXPECT_EQ(end.error, 0);
      EXPECT_EQ(end.bytes, 1u << 20);
      EXPECT_LT(refusals_left, 0);
      EXPECT_TRUE(FileHolds(0, 1u << 20));
    }
  }
}

TEST_P(RingTest, WaitKeepsItsDeadlineWhileSubmissionIsRefused) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  ASSERT_NO_FATAL_FAILURE(MakeFile());
  Planted planted(queue_.get());
  planted->uring_submit = RefusingSubmit;
  refusal = EBUSY;
  refusals_left = 1'000'000'000;
  ASSERT_EQ(queue_->Submit(WriteAt(0, 4096)), 0);
  Completion one;
  EXPECT_EQ(queue_->Wait(&one, 1, 30, nullptr), 0);
  char text[256];
  queue_->Describe(text, sizeof text);
  EXPECT_NE(strstr(text, "1 not taken by the kernel"), nullptr) << text;
  EXPECT_EQ(queue_->in_flight(), 1u);
  // The kernel has no request, so Close need not wait.
  planted->uring_wait = [](io_uring*, io_uring_cqe**, int64_t) {
    ADD_FAILURE() << "waited";
    return -ETIME;
  };
  queue_->Close();
  EXPECT_EQ(Contents(path_).size(), 0u);
}

TEST_P(RingTest, WatchesNeverTakeTheEntriesOfTransfers) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  ASSERT_NO_FATAL_FAILURE(MakeFile());
  const int bell = eventfd(0, EFD_CLOEXEC);
  Planted planted(queue_.get());
  planted->uring_submit = RefusingSubmit;
  refusal = EAGAIN;
  refusals_left = 1'000'000'000;
  // Many changes that the kernel refuses: the entries for watches run out.
  int refused = 0;
  Completion one;
  for (uint32_t i = 0; i < 50; ++i) {
    if (queue_->Watch(i % kWatchesMax, bell) == EAGAIN) ++refused;
    EXPECT_EQ(queue_->Wait(&one, 1, 0, nullptr), 0);
  }
  EXPECT_GT(refused, 0);
  for (uint64_t i = 0; i < 8; ++i) ASSERT_EQ(queue_->Submit(WriteAt(i * 4096, 4096)), 0);
  refusals_left = 0;
  EXPECT_EQ(Drain().size(), 8u);
  EXPECT_TRUE(FileHolds(0, 8 * 4096));
  queue_->Close();
  close(bell);
}

TEST_P(RingTest, SleepThatIsInterruptedGoesOn) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  ASSERT_NO_FATAL_FAILURE(MakeFile());
  Planted planted(queue_.get());
  planted->uring_wait = [](io_uring* ring, io_uring_cqe** out, int64_t timeout_ns) {
    if (refusals_left-- > 0) return -refusal.load();
    return sys::kKernel.uring_wait(ring, out, timeout_ns);
  };
  for (const int error : {EINTR, EAGAIN, EBUSY}) {
    refusal = error;
    refusals_left = 10;
    EXPECT_EQ(Run(WriteAt(0, 1u << 20)).bytes, 1u << 20);
  }
}

TEST_P(RingTest, BrokenRingIsReportedAndStaysBroken) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  ASSERT_NO_FATAL_FAILURE(MakeFile());
  Planted planted(queue_.get());
  planted->uring_submit = RefusingSubmit;
  refusal = EFAULT;
  refusals_left = 1;
  EXPECT_EQ(queue_->Submit(WriteAt(0, 4096)), EFAULT);
  EXPECT_EQ(queue_->in_flight(), 0u);
  EXPECT_FALSE(queue_->CanSubmit());
  EXPECT_EQ(queue_->Submit(WriteAt(0, 4096)), EFAULT);
  Completion one;
  EXPECT_EQ(queue_->Wait(&one, 1, 60'000, nullptr), -EFAULT);
  char text[256];
  queue_->Describe(text, sizeof text);
  EXPECT_NE(strstr(text, "broken by EFAULT"), nullptr) << text;
  queue_->Close();
  EXPECT_EQ(Contents(path_).size(), 0u);
}

TEST_P(RingTest, BrokenSleepIsReported) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  Planted planted(queue_.get());
  planted->uring_wait = [](io_uring*, io_uring_cqe**, int64_t) { return -EBADF; };
  Completion one;
  EXPECT_EQ(queue_->Wait(&one, 1, 60'000, nullptr), -EBADF);
}

// --- Closing -------------------------------------------------------------------------------------

std::atomic<uint64_t> clock_ahead_s{0};
int RacingClock(clockid_t clock, timespec* out) {
  const int result = clock_gettime(clock, out);
  out->tv_sec += static_cast<time_t>(clock_ahead_s++);
  return result;
}

TEST_P(RingTest, CloseGivesUpOnAStuckTransferAfterItsBound) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  int pipe_fds[2];
  ASSERT_EQ(pipe2(pipe_fds, O_CLOEXEC), 0);
  // A read without end.
  Request request = {
      .opcode = Opcode::kRead, .fd = pipe_fds[0], .buffer = region_.data(), .bytes = 4096};
  ASSERT_EQ(queue_->Submit(request), 0);
  Completion one;
  ASSERT_EQ(queue_->Wait(&one, 1, 1, nullptr), 0);
  Planted planted(queue_.get());
  planted->clock_gettime = RacingClock;
  planted->uring_wait = [](io_uring*, io_uring_cqe**, int64_t) { return -ETIME; };
  queue_->Close();
  EXPECT_EQ(queue_->in_flight(), 0u);
  EXPECT_GE(clock_ahead_s, 10u);
  close(pipe_fds[0]);
  close(pipe_fds[1]);
}

uint64_t PinnedKiB() {
  uint64_t pinned = 0;
  const std::string status = Contents("/proc/self/status");
  const size_t at = status.find("VmPin:");
  if (at != std::string::npos) pinned = std::strtoull(status.c_str() + at + 6, nullptr, 10);
  return pinned;
}

TEST_P(RingTest, CloseDropsThePinsEvenIfAForkedChildHoldsTheRing) {
  if (GetParam().rung != EngineRung::kUringFixed) GTEST_SKIP() << "pins nothing";
  HOLDFAST_OPEN_OR_SKIP(Options());
  ASSERT_GE(PinnedKiB(), kRegionBytes / 1024);
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  queue_->Close();
  // The ring of an earlier test may still be closing.
  for (int tries = 0; tries < 1000 && PinnedKiB() != 0; ++tries) usleep(10'000);
  EXPECT_EQ(PinnedKiB(), 0u);
  holdfast::testing::SendSignal(child, SIGKILL);
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
}

// The kernel accepts at most 1 GiB per registered buffer; a transfer across two buffers must work.
TEST_P(RingTest, MovesDataAcrossTheBoundaryOfRegisteredBuffers) {
  constexpr size_t kGiB = 1u << 30;
  constexpr size_t kPiece = 64u << 20;
  constexpr size_t kBytes = kGiB + kPiece;
  // The same 64 MiB repeatedly, so that the test needs only 64 MiB.
  const int memory = memfd_create("pieces", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(memory, kPiece), 0);
  void* reserved = mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(reserved, MAP_FAILED);
  char* const base = static_cast<char*>(reserved);
  for (size_t at = 0; at < kBytes; at += kPiece) {
    ASSERT_NE(mmap(base + at, kPiece, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory, 0),
              MAP_FAILED);
  }
  close(memory);
  QueueOptions options = Options();
  options.region = base;
  options.region_bytes = kBytes;
  if (!OpenQueue(options)) {
    munmap(base, kBytes);
    GTEST_SKIP() << "not on this machine: " << queue_->reason();
  }
  ASSERT_NO_FATAL_FAILURE(MakeFile());
  char* const across = base + kGiB - (1u << 20);
  for (size_t i = 0; i < 2u << 20; i += 8) memcpy(across + i, &i, sizeof i);
  Request request = WriteAt(0, 2u << 20);
  request.buffer = across;
  EXPECT_EQ(Run(request).bytes, 2u << 20);
  const std::string contents = Contents(path_);
  ASSERT_EQ(contents.size(), 2u << 20);
  EXPECT_EQ(memcmp(contents.data(), across, 2u << 20), 0);
  queue_->Close();
  munmap(base, kBytes);
}

}  // namespace
}  // namespace holdfast::io
