#include "tests/crash/power_model.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdio.h>
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "runtime/sys/system.h"
#include "tests/crash/kill_switch.h"
#include "tests/testing/checkpoint_files.h"
#include "tests/testing/small_checkpoint.h"

namespace holdfast::testing {
namespace {

constexpr uint64_t kStatesMax = 2000;
PowerModel* g_model = nullptr;
std::mutex g_calls;  // the threads of a save make their calls one after the other
/// Whether this thread looks at states: with the real calls, unrecorded.
thread_local bool t_observes = false;

}  // namespace

/// One recorded call, and the place behind it where power may be cut.
class PowerCall {
 public:
  PowerCall() : lock_(g_calls), allowed_(g_model->Before()) {}
  ~PowerCall() {
    if (!changed_) return;
    const int saved = errno;
    g_model->After();
    errno = saved;
  }
  PowerCall(const PowerCall&) = delete;
  PowerCall& operator=(const PowerCall&) = delete;

  bool allowed() const { return allowed_; }
  void Changed() { changed_ = true; }

 private:
  const std::scoped_lock<std::mutex> lock_;
  const bool allowed_;
  bool changed_ = false;
};

struct PowerHooks {
  static int OpenAt(int directory, const char* path, int flags, mode_t mode) {
    if ((flags & O_CREAT) == 0 || t_observes) {
      return sys::kKernel.openat(directory, path, flags, mode);
    }
    PowerCall call;
    if (!call.allowed()) return -1;
    struct stat found = {};
    const bool existed = fstatat(directory, path, &found, AT_SYMLINK_NOFOLLOW) == 0;
    const int fd = sys::kKernel.openat(directory, path, flags, mode);
    if (fd >= 0 && !existed) {
      Add(directory, path, false);
      call.Changed();
    }
    return fd;
  }

  static int MkdirAt(int directory, const char* path, mode_t mode) {
    if (t_observes) return sys::kKernel.mkdirat(directory, path, mode);
    PowerCall call;
    if (!call.allowed()) return -1;
    const int result = sys::kKernel.mkdirat(directory, path, mode);
    if (result == 0) {
      Add(directory, path, true);
      call.Changed();
    }
    return result;
  }

  static void Add(int directory, const std::string& name, bool is_directory) {
    struct stat made = {};
    ASSERT_EQ(fstatat(directory, name.c_str(), &made, AT_SYMLINK_NOFOLLOW), 0);
    const PowerModel::Id parent = g_model->IdOf(directory);
    const PowerModel::Id id = static_cast<PowerModel::Id>(g_model->inodes_.size());
    g_model->inodes_.push_back({.is_directory = is_directory});
    g_model->by_number_[made.st_ino] = id;
    g_model->inodes_[parent].pending.push_back(
        [name, id](PowerModel::Entries* entries) { (*entries)[name] = id; });
  }

  static ssize_t Write(int fd, const void* buffer, size_t bytes) {
    struct stat found = {};
    // An eventfd is written, too.
    if (t_observes || fstat(fd, &found) != 0 || !S_ISREG(found.st_mode)) {
      return sys::kKernel.write(fd, buffer, bytes);
    }
    const PowerCall call;
    return call.allowed() ? sys::kKernel.write(fd, buffer, bytes) : -1;
  }

  static ssize_t PWrite(int fd, const void* buffer, size_t bytes, off_t offset) {
    if (t_observes) return sys::kKernel.pwrite(fd, buffer, bytes, offset);
    const PowerCall call;
    return call.allowed() ? sys::kKernel.pwrite(fd, buffer, bytes, offset) : -1;
  }

  static int Fsync(int fd) {
    if (t_observes) return 0;  // the power cut is a model: the copies need not reach a disk
    PowerCall call;
    if (!call.allowed()) return -1;
    const std::string path =
        std::filesystem::read_symlink(absl::StrCat("/proc/self/fd/", fd)).string();
    const std::string name = std::filesystem::path(path).filename();
    if (!g_model->forgotten_.empty() && absl::StartsWith(name, g_model->forgotten_)) return 0;
    PowerModel::Inode& inode = g_model->inodes_[g_model->IdOf(fd)];
    if (!inode.is_directory) inode.durable_content = ReadFileBytes(path);
    for (const auto& change : inode.pending) change(&inode.durable);
    inode.pending.clear();
    call.Changed();
    return 0;
  }

  static int RenameAt2(int directory, const char* from_name, int to_directory, const char* to_name,
                       unsigned flags) {
    if (t_observes) {
      return sys::kKernel.renameat2(directory, from_name, to_directory, to_name, flags);
    }
    PowerCall call;
    if (!call.allowed()) return -1;
    const int result = sys::kKernel.renameat2(directory, from_name, directory, to_name, flags);
    if (result == 0) {
      g_model->inodes_[g_model->IdOf(directory)].pending.push_back(
          [from = std::string(from_name), to = std::string(to_name),
           exchange = flags == RENAME_EXCHANGE](PowerModel::Entries* entries) {
            if (exchange) {
              std::swap((*entries)[from], (*entries)[to]);
            } else {
              (*entries)[to] = (*entries)[from];
              entries->erase(from);
            }
          });
      call.Changed();
    }
    return result;
  }

  static int UnlinkAt(int directory, const char* name, int flags) {
    if (t_observes) return sys::kKernel.unlinkat(directory, name, flags);
    PowerCall call;
    if (!call.allowed()) return -1;
    const int result = sys::kKernel.unlinkat(directory, name, flags);
    if (result == 0) {
      g_model->inodes_[g_model->IdOf(directory)].pending.push_back(
          [gone = std::string(name)](PowerModel::Entries* entries) { entries->erase(gone); });
      call.Changed();
    }
    return result;
  }
};

PowerModel::PowerModel(const std::string& directory) {
  root_ = Import(directory);
  g_model = this;
  sys::g_system.openat = PowerHooks::OpenAt;
  sys::g_system.mkdirat = PowerHooks::MkdirAt;
  sys::g_system.write = PowerHooks::Write;
  sys::g_system.pwrite = PowerHooks::PWrite;
  sys::g_system.fsync = PowerHooks::Fsync;
  sys::g_system.renameat2 = PowerHooks::RenameAt2;
  sys::g_system.unlinkat = PowerHooks::UnlinkAt;
}

PowerModel::~PowerModel() {
  sys::g_system = sys::kKernel;
  g_model = nullptr;
}

bool PowerModel::Before() {
  ++calls_;
  if (fail_from_ == 0 || calls_ < fail_from_) return true;
  errno = EIO;
  return false;
}

void PowerModel::After() const {
  if (!observer_) return;
  // The threads of an engine have small stacks.
  std::thread([this] {
    t_observes = true;
    observer_();
  }).join();
}

PowerModel::Id PowerModel::IdOf(int fd) const {
  struct stat found = {};
  EXPECT_EQ(fstat(fd, &found), 0);
  return by_number_.at(found.st_ino);
}

PowerModel::Id PowerModel::Import(const std::string& path) {
  struct stat found = {};
  EXPECT_EQ(stat(path.c_str(), &found), 0);
  const Id id = static_cast<Id>(inodes_.size());
  inodes_.push_back({.is_directory = S_ISDIR(found.st_mode)});
  by_number_[found.st_ino] = id;
  if (!S_ISDIR(found.st_mode)) {
    inodes_[id].durable_content = ReadFileBytes(path);
    return id;
  }
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    const Id child = Import(entry.path());
    inodes_[id].durable[entry.path().filename()] = child;
  }
  return id;
}

void PowerModel::MaterializeInto(const std::string& path, Id directory,
                                 const std::map<Id, size_t>& prefixes) const {
  const Inode& inode = inodes_[directory];
  Entries entries = inode.durable;
  const auto chosen = prefixes.find(directory);
  for (size_t i = 0; chosen != prefixes.end() && i < chosen->second; ++i) {
    inode.pending[i](&entries);
  }
  for (const auto& [name, id] : entries) {
    const std::string child = path + "/" + name;
    if (inodes_[id].is_directory) {
      std::filesystem::create_directory(child);
      MaterializeInto(child, id, prefixes);
    } else {
      std::ofstream(child) << inodes_[id].durable_content;
    }
  }
}

void PowerModel::ForEachState(const std::function<void(const std::string& path)>& visit) const {
  std::vector<Id> unsettled;
  uint64_t states = 1;
  for (Id id = 0; id < static_cast<Id>(inodes_.size()); ++id) {
    if (inodes_[id].pending.empty()) continue;
    unsettled.push_back(id);
    states *= inodes_[id].pending.size() + 1;
  }
  ASSERT_LE(states, kStatesMax) << "the model has grown beyond enumeration";
  for (uint64_t state = 0; state < states; ++state) {
    std::map<Id, size_t> prefixes;
    uint64_t rest = state;
    for (Id id : unsettled) {
      prefixes[id] = rest % (inodes_[id].pending.size() + 1);
      rest /= inodes_[id].pending.size() + 1;
    }
    const TemporaryDirectory copy(Scratch());
    MaterializeInto(copy.path(), root_, prefixes);
    visit(copy.path());
  }
}

}  // namespace holdfast::testing
