// Shared by the queue's contract tests: the rungs, a scratch file, staging memory and planted
// system calls.
#ifndef HOLDFAST_TESTS_UNIT_IO_URING_QUEUE_FIXTURE_H_
#define HOLDFAST_TESTS_UNIT_IO_URING_QUEUE_FIXTURE_H_

#include <fcntl.h>
#include <gtest/gtest.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "io_uring/queue.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"

namespace holdfast::io {

/// One way to run the queue; the contract is the same for every way.
struct Rung {
  const char* name;
  EngineRung rung;
  uint32_t threads;
  bool on_ring() const { return rung != EngineRung::kPwrite; }
};
inline void PrintTo(const Rung& rung, std::ostream* out) { *out << rung.name; }

inline const Rung kRungs[] = {
    {"fixed", EngineRung::kUringFixed, 0},
    {"uring", EngineRung::kUring, 0},
    {"threads", EngineRung::kPwrite, 3},
    {"caller", EngineRung::kPwrite, 0},
};

inline std::string RungName(const ::testing::TestParamInfo<Rung>& info) { return info.param.name; }

/// Replaces entries of the table of system calls for one scope. A queue with threads is closed
/// before the entries are restored, because its threads read the table.
class Planted {
 public:
  explicit Planted(Queue* queue = nullptr) : queue_(queue) {}
  ~Planted() {
    if (queue_ != nullptr) queue_->Close();
    sys::g_system = sys::kKernel;
  }
  Planted(const Planted&) = delete;
  Planted& operator=(const Planted&) = delete;
  sys::SystemCalls* operator->() { return &sys::g_system; }

 private:
  Queue* queue_;
};

/// A directory, removed with its files.
class ScratchDirectory {
 public:
  ScratchDirectory() {
    path_ = ::testing::TempDir() + "/holdfast-io-XXXXXX";
    if (mkdtemp(path_.data()) == nullptr) path_.clear();
  }
  ~ScratchDirectory() {
    for (const std::string& file : files_) unlink((path_ + "/" + file).c_str());
    rmdir(path_.c_str());
  }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;

  const std::string& path() const { return path_; }
  /// Path of a file, removed at the end.
  std::string File(const std::string& name) {
    files_.push_back(name);
    return path_ + "/" + name;
  }

 private:
  std::string path_;
  std::vector<std::string> files_;
};

/// Shared memory as in the staging arena.
class Region {
 public:
  explicit Region(size_t bytes) : bytes_(bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    data_ = memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
  }
  ~Region() { munmap(data_, bytes_); }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  void FillRandom(uint64_t seed) {
    std::mt19937_64 random(seed);
    for (size_t i = 0; i + 8 <= bytes_; i += 8) {
      const uint64_t value = random();
      memcpy(data_ + i, &value, sizeof value);
    }
  }

 private:
  char* data_ = nullptr;
  size_t bytes_;
};

/// Runs `body` in a forked child and returns its exit status, or -signal.
inline int InChild(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/// Returns the bytes of the file by ordinary reads.
inline std::string Contents(const std::string& path) {
  std::string out;
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  std::vector<char> buffer(1u << 20);
  for (ssize_t got; (got = read(fd, buffer.data(), buffer.size())) > 0;) {
    out.append(buffer.data(), static_cast<size_t>(got));
  }
  close(fd);
  return out;
}

inline constexpr size_t kRegionBytes = 16u << 20;

class QueueTest : public ::testing::TestWithParam<Rung> {
 protected:
  void SetUp() override {
    ASSERT_NE(region_.data(), nullptr);
    region_.FillRandom(42);
  }
  void TearDown() override {
    queue_.reset();
    sys::CloseOwned(fd_);
  }

  QueueOptions Options() const {
    return {.rung = GetParam().rung,
            .depth = 8,
            .threads = GetParam().threads,
            .region = region_.data(),
            .region_bytes = region_.bytes()};
  }

  // Opens the queue; returns false where this rung is unavailable, and the caller skips.
  bool OpenQueue(const QueueOptions& options) {
    const int error = queue_->Open(options);
    if (error == 0) {
      EXPECT_EQ(queue_->rung(), GetParam().rung) << queue_->reason();
    }
    return error == 0;
  }

  // Opens a new file, for direct I/O where the file system allows and `direct` is set.
  void MakeFile(bool direct = true) {
    path_ = scratch_.File("data");
    DirectOpen opened;
    ASSERT_EQ(OpenDirect(AT_FDCWD, path_.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600, direct, &opened),
              0);
    fd_ = opened.fd;
    direct_ = opened.direct != DirectIo::kNo;
  }

  Request WriteAt(uint64_t offset, uint32_t bytes, uint64_t tag = 0) const {
    return {.opcode = Opcode::kWrite,
            .fd = fd_,
            .buffer = region_.data() + offset % kRegionBytes,
            .offset = offset,
            .bytes = bytes,
            .tag = tag};
  }

  // Collects until no transfer is in flight; a minute allows for busy machines.
  std::vector<Completion> Drain() {
    std::vector<Completion> out;
    while (queue_->in_flight() > 0) {
      Completion some[4];
      const int count = queue_->Wait(some, 4, 60'000, nullptr);
      if (count <= 0) {
        char state[256];
        queue_->Describe(state, sizeof state);
        ADD_FAILURE() << "Wait returned " << count << ": " << state;
        break;
      }
      out.insert(out.end(), some, some + count);
    }
    return out;
  }

  // Submits, waits, and returns the completion.
  Completion Run(const Request& request) {
    EXPECT_EQ(queue_->Submit(request), 0);
    const std::vector<Completion> all = Drain();
    EXPECT_EQ(all.size(), 1u);
    return all.empty() ? Completion{.error = -1} : all[0];
  }

  bool FileHolds(uint64_t offset, uint64_t bytes) const {
    const std::string contents = Contents(path_);
    return contents.size() >= offset + bytes &&
           memcmp(contents.data() + offset, region_.data() + offset, bytes) == 0;
  }

  ScratchDirectory scratch_;
  Region region_{kRegionBytes};
  std::string path_;
  int fd_ = -1;
  bool direct_ = false;
  std::unique_ptr<Queue> queue_ = std::make_unique<Queue>();
};

#define HOLDFAST_OPEN_OR_SKIP(options)                           \
  if (!OpenQueue(options)) {                                     \
    GTEST_SKIP() << "not on this machine: " << queue_->reason(); \
  }

}  // namespace holdfast::io

#endif  // HOLDFAST_TESTS_UNIT_IO_URING_QUEUE_FIXTURE_H_
