// The promises of every rung of the queue: data, depth, watches, closing, forks.
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <thread>

#include "tests/testing/child_process.h"
#include "tests/unit/io_uring/queue_fixture.h"

namespace holdfast::io {
namespace {

INSTANTIATE_TEST_SUITE_P(Rungs, QueueTest, ::testing::ValuesIn(kRungs), RungName);

// Cuts the region in random aligned pieces and shuffles them.
std::vector<Request> RandomPieces(const Region& region, int fd, Opcode opcode, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Request> pieces;
  for (uint64_t offset = 0; offset < region.bytes();) {
    const uint64_t left = (region.bytes() - offset) / kIoAlignment;
    const uint64_t blocks = std::min<uint64_t>(left, 1 + random() % 256);
    pieces.push_back({.opcode = opcode,
                      .fd = fd,
                      .buffer = region.data() + offset,
                      .offset = offset,
                      .bytes = static_cast<uint32_t>(blocks * kIoAlignment),
                      .tag = offset});
    offset += blocks * kIoAlignment;
  }
  std::shuffle(pieces.begin(), pieces.end(), random);
  return pieces;
}

TEST_P(QueueTest, MovesRandomPiecesThereAndBack) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  QueueOptions options = Options();
  options.depth = 1 + seed % 16;
  HOLDFAST_OPEN_OR_SKIP(options);
  ASSERT_NO_FATAL_FAILURE(MakeFile());
  Region back(kRegionBytes);
  for (const bool writing : {true, false}) {
    const auto pieces =
        RandomPieces(writing ? region_ : back, fd_, writing ? Opcode::kWrite : Opcode::kRead, seed);
    std::vector<Completion> all;
    for (const Request& piece : pieces) {
      while (!queue_->CanSubmit()) {
        Completion one;
        ASSERT_EQ(queue_->Wait(&one, 1, 60'000, nullptr), 1);
        all.push_back(one);
      }
      ASSERT_EQ(queue_->Submit(piece), 0);
    }
    for (const Completion& end : Drain()) all.push_back(end);
    ASSERT_EQ(all.size(), pieces.size());
    uint64_t bytes = 0;
    for (const Completion& end : all) {
      EXPECT_EQ(end.error, 0);
      bytes += end.bytes;
    }
    EXPECT_EQ(bytes, kRegionBytes);
  }
  EXPECT_TRUE(FileHolds(0, kRegionBytes));
  EXPECT_EQ(memcmp(back.data(), region_.data(), kRegionBytes), 0);
}

TEST_P(QueueTest, TakesNoMoreThanItsDepthUntilCompletionsAreCollected) {
  QueueOptions options = Options();
  options.depth = 3;
  HOLDFAST_OPEN_OR_SKIP(options);
  ASSERT_NO_FATAL_FAILURE(MakeFile());
  for (uint64_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(queue_->CanSubmit());
    ASSERT_EQ(queue_->Submit(WriteAt(i * kIoAlignment, kIoAlignment, i)), 0);
  }
  EXPECT_FALSE(queue_->CanSubmit());
  EXPECT_EQ(queue_->in_flight(), 3u);
  EXPECT_EQ(queue_->Submit(WriteAt(3 * kIoAlignment, kIoAlignment)), EAGAIN);
  Completion one;
  ASSERT_EQ(queue_->Wait(&one, 1, 60'000, nullptr), 1);
  EXPECT_TRUE(queue_->CanSubmit());
  EXPECT_EQ(queue_->in_flight(), 2u);
  EXPECT_EQ(Drain().size(), 2u);
}

TEST_P(QueueTest, ReturnsEachTagOnce) {
  QueueOptions options = Options();
  options.depth = kDepthMax;
  HOLDFAST_OPEN_OR_SKIP(options);
  ASSERT_NO_FATAL_FAILURE(MakeFile());
  for (uint64_t i = 0; i < kDepthMax; ++i) {
    ASSERT_EQ(queue_->Submit(WriteAt(i * kIoAlignment, kIoAlignment, ~i)), 0);
  }
  std::vector<uint64_t> tags;
  for (const Completion& end : Drain()) tags.push_back(~end.tag);
  std::sort(tags.begin(), tags.end());
  ASSERT_EQ(tags.size(), kDepthMax);
  for (uint64_t i = 0; i < kDepthMax; ++i) EXPECT_EQ(tags[i], i);
}

TEST_P(QueueTest, ReadPastTheEndIsShortWithoutAnError) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  ASSERT_NO_FATAL_FAILURE(MakeFile());
  ASSERT_EQ(Run(WriteAt(0, 12288)).error, 0);
  ASSERT_EQ(ftruncate(fd_, 10'000), 0);  // an unaligned tail, as in files of a save
  Region back(16384);
  Request read = {.opcode = Opcode::kRead, .fd = fd_, .buffer = back.data(), .bytes = 16384};
  Completion end = Run(read);
  EXPECT_EQ(end.error, 0);
  EXPECT_EQ(end.bytes, 10'000u);
  EXPECT_EQ(memcmp(back.data(), region_.data(), 10'000), 0);
  read.offset = 16384;
  read.bytes = 4096;
  end = Run(read);
  EXPECT_EQ(end.error, 0);
  EXPECT_EQ(end.bytes, 0u);
}

TEST_P(QueueTest, OverwritesAFileWithAnUnalignedTail) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  ASSERT_NO_FATAL_FAILURE(MakeFile());
  ASSERT_EQ(ftruncate(fd_, 9'001), 0);
  const Completion end = Run(WriteAt(0, 12288));
  EXPECT_EQ(end.error, 0);
  EXPECT_EQ(end.bytes, 12288u);
  EXPECT_TRUE(FileHolds(0, 12288));
}

TEST_P(QueueTest, TakesMemoryOutsideTheRegion) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  ASSERT_NO_FATAL_FAILURE(MakeFile());
  Region other(8192);
  other.FillRandom(7);
  Request request = WriteAt(0, 8192);
  request.buffer = other.data();
  EXPECT_EQ(Run(request).error, 0);
  EXPECT_EQ(Contents(path_), std::string(other.data(), 8192));
}

TEST_P(QueueTest, RefusesAnInvalidRequest) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  ASSERT_NO_FATAL_FAILURE(MakeFile());
  Request request = WriteAt(0, 4096);
  request.bytes = 0;
  EXPECT_EQ(queue_->Submit(request), EINVAL);
  request = WriteAt(0, 4096);
  request.fd = -1;
  EXPECT_EQ(queue_->Submit(request), EBADF);
  request = WriteAt(0, 4096);
  request.opcode = static_cast<Opcode>(9);
  EXPECT_EQ(queue_->Submit(request), EINVAL);
  Completion one;
  EXPECT_EQ(queue_->Wait(&one, 0, 0, nullptr), -EINVAL);
  EXPECT_EQ(queue_->Watch(kWatchesMax, -1), EINVAL);
  EXPECT_EQ(queue_->Watch(0, 1 << 20), EBADF);
  EXPECT_EQ(queue_->in_flight(), 0u);
}

TEST_P(QueueTest, WaitEndsAtItsDeadline) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  Completion one;
  uint32_t wakeups = 99;
  const uint64_t before = sys::NowNs();
  EXPECT_EQ(queue_->Wait(&one, 1, 20, &wakeups), 0);
  EXPECT_GE(sys::NowNs() - before, 20'000'000u);
  EXPECT_EQ(wakeups, 0u);
  EXPECT_EQ(queue_->Wait(&one, 1, 0, &wakeups), 0);
}

TEST_P(QueueTest, WaitWithoutABoundRefusesToWaitForNothing) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  Completion one;
  EXPECT_EQ(queue_->Wait(&one, 1, -1, nullptr), -EDEADLK);
}

TEST_P(QueueTest, WatchWakesUntilDrainedAndAgainWhenRefilled) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  const int bell = eventfd(0, EFD_CLOEXEC);
  ASSERT_EQ(queue_->Watch(2, bell), 0);
  Completion one;
  uint32_t wakeups = 0;
  EXPECT_EQ(queue_->Wait(&one, 1, 0, &wakeups), 0);
  EXPECT_EQ(wakeups, 0u);
  for (int round = 0; round < 3; ++round) {
    ASSERT_EQ(eventfd_write(bell, 1), 0);
    for (int look = 0; look < 2; ++look) {
      EXPECT_EQ(queue_->Wait(&one, 1, 60'000, &wakeups), 0);
      EXPECT_EQ(wakeups, 1u << 2);
    }
    eventfd_t drained = 0;
    ASSERT_EQ(eventfd_read(bell, &drained), 0);
    // A bit from before the drain may still be under way; no bit follows.
    queue_->Wait(&one, 1, 0, &wakeups);
    EXPECT_EQ(queue_->Wait(&one, 1, 1, &wakeups), 0);
    EXPECT_EQ(wakeups, 0u);
  }
  ASSERT_EQ(queue_->Watch(2, -1), 0);
  close(bell);
}

TEST_P(QueueTest, WatchWakesASleepingWait) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  const int bell = eventfd(0, EFD_CLOEXEC);
  ASSERT_EQ(queue_->Watch(0, bell), 0);
  std::thread ringer([bell] { eventfd_write(bell, 1); });
  Completion one;
  uint32_t wakeups = 0;
  EXPECT_EQ(queue_->Wait(&one, 1, -1, &wakeups), 0);
  EXPECT_EQ(wakeups, 1u);
  ringer.join();
  queue_->Close();
  close(bell);
}

TEST_P(QueueTest, WatchSeesAProcessEnd) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  const int pidfd = sys::Sys().pidfd_open(child, 0);
  ASSERT_GE(pidfd, 0);
  ASSERT_EQ(queue_->Watch(1, pidfd), 0);
  Completion one;
  uint32_t wakeups = 0;
  EXPECT_EQ(queue_->Wait(&one, 1, 1, &wakeups), 0);
  EXPECT_EQ(wakeups, 0u);
  holdfast::testing::SendSignal(child, SIGKILL);
  EXPECT_EQ(queue_->Wait(&one, 1, -1, &wakeups), 0);
  EXPECT_EQ(wakeups, 1u << 1);
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
  queue_->Close();
  close(pidfd);
}

TEST_P(QueueTest, RemovedAndReplacedWatchesStaySilent) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  const int first = eventfd(0, EFD_CLOEXEC);
  const int second = eventfd(0, EFD_CLOEXEC);
  Completion one;
  uint32_t wakeups = 0;
  ASSERT_EQ(queue_->Watch(0, first), 0);
  EXPECT_EQ(queue_->Wait(&one, 1, 1, &wakeups), 0);  // armed
  ASSERT_EQ(queue_->Watch(0, second), 0);
  ASSERT_EQ(eventfd_write(first, 1), 0);
  EXPECT_EQ(queue_->Wait(&one, 1, 1, &wakeups), 0);
  EXPECT_EQ(wakeups, 0u);
  ASSERT_EQ(eventfd_write(second, 1), 0);
  EXPECT_EQ(queue_->Wait(&one, 1, 60'000, &wakeups), 0);
  EXPECT_EQ(wakeups, 1u);
  ASSERT_EQ(queue_->Watch(0, -1), 0);
  EXPECT_EQ(queue_->Wait(&one, 1, 1, &wakeups), 0);
  EXPECT_EQ(wakeups, 0u);
  // More changes than the ring has entries.
  for (int i = 0; i < 1000; ++i) {
    ASSERT_EQ(queue_->Watch(0, i % 2 == 0 ? first : second), 0);
    queue_->Wait(&one, 1, 0, &wakeups);
    EXPECT_EQ(wakeups & ~1u, 0u);
  }
  queue_->Close();
  close(first);
  close(second);
}

TEST_P(QueueTest, RemovedWatchLetsGoOfItsFile) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  Completion one;
  ASSERT_EQ(queue_->Watch(0, ends[0]), 0);
  EXPECT_EQ(queue_->Wait(&one, 1, 1, nullptr), 0);
  ASSERT_EQ(queue_->Watch(0, -1), 0);
  close(ends[0]);
  // A pipe is broken when no process holds its other end.
  bool broken = false;
  for (int i = 0; i < 1000 && !broken; ++i) {
    EXPECT_EQ(queue_->Wait(&one, 1, 1, nullptr), 0);
    pollfd writer = {.fd = ends[1], .events = POLLOUT};
    broken = poll(&writer, 1, 0) == 1 && (writer.revents & POLLERR) != 0;
  }
  EXPECT_TRUE(broken);
  close(ends[1]);
}

TEST_P(QueueTest, WatchIsSeenWhileCompletionsKeepComing) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  ASSERT_NO_FATAL_FAILURE(MakeFile());
  const int bell = eventfd(1, EFD_CLOEXEC);
  ASSERT_EQ(queue_->Watch(3, bell), 0);
  uint32_t seen = 0;
  for (int i = 0; i < 1000 && seen == 0; ++i) {
    while (queue_->CanSubmit()) ASSERT_EQ(queue_->Submit(WriteAt(0, 4096)), 0);
    Completion one;
    ASSERT_GE(queue_->Wait(&one, 1, 60'000, &seen), 0);
  }
  EXPECT_EQ(seen, 1u << 3);
  queue_->Close();
  close(bell);
}

TEST_P(QueueTest, CloseWaitsForTransfersInFlight) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  ASSERT_NO_FATAL_FAILURE(MakeFile());
  for (uint64_t i = 0; i < 8; ++i) {
    ASSERT_EQ(queue_->Submit(WriteAt(i << 21, 1u << 21)), 0);
  }
  queue_->Close();
  // At once: the bytes read here were written before Close returned.
  EXPECT_TRUE(FileHolds(0, kRegionBytes));
  queue_->Close();
  EXPECT_EQ(queue_->Submit(WriteAt(0, 4096)), EBADF);
  EXPECT_EQ(queue_->in_flight(), 0u);
}

TEST_P(QueueTest, OpensAgainAfterClose) {
  ASSERT_NO_FATAL_FAILURE(MakeFile());
  for (int round = 0; round < 3; ++round) {
    HOLDFAST_OPEN_OR_SKIP(Options());
    EXPECT_EQ(queue_->Open(Options()), EBUSY);
    EXPECT_EQ(Run(WriteAt(0, 4096)).error, 0);
    queue_->Close();
  }
}

TEST_P(QueueTest, DescribesTheOldestTransfer) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  ASSERT_NO_FATAL_FAILURE(MakeFile());
  ASSERT_EQ(queue_->Submit(WriteAt(8192, 4096)), 0);
  char text[256];
  queue_->Describe(text, sizeof text);
  EXPECT_NE(strstr(text, "1 of 8 in flight"), nullptr) << text;
  EXPECT_NE(strstr(text, "@ 8192 + 4096"), nullptr) << text;
  char little[8];
  memset(little, 'x', sizeof little);
  queue_->Describe(little, sizeof little);
  EXPECT_EQ(strlen(little), 7u);
  Drain();
}

TEST_P(QueueTest, IsRefusedInAForkedChildAndLeavesTheParentAlone) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  ASSERT_NO_FATAL_FAILURE(MakeFile());
  ASSERT_EQ(queue_->Submit(WriteAt(0, 4096, 77)), 0);
  const int status = InChild([this] {
    Completion one;
    char text[128];
    if (queue_->CanSubmit()) return 1;
    if (queue_->Submit(WriteAt(4096, 4096)) != EXDEV) return 2;
    if (queue_->Wait(&one, 1, -1, nullptr) != -EXDEV) return 3;
    if (queue_->Watch(0, -1) != EXDEV) return 4;
    if (queue_->in_flight() != 0) return 5;
    if (queue_->Open(Options()) != EXDEV) return 6;
    queue_->Describe(text, sizeof text);
    if (strcmp(text, "opened by another process") != 0) return 7;
    queue_->Close();
    queue_.reset();
    return 0;
  });
  EXPECT_EQ(status, 0);
  const auto all = Drain();
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].tag, 77u);
  EXPECT_EQ(all[0].error, 0);
  EXPECT_EQ(Contents(path_).size(), 4096u);
}

TEST_P(QueueTest, WorksInAForkedChildThatOpensItsOwn) {
  HOLDFAST_OPEN_OR_SKIP(Options());
  ASSERT_NO_FATAL_FAILURE(MakeFile());
  if (GetParam().threads > 0) GTEST_SKIP() << "a forked child starts no threads";
  const int status = InChild([this] {
    auto own = std::make_unique<Queue>();
    if (own->Open(Options()) != 0) return 1;
    DirectOpen file;  // The child's copies of this process's files may be closed (owned_fds.h).
    if (OpenDirect(AT_FDCWD, path_.c_str(), O_RDWR, 0, true, &file) != 0) return 5;
    fd_ = file.fd;
    if (own->Submit(WriteAt(0, 1u << 20)) != 0) return 2;
    Completion one;
    if (own->Wait(&one, 1, 60'000, nullptr) != 1) return 3;
    return one.error == 0 && one.bytes == 1u << 20 ? 0 : 4;
  });
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(FileHolds(0, 1u << 20));
}

}  // namespace
}  // namespace holdfast::io
