#include "tests/fault/dead_writes.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "holdfast/checkpointer.h"
#include "holdfast/recovery.h"
#include "runtime/base/unique_fd.h"
#include "runtime/sys/owned_fds.h"
#include "tests/testing/child_process.h"
#include "tests/testing/holdings.h"
#include "tests/testing/slow_disk.h"
#include "tests/testing/training_state.h"

namespace holdfast::testing {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kStateBytes = 12u << 20;
constexpr uint64_t kArenaBytes = 16u << 20;  // the least; two such states do not fit
// The state takes three quarters of a second.
constexpr uint64_t kBytesPerSecond = 16u << 20;
constexpr uint64_t kPageBytes = 4096;
constexpr char kModel[] = "model-00000-of-00001.safetensors";
constexpr absl::Duration kLong = absl::Seconds(120);

CheckpointerOptions OptionsOf(const std::string& directory, Launcher launcher, EngineRung engine) {
  CheckpointerOptions options = SmallOptions(directory);
  options.launcher = launcher;
  options.engine = engine;
  options.staging.arena_bytes = kArenaBytes;
  return options;
}

// The data file of the save under way, after every block is reserved: the first writes
// follow at once.
std::optional<base::UniqueFd> OpenVictim(const std::string& directory) {
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (!absl::StartsWith(entry.path().filename().string(), "victim.partial-")) continue;
    base::UniqueFd fd(sys::OpenOwned(AT_FDCWD,
                                     (entry.path() / (std::string(kModel) + ".tmp")).c_str(),
                                     O_RDWR | O_DIRECT | O_CLOEXEC, 0));
    struct stat found {};
    if (!fd.valid() || fstat(fd.get(), &found) != 0) continue;
    if (static_cast<uint64_t>(found.st_size) >= kStateBytes) return fd;
  }
  return std::nullopt;
}

/// Waits until bytes behind the header have landed. On a disk of this rate more writes are then in
/// flight.
bool AwaitFirstWrite(int fd) {
  constexpr off_t kBehindHeader = 1 << 20;
  return WaitFor([fd] { return lseek(fd, kBehindHeader, SEEK_DATA) >= 0; });
}

void AwaitWrites(int fd) { (void)fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, kPageBytes); }

struct Pages {
  uint64_t written = 0;
  uint64_t dirty = 0;
};

// The file may hold `header` bytes, then `data`; a page of zeros is unwritten.
Pages Compare(int fd, uint64_t header, const std::vector<char>& data) {
  void* memory = nullptr;
  if (posix_memalign(&memory, kPageBytes, kPageBytes) != 0) return {};
  const std::unique_ptr<char, decltype(&free)> page(static_cast<char*>(memory), free);
  std::vector<char> expected(kPageBytes);
  Pages pages;
  for (uint64_t at = 0; at < data.size(); at += kPageBytes) {
    const ssize_t got = pread(fd, page.get(), kPageBytes, static_cast<off_t>(header + at));
    if (got != static_cast<ssize_t>(kPageBytes)) break;
    if (std::all_of(page.get(), page.get() + kPageBytes, [](char c) { return c == 0; })) continue;
    const uint64_t bytes = std::min<uint64_t>(kPageBytes, data.size() - at);
    std::fill(expected.begin(), expected.end(), '\0');
    std::memcpy(expected.data(), data.data() + at, bytes);
    ++pages.written;
    if (std::memcmp(page.get(), expected.data(), kPageBytes) != 0) ++pages.dirty;
  }
  return pages;
}

class Campaign {
 public:
  Campaign(const std::string& directory, const DeadWritesOptions& options) : directory_(directory) {
    CheckpointerOptions given = OptionsOf(directory_, options.launcher, options.engine);
    given.time_stalled_max = kLong;
    given.time_memory_max = kLong;
    auto made = Checkpointer::Create(given);
    if (made.ok()) {
      checkpointer_ = *std::move(made);
      MeasureHeader();
    } else {
      problems.push_back(made.status().ToString());
    }
  }

  bool ok() const { return problems.empty(); }

  void KillOne(uint64_t round, DeadWritesResult* result) {
    const TrainingState victim = TrainingState::Uniform(1, kStateBytes, 2 * round + 1);
    const TrainingState next = TrainingState::Uniform(1, kStateBytes, 2 * round + 2);
    const auto handle = Begin("victim", victim);
    if (!handle.ok()) return Problem(handle.status());
    std::optional<base::UniqueFd> file;
    if (!WaitFor([&] { return (file = OpenVictim(directory_)).has_value(); }) ||
        !AwaitFirstWrite(file->get()))
      return problems.push_back("the victim's file did not appear");
    absl::SleepFor(absl::Milliseconds(5 * (round % 8)));
    SendSignal(handle->worker_pid(), SIGKILL);
    const absl::Status ended = handle->WaitDurable(kLong).status();
    if (ended.ok()) problems.push_back("the save of a killed worker is durable");
    const auto after = Begin("next", next);
    if (!after.ok()) return Problem(after.status());
    if (const auto report = after->WaitDurable(kLong); !report.ok()) {
      return Problem(report.status());
    }
    if (const absl::Status same = next.CompareWith(directory_ + "/next"); !same.ok()) Problem(same);
    AwaitWrites(file->get());
    const Pages pages = Compare(file->get(), header_bytes_, victim.tensors()[0].bytes);
    result->pages_written += pages.written;
    result->pages_dirty += pages.dirty;
    if (!WaitFor([&] { return checkpointer_->staging().bytes_held == 0; }))
      problems.push_back("memory is still held");
    fs::remove_all(directory_ + "/next");
  }

  std::vector<std::string> problems;

 private:
  void Problem(const absl::Status& status) { problems.push_back(status.ToString()); }

  absl::StatusOr<SaveHandle> Begin(const std::string& name, const TrainingState& state) {
    const std::vector<TensorSource> sources = state.Sources();
    return checkpointer_->SaveAsync({.name = name, .step = 1, .tensors = sources});
  }

  // Length of the header, equal in all such files.
  void MeasureHeader() {
    const TrainingState state = TrainingState::Uniform(1, kStateBytes, 0);
    const auto handle = Begin("first", state);
    if (!handle.ok()) return Problem(handle.status());
    if (const auto report = handle->WaitDurable(kLong); !report.ok())
      return Problem(report.status());
    const std::string path = directory_ + "/first/" + kModel;
    header_bytes_ = fs::file_size(path) - state.tensors()[0].bytes.size();
    fs::remove_all(directory_ + "/first");
  }

  std::string directory_;
  std::unique_ptr<Checkpointer> checkpointer_;
  uint64_t header_bytes_ = 0;
};

/// Waits for the lock of the save under way.
bool AwaitLock(const std::string& directory) {
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (!absl::StartsWith(entry.path().filename().string(), "victim.partial-")) continue;
    const base::UniqueFd fd(
        sys::OpenOwned(AT_FDCWD, entry.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0));
    return WaitFor([&] { return flock(fd.get(), LOCK_EX | LOCK_NB) == 0; });
  }
  return false;
}

/// Begins a save and kills its trainer and worker. Returns the descriptor of the file with writes
/// in flight.
std::optional<base::UniqueFd> KillTrainerInWrites(const CheckpointerOptions& options,
                                                  const TrainingState& state) {
  const Subreaper subreaper;
  Mailbox mailbox;
  ChildProcess trainer([&] {
    const auto checkpointer = Checkpointer::Create(options);
    if (!checkpointer.ok()) return;
    const std::vector<TensorSource> sources = state.Sources();
    const auto handle = (*checkpointer)->SaveAsync({.name = "victim", .tensors = sources});
    if (!handle.ok()) return;
    WaitFor([&] { return handle->worker_pid() != 0; });
    mailbox.ToParent(absl::StrCat(handle->worker_pid()));
    (void)handle->WaitDurable(kLong);
  });
  pid_t worker = 0;
  if (!absl::SimpleAtoi(mailbox.FromChild(kLong).value_or(""), &worker)) return std::nullopt;
  std::optional<base::UniqueFd> file;
  if (WaitFor([&] { return (file = OpenVictim(options.directory)).has_value(); }))
    AwaitFirstWrite(file->get());
  // The trainer first: it would remove the files of a dead worker.
  trainer.Signal(SIGKILL);
  SendSignal(worker, SIGKILL);
  trainer.Wait(kLong);
  return file;
}

}  // namespace

DeadTrainerResult LockDuringWrites(Launcher launcher, EngineRung engine) {
  DeadTrainerResult result;
  const auto slow = SlowDisk::Mount(kBytesPerSecond);
  if (!slow.ok()) {
    result.skipped = std::string(slow.status().message());
    return result;
  }
  const std::string& directory = (*slow)->path();
  const CheckpointerOptions options = OptionsOf(directory, launcher, engine);
  const TrainingState state = TrainingState::Uniform(1, kStateBytes, 1);
  const auto file = KillTrainerInWrites(options, state);
  if (!file.has_value()) {
    result.problems.push_back("the victim's file did not appear");
    return result;
  }
  // A recovery takes a directory whose lock it gets.
  if (!AwaitLock(directory)) result.problems.push_back("the save's lock is still held");
  result.pages_at_lock = Compare(file->get(), 0, state.tensors()[0].bytes).written;
  AwaitWrites(file->get());
  result.pages_landed = Compare(file->get(), 0, state.tensors()[0].bytes).written;
  const auto recovered = Recover(directory, {.wait_for_orphans = kLong});
  if (!recovered.ok()) {
    result.problems.push_back(recovered.status().ToString());
  } else if (recovered->removed.size() != 1) {
    result.problems.push_back("the dead save was not removed");
  }
  return result;
}

ClosedResult CloseInWrites(Launcher launcher, EngineRung engine, absl::Duration patience) {
  ClosedResult result;
  // The save ends half a second after the kill, and some of its writes later.
  const auto slow = SlowDisk::Mount(kBytesPerSecond / 4);
  if (!slow.ok()) {
    result.skipped = std::string(slow.status().message());
    return result;
  }
  const std::string& directory = (*slow)->path();
  const CheckpointerOptions options = OptionsOf(directory, launcher, engine);
  const TrainingState state = TrainingState::Uniform(1, kStateBytes, 1);
  const Holdings before = Holdings::OfSelf();
  std::optional<base::UniqueFd> file;
  {
    auto checkpointer = Checkpointer::Create(options);
    if (!checkpointer.ok()) {
      result.problems.push_back(checkpointer.status().ToString());
      return result;
    }
    const std::vector<TensorSource> sources = state.Sources();
    const auto handle = (*checkpointer)->SaveAsync({.name = "victim", .tensors = sources});
    if (!handle.ok() || !WaitFor([&] { return (file = OpenVictim(directory)).has_value(); }) ||
        !AwaitFirstWrite(file->get())) {
      result.problems.push_back("the victim's file did not appear");
      return result;
    }
    SendSignal(handle->worker_pid(), SIGKILL);
    if (handle->WaitDurable(kLong).ok())
      result.problems.push_back("the save of a killed worker is durable");
  }
  const auto pages = [&] { return Compare(file->get(), 0, state.tensors()[0].bytes).written; };
  result.pages_at_close = pages();
  const int own = file->get();
  WaitFor(
      [&] {
        Holdings now = Holdings::OfSelf();
        now.fds.erase(own);
        result.stays = now.Beyond(before);
        return result.stays.empty();
      },
      patience);
  result.pages_at_release = pages();
  AwaitWrites(own);
  result.pages_landed = pages();
  const auto recovered = Recover(directory, {.wait_for_orphans = kLong});
  if (!recovered.ok()) result.problems.push_back(recovered.status().ToString());
  if (!fs::is_empty(directory)) result.problems.push_back("the dead save was not removed");
  return result;
}

DeadWritesResult KillWorkersInWrites(const DeadWritesOptions& options) {
  DeadWritesResult result;
  const auto slow = SlowDisk::Mount(kBytesPerSecond);
  if (!slow.ok()) {
    result.skipped = std::string(slow.status().message());
    return result;
  }
  Campaign campaign((*slow)->path(), options);
  for (uint32_t round = 0; round < options.kills && campaign.ok(); ++round) {
    campaign.KillOne(round, &result);
  }
  result.problems = std::move(campaign.problems);
  return result;
}

}  // namespace holdfast::testing
