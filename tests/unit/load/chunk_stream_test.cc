// The stream that load and verify read through: on every rung, with every kind of trouble.
#include "runtime/load/chunk_stream.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <map>
#include <mutex>
#include <set>

#include "io_uring/queue.h"
#include "runtime/directory/entries.h"
#include "runtime/sys/system.h"
#include "tests/testing/checkpoint_files.h"
#include "tests/testing/random_bytes.h"
#include "tests/testing/settings.h"
#include "tests/testing/training_state.h"

namespace holdfast::load {
namespace {

using ::testing::HasSubstr;
using testing::RandomBytes;
using testing::ScratchDirectory;
using testing::WriteFileBytes;

size_t OpenFds() {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    (void)entry;
    ++count;
  }
  return count;
}

size_t Threads() {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    (void)entry;
    ++count;
  }
  return count;
}

/// What the sink saw, by file and offset.
class Seen {
 public:
  StreamVerdict operator()(const StreamBlock& block) {
    std::lock_guard<std::mutex> lock(mutex_);
    blocks.emplace(std::make_pair(block.range.file, block.range.offset), block);
    if (block.error == 0) {
      bytes[{block.range.file, block.range.offset}] = std::string(block.data, block.bytes_read);
    }
    threads.insert(gettid());
    return StreamVerdict::kContinue;
  }
  std::map<std::pair<uint32_t, uint64_t>, StreamBlock> blocks;
  std::map<std::pair<uint32_t, uint64_t>, std::string> bytes;
  std::set<pid_t> threads;

 private:
  std::mutex mutex_;
};

class ChunkStreamBase : public ::testing::Test {
 protected:
  void SetUp() override {
    auto fd = directory::OpenDirectory(scratch_.path());
    ASSERT_TRUE(fd.ok()) << fd.status();
    directory_ = *std::move(fd);
  }
  void TearDown() override { sys::g_system = sys::kKernel; }

  std::string Path(const std::string& name) const { return scratch_.path() + "/" + name; }
  void Add(const std::string& name, const std::string& content) {
    WriteFileBytes(Path(name), content);
    AddName(name);
  }
  void AddName(const std::string& name) {
    files_.push_back({.directory = directory_.get(), .name = name});
  }
  absl::StatusOr<StreamReport> Stream(uint32_t slots, const StreamSink& sink) {
    auto buffer = StreamBuffer::Create(slots);
    if (!buffer.ok()) return buffer.status();
    auto report = StreamChunks(files_, ranges_, options_, &*buffer, sink);
    abandoned_ = buffer->abandoned();
    return report;
  }

  ScratchDirectory scratch_;
  base::UniqueFd directory_;
  std::vector<StreamFile> files_;
  std::vector<StreamRange> ranges_;
  StreamOptions options_;
  bool abandoned_ = false;
};

class ChunkStream : public ChunkStreamBase, public ::testing::WithParamInterface<EngineRung> {
 protected:
  void SetUp() override {
    ChunkStreamBase::SetUp();
    options_.engine = GetParam();
    auto queue = std::make_unique<io::Queue>();
    if (queue->Open({.rung = GetParam(), .depth = 1}) != 0 &&
        GetParam() != EngineRung::kUringFixed) {
      GTEST_SKIP() << queue->reason();
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Rungs, ChunkStream,
                         ::testing::Values(EngineRung::kAuto, EngineRung::kUring,
                                           EngineRung::kPwrite),
                         testing::EngineName);

TEST_P(ChunkStream, DeliversEveryByteOfEveryFileOnce) {
  const std::vector<std::string> contents = {RandomBytes(3 * kChunkBytes + 12345, 1),
                                             RandomBytes(1, 2), RandomBytes(kChunkBytes, 3),
                                             RandomBytes(4096, 4)};
  for (uint32_t i = 0; i < contents.size(); ++i) {
    Add("f" + std::to_string(i), contents[i]);
    AppendRanges(i, 0, contents[i].size(), 0, &ranges_);
  }
  for (uint32_t threads : {1u, 3u}) {
    options_.threads = threads;
    Seen seen;
    const size_t fds = OpenFds();
    const auto report = Stream(2, std::ref(seen));
    ASSERT_TRUE(report.ok()) << report.status();
    ASSERT_EQ(seen.bytes.size(), ranges_.size());
    for (const auto& [place, bytes] : seen.bytes) {
      EXPECT_EQ(bytes, contents[place.first].substr(place.second, kChunkBytes));
    }
    EXPECT_GE(report->bytes_read, 4 * uint64_t{kChunkBytes} + 12345 + 1 + 4096);
    EXPECT_EQ(OpenFds(), fds) << "a file or a ring stayed open";
  }
}

TEST_P(ChunkStream, ReadsRangesThatBeginAndEndAnywhere) {
  const std::string content = RandomBytes(2 * kChunkBytes + 777, 5);
  Add("f", content);
  const std::vector<std::pair<uint64_t, uint64_t>> places = {
      {0, 1},
      {1, 2},
      {4095, 4098},
      {5000, kChunkBytes},
      {kChunkBytes, kChunkBytes + 1},
      {2 * kChunkBytes, 2 * kChunkBytes + 777}};
  for (const auto& [begin, end] : places) AppendRanges(0, begin, end, 0, &ranges_);
  Seen seen;
  const auto report = Stream(8, std::ref(seen));
  ASSERT_TRUE(report.ok()) << report.status();
  for (const auto& [begin, end] : places) {
    EXPECT_EQ((seen.bytes[{0, begin}]), content.substr(begin, end - begin)) << begin;
  }
}

TEST_P(ChunkStream, TellsHowMuchIsThereWhereAFileEndsEarly) {
  Add("f", RandomBytes(kChunkBytes + 100, 6));
  AppendRanges(0, 0, 3 * kChunkBytes, 0, &ranges_);
  Seen seen;
  ASSERT_TRUE(Stream(4, std::ref(seen)).ok());
  EXPECT_EQ((seen.blocks[{0, 0}].bytes_read), kChunkBytes);
  EXPECT_EQ((seen.blocks[{0, kChunkBytes}].bytes_read), 100u);
  EXPECT_EQ((seen.blocks[{0, 2 * kChunkBytes}].bytes_read), 0u);
  for (const auto& [place, block] : seen.blocks) EXPECT_EQ(block.error, 0);
}

TEST_P(ChunkStream, ReportsAFileThatCannotBeOpenedOnceAndGoesOn) {
  AddName("missing");
  Add("there", RandomBytes(10, 7));
  AppendRanges(0, 0, 5 * kChunkBytes, 0, &ranges_);
  AppendRanges(1, 0, 10, 0, &ranges_);
  Seen seen;
  ASSERT_TRUE(Stream(2, std::ref(seen)).ok());
  ASSERT_EQ(seen.blocks.size(), 2u);
  EXPECT_EQ((seen.blocks[{0, 0}].error), ENOENT);
  EXPECT_TRUE((seen.blocks[{0, 0}].failed_to_open));
  EXPECT_EQ((seen.bytes[{1, 0}]), RandomBytes(10, 7));
}

TEST_P(ChunkStream, ReportsAnErrorOfReading) {
  ASSERT_TRUE(std::filesystem::create_directory(Path("d")));
  AddName("d");
  AppendRanges(0, 0, 100, 0, &ranges_);
  Seen seen;
  ASSERT_TRUE(Stream(2, std::ref(seen)).ok());
  EXPECT_EQ((seen.blocks[{0, 0}].error), EISDIR);
}

TEST_P(ChunkStream, RefusesASymlinkUnlessAskedToFollow) {
  WriteFileBytes(Path("real"), "abc");
  std::filesystem::create_symlink("real", Path("link"));
  AddName("link");
  AppendRanges(0, 0, 3, 0, &ranges_);
  Seen refused;
  ASSERT_TRUE(Stream(2, std::ref(refused)).ok());
  EXPECT_EQ((refused.blocks[{0, 0}].error), ELOOP);
  files_[0].follow_symlink = true;
  Seen followed;
  ASSERT_TRUE(Stream(2, std::ref(followed)).ok());
  EXPECT_EQ((followed.bytes[{0, 0}]), "abc");
}

TEST_P(ChunkStream, StopsWhenTheSinkSaysSo) {
  Add("f", RandomBytes(20 * kChunkBytes, 8));
  AppendRanges(0, 0, 20 * kChunkBytes, 0, &ranges_);
  std::atomic<int> calls{0};
  const size_t fds = OpenFds();
  const auto report = Stream(2, [&](const StreamBlock&) {
    calls.fetch_add(1);
    return StreamVerdict::kStop;
  });
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_LE(calls.load(), 4);
  EXPECT_EQ(OpenFds(), fds);
  EXPECT_FALSE(abandoned_);
}

TEST_P(ChunkStream, KeepsTheBufferWhenTheSinkSaysSo) {
  Add("f", RandomBytes(10, 9));
  AppendRanges(0, 0, 10, 0, &ranges_);
  ASSERT_TRUE(Stream(1, [](const StreamBlock&) { return StreamVerdict::kKeepBuffer; }).ok());
  EXPECT_TRUE(abandoned_);
}

TEST_P(ChunkStream, ReadsBufferedWhenAsked) {
  Add("f", RandomBytes(5000, 10));
  AppendRanges(0, 0, 5000, 0, &ranges_);
  options_.direct_io = false;
  Seen seen;
  const auto report = Stream(2, std::ref(seen));
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(report->direct_io, DirectIo::kNo);
  EXPECT_EQ((seen.bytes[{0, 0}]), RandomBytes(5000, 10));
}

TEST_P(ChunkStream, CallsTheSinkInTheCallingThreadWhenThatIsTheOnlyOne) {
  Add("f", RandomBytes(3 * kChunkBytes, 11));
  AppendRanges(0, 0, 3 * kChunkBytes, 0, &ranges_);
  options_.threads = 1;
  Seen seen;
  ASSERT_TRUE(Stream(2, std::ref(seen)).ok());
  EXPECT_THAT(seen.threads, ::testing::ElementsAre(gettid()));
}

TEST_P(ChunkStream, ReportsProgressUpToTheEnd) {
  Add("f", RandomBytes(3 * kChunkBytes + 5, 12));
  AppendRanges(0, 0, 3 * kChunkBytes + 5, 0, &ranges_);
  uint64_t last = 0;
  options_.progress = [&last](uint64_t done) {
    EXPECT_GE(done, last);
    last = done;
  };
  ASSERT_TRUE(Stream(2, [](const StreamBlock&) { return StreamVerdict::kContinue; }).ok());
  EXPECT_EQ(last, 3 * kChunkBytes + 5);
}

class ChunkStreamTrouble : public ChunkStreamBase {};

TEST_F(ChunkStreamTrouble, ReadsInTheCallerWhenNoThreadCanBeStarted) {
  Add("f", RandomBytes(3 * kChunkBytes, 13));
  AppendRanges(0, 0, 3 * kChunkBytes, 0, &ranges_);
  options_.threads = 4;
  options_.engine = EngineRung::kUring;
  auto queue = std::make_unique<io::Queue>();
  if (queue->Open({.rung = EngineRung::kUring, .depth = 1}) != 0) GTEST_SKIP() << queue->reason();
  sys::g_system.thread_create = [](pthread_t*, const pthread_attr_t*, void* (*)(void*), void*) {
    return EAGAIN;
  };
  Seen seen;
  ASSERT_TRUE(Stream(2, std::ref(seen)).ok());
  EXPECT_EQ(seen.bytes.size(), 3u);
  EXPECT_THAT(seen.threads, ::testing::ElementsAre(gettid()));
}

TEST_F(ChunkStreamTrouble, ReportsAnInjectedErrorOfOneRange) {
  Add("f", RandomBytes(4 * kChunkBytes, 14));
  AppendRanges(0, 0, 4 * kChunkBytes, 0, &ranges_);
  options_.engine = EngineRung::kPwrite;
  sys::g_system.pread = [](int fd, void* buffer, size_t bytes, off_t offset) -> ssize_t {
    if (offset == off_t{2} * kChunkBytes) {
      errno = EIO;
      return -1;
    }
    return sys::kKernel.pread(fd, buffer, bytes, offset);
  };
  Seen seen;
  ASSERT_TRUE(Stream(3, std::ref(seen)).ok());
  ASSERT_EQ(seen.blocks.size(), 4u);
  for (const auto& [place, block] : seen.blocks) {
    EXPECT_EQ(block.error, place.second == 2 * kChunkBytes ? EIO : 0) << place.second;
  }
}

TEST_F(ChunkStreamTrouble, ReadsOnWithoutDirectIoWhereReadsOfItAreRefused) {
  const std::string content = RandomBytes(3 * kChunkBytes, 15);
  Add("f", content);
  AppendRanges(0, 0, content.size(), 0, &ranges_);
  options_.engine = EngineRung::kPwrite;
  sys::g_system.pread = [](int fd, void* buffer, size_t bytes, off_t offset) -> ssize_t {
    if ((fcntl(fd, F_GETFL) & O_DIRECT) != 0) {
      errno = EINVAL;
      return -1;
    }
    return sys::kKernel.pread(fd, buffer, bytes, offset);
  };
  Seen seen;
  const auto report = Stream(2, std::ref(seen));
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->direct_io, DirectIo::kNo);
  for (const auto& [place, bytes] : seen.bytes) {
    EXPECT_EQ(bytes, content.substr(place.second, kChunkBytes));
  }
  EXPECT_EQ(seen.bytes.size(), 3u);
}

TEST_F(ChunkStreamTrouble, SaysWhyNoEngineCouldBeOpened) {
  Add("f", "x");
  AppendRanges(0, 0, 1, 0, &ranges_);
  options_.engine = EngineRung::kUring;
  sys::g_system.uring_queue_init_params = [](unsigned, struct io_uring*, struct io_uring_params*) {
    return -EPERM;
  };
  const auto report = Stream(2, [](const StreamBlock&) { return StreamVerdict::kContinue; });
  EXPECT_EQ(report.status().code(), absl::StatusCode::kPermissionDenied) << report.status();
}

// A read without an end: the call ends by the deadline, and what the read may still write
// to stays mapped. In a process of its own, because the thread that reads is never seen again.
TEST_F(ChunkStreamTrouble, GivesUpOnAReadThatNeverEndsAndKeepsItsMemory) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  Add("f", RandomBytes(10, 16));
  AppendRanges(0, 0, 10, 0, &ranges_);
  const auto stall = [this] {
    options_.engine = EngineRung::kPwrite;
    options_.time_stalled_max = absl::Milliseconds(1);
    sys::g_system.pread = [](int, void*, size_t, off_t) -> ssize_t {
      while (true) pause();
    };
    const size_t threads = Threads();
    const auto report = Stream(2, [](const StreamBlock&) { return StreamVerdict::kContinue; });
    std::fprintf(stderr, "%s; %s; %s\n", report.status().ToString().c_str(),
                 abandoned_ ? "kept" : "unmapped", Threads() > threads ? "reading" : "idle");
    _exit(3);
  };
  EXPECT_EXIT(stall(), ::testing::ExitedWithCode(3),
              "DEADLINE_EXCEEDED.*nothing arrived.*kept; reading");
}

TEST(StreamBufferTest, IsUnmappedAtItsEndAndNotInheritedByForks) {
  static std::atomic<size_t> mapped{0};
  static std::atomic<int> dontfork{0};
  sys::g_system.mmap = [](void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    mapped += bytes;
    return sys::kKernel.mmap(at, bytes, protection, flags, fd, offset);
  };
  sys::g_system.munmap = [](void* at, size_t bytes) {
    mapped -= bytes;
    return sys::kKernel.munmap(at, bytes);
  };
  sys::g_system.madvise = [](void* at, size_t bytes, int advice) {
    if (advice == MADV_DONTFORK) ++dontfork;
    return sys::kKernel.madvise(at, bytes, advice);
  };
  {
    auto buffer = StreamBuffer::Create(3);
    ASSERT_TRUE(buffer.ok());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->slot(0)) % (2u << 20), 0u);
    EXPECT_EQ(buffer->slot(2) - buffer->slot(0), 2 * ptrdiff_t{kChunkBytes});
    EXPECT_GT(mapped.load(), 3u * kChunkBytes);
    EXPECT_EQ(dontfork.load(), 1);
  }
  EXPECT_EQ(mapped.load(), 0u);
  sys::g_system = sys::kKernel;
}

TEST(StreamBufferTest, SaysWhatFailed) {
  sys::g_system.mmap = [](void*, size_t, int, int, int, off_t) -> void* {
    errno = ENOMEM;
    return MAP_FAILED;
  };
  EXPECT_EQ(StreamBuffer::Create(2).status().code(), absl::StatusCode::kResourceExhausted);
  sys::g_system = sys::kKernel;
  sys::g_system.madvise = [](void*, size_t, int) {
    errno = EINVAL;
    return -1;
  };
  EXPECT_THAT(std::string(StreamBuffer::Create(2).status().message()), HasSubstr("DONTFORK"));
  sys::g_system = sys::kKernel;
}

TEST(SlotsForTest, StaysWithinTheBufferAndTheNeed) {
  EXPECT_EQ(SlotsFor(32u << 20, 100), 8u);
  EXPECT_EQ(SlotsFor(32u << 20, 3), 3u);
  EXPECT_EQ(SlotsFor(8u << 20, 100), 2u);
  EXPECT_EQ(SlotsFor(uint64_t{1} << 40, 100'000), io::kDepthMax * 4);
}

TEST(CheckReadOptionsTest, NamesTheOptionToChange) {
  EXPECT_TRUE(CheckReadOptions(8u << 20, 0).ok());
  EXPECT_THAT(std::string(CheckReadOptions((8u << 20) - 1, 0).message()),
              HasSubstr("buffer_bytes"));
  EXPECT_THAT(std::string(CheckReadOptions(8u << 20, 1000).message()), HasSubstr("threads"));
}

}  // namespace
}  // namespace holdfast::load
