// The memory room, read from files of every kind of machine.
#include "runtime/staging/memory_room.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/staging.h"
#include "tests/unit/staging/scoped_system.h"

namespace holdfast::staging {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kMiB = uint64_t{1} << 20;

// The files of the machine; other files do not exist.
std::map<std::string, std::string>* g_files = nullptr;

int OpenFake(int, const char* path, int, mode_t) {
  const auto found = g_files->find(path);
  if (found == g_files->end()) {
    errno = ENOENT;
    return -1;
  }
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return -1;
  const ssize_t written = write(ends[1], found->second.data(), found->second.size());
  close(ends[1]);
  return written == static_cast<ssize_t>(found->second.size()) ? ends[0] : -1;
}

class MemoryRoomTest : public ::testing::Test {
 protected:
  MemoryRoomTest() {
    g_files = &files_;
    system_->openat = OpenFake;
  }

  ScopedSystem system_;
  std::map<std::string, std::string> files_;
};

TEST_F(MemoryRoomTest, KnowsNoLimitWhereNothingCanBeRead) {
  EXPECT_EQ(FindMemoryRoom().bytes, UINT64_MAX);
  EXPECT_TRUE(CheckMemoryRoom(uint64_t{1} << 50).ok());
}

TEST_F(MemoryRoomTest, ReadsTheAvailableMemory) {
  files_["/proc/meminfo"] =
      "MemTotal:       24683836 kB\nMemFree:          123 kB\nMemAvailable:    2097152 kB\n";
  const MemoryRoom room = FindMemoryRoom();
  EXPECT_EQ(room.bytes, 2048 * kMiB);
  EXPECT_THAT(room.limit, HasSubstr("MemAvailable"));
}

TEST_F(MemoryRoomTest, TakesTheTightestGroupOfVersion2) {
  files_["/proc/meminfo"] = "MemAvailable: 16777216 kB\n";
  files_["/proc/self/cgroup"] = "0::/kubepods/pod1/job\n";
  files_["/sys/fs/cgroup/kubepods/pod1/job/memory.max"] = "max\n";
  files_["/sys/fs/cgroup/kubepods/pod1/job/memory.current"] = "1048576\n";
  files_["/sys/fs/cgroup/kubepods/pod1/memory.max"] = "1073741824\n";
  files_["/sys/fs/cgroup/kubepods/pod1/memory.current"] = "629145600\n";
  files_["/sys/fs/cgroup/kubepods/pod1/memory.stat"] =
      "anon 1\nfile 209715200\ninactive_file 104857600\n";
  files_["/sys/fs/cgroup/kubepods/memory.max"] = "8589934592\n";
  files_["/sys/fs/cgroup/kubepods/memory.current"] = "1\n";
  const MemoryRoom room = FindMemoryRoom();
  EXPECT_EQ(room.bytes, (1024 - 600 + 100) * kMiB);
  EXPECT_THAT(room.limit, HasSubstr("/sys/fs/cgroup/kubepods/pod1/memory.max"));
}

TEST_F(MemoryRoomTest, BoundsTheArenaByTheProcesssShareOfAQuarter) {
  files_["/proc/meminfo"] = "MemAvailable: 16777216 kB\n";
  files_["/proc/self/cgroup"] = "0::/job\n";
  files_["/sys/fs/cgroup/job/memory.max"] = "734003200\n";      // 700 MiB
  files_["/sys/fs/cgroup/job/memory.current"] = "314572800\n";  // 300 MiB
  EXPECT_EQ(MemoryAvailable(), 400 * kMiB);
  EXPECT_EQ(DefaultArenaBytes({.state_bytes = 300 * kMiB}), 100 * kMiB);
  EXPECT_EQ(DefaultArenaBytes({.state_bytes = 300 * kMiB, .processes = 2}), 50 * kMiB);
  EXPECT_EQ(DefaultArenaBytes({.state_bytes = 300 * kMiB, .bytes_owned = 100 * kMiB}), 124 * kMiB);
  EXPECT_EQ(DefaultArenaBytes({.state_bytes = 10 * kMiB}), 74 * kMiB);
  EXPECT_EQ(DefaultArenaBytes({.state_bytes = 300 * kMiB, .processes = 64}), 16 * kMiB)
      << "smaller ones are refused";
  files_.clear();
  EXPECT_EQ(DefaultArenaBytes({.state_bytes = 300 * kMiB}), 364 * kMiB);
  EXPECT_EQ(DefaultArenaBytes({.state_bytes = UINT64_MAX}), UINT64_MAX / 4 / (2 * kMiB) * 2 * kMiB);
}

TEST_F(MemoryRoomTest, ReadsVersion1) {
  files_["/proc/self/cgroup"] = "5:devices:/\n4:cpu,memory:/job\n0::/\n";
  files_["/sys/fs/cgroup/memory/job/memory.limit_in_bytes"] = "536870912\n";
  files_["/sys/fs/cgroup/memory/job/memory.usage_in_bytes"] = "268435456\n";
  files_["/sys/fs/cgroup/memory/job/memory.stat"] = "inactive_file 7\ntotal_inactive_file 0\n";
  files_["/sys/fs/cgroup/memory/memory.limit_in_bytes"] = "9223372036854771712\n";
  files_["/sys/fs/cgroup/memory/memory.usage_in_bytes"] = "1\n";
  EXPECT_EQ(FindMemoryRoom().bytes, 256 * kMiB);
}

TEST_F(MemoryRoomTest, FindsAContainersOwnGroupUnderThePathOfTheHost) {
  files_["/proc/self/cgroup"] = "0::/system.slice/docker-1.scope\n";  // not mounted in here
  files_["/sys/fs/cgroup/memory.max"] = "1073741824\n";
  files_["/sys/fs/cgroup/memory.current"] = "0\n";
  EXPECT_EQ(FindMemoryRoom().bytes, 1024 * kMiB);
}

TEST_F(MemoryRoomTest, HasNoneLeftInAGroupOverItsLimit) {
  files_["/proc/self/cgroup"] = "0::/\n";
  files_["/sys/fs/cgroup/memory.max"] = "1000\n";
  files_["/sys/fs/cgroup/memory.current"] = "2000\n";
  EXPECT_EQ(FindMemoryRoom().bytes, 0u);
  EXPECT_EQ(CheckMemoryRoom(1).code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(MemoryRoomTest, SurvivesFilesThatMakeNoSense) {
  files_["/proc/meminfo"] = std::string(60000, ':');
  files_["/proc/self/cgroup"] = "\n:\n::\n::::\nmemory\n0::\n0::relative\n1:memory:\n";
  files_["/sys/fs/cgroup/memory.max"] = "-1";
  files_["/sys/fs/cgroup/memory.current"] = "99999999999999999999999999";
  EXPECT_EQ(FindMemoryRoom().bytes, UINT64_MAX);
}

TEST_F(MemoryRoomTest, NamesTheOptionToChange) {
  files_["/proc/meminfo"] = "MemAvailable: 1048576 kB\n";
  EXPECT_TRUE(CheckMemoryRoom(960 * kMiB).ok());
  const absl::Status status = CheckMemoryRoom(961 * kMiB);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("961 MiB"));
  EXPECT_THAT(status.message(), HasSubstr("only 1024 MiB"));
  EXPECT_THAT(status.message(), HasSubstr("arena_bytes"));
}

ssize_t ReadFails(int, void*, size_t) {
  errno = EIO;
  return -1;
}

TEST_F(MemoryRoomTest, PassesOverFilesThatCannotBeRead) {
  files_["/proc/meminfo"] = "MemAvailable: 1 kB\n";
  system_->read = ReadFails;
  EXPECT_EQ(FindMemoryRoom().bytes, UINT64_MAX);
}

}  // namespace
}  // namespace holdfast::staging
