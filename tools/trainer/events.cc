#include "tools/trainer/events.h"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "holdfast/errors.h"

namespace holdfast::trainer {
namespace {

using nlohmann::json;

constexpr auto kPoll = std::chrono::microseconds(500);
constexpr auto kMemoryPoll = std::chrono::milliseconds(5);
constexpr int kMemoryPollsMax = 12000;  // a minute

void Sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

uint64_t WallNanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000 + static_cast<uint64_t>(now.tv_nsec);
}

bool IsCommitting(const std::string& phase) {
  return phase == "syncing" || phase == "reading back" || phase == "manifest" ||
         phase == "waiting for ranks" || phase == "committing";
}

bool HasEnded(const std::string& phase) {
  return phase == "done" || phase == "failed" || phase == "cancelled";
}

bool IsMoment(const Event& event, const SaveProgress& now) {
  if (event.phase == "commit") return IsCommitting(now.phase);
  if (event.phase == "later") return now.phase == "writing" && now.bytes_written > 0;
  if (IsCommitting(now.phase)) return true;
  const double share = static_cast<double>(now.bytes_written) /
                       static_cast<double>(std::max<uint64_t>(now.bytes_total, 1));
  return now.phase == "writing" && share >= event.share;
}

bool IsOfWorker(const std::string& kind) {
  return absl::EndsWith(kind, "-worker") || kind == "kill-both";
}

std::vector<int> NumbersIn(const std::string& directory) {
  std::vector<int> numbers;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    int number = 0;
    if (absl::SimpleAtoi(entry.path().filename().string(), &number)) numbers.push_back(number);
  }
  return numbers;
}

std::vector<int> Children() {
  std::vector<int> children;
  for (const int task : NumbersIn("/proc/self/task")) {
    std::ifstream file(absl::StrCat("/proc/self/task/", task, "/children"));
    for (int child = 0; file >> child;) children.push_back(child);
  }
  return children;
}

uint64_t AddressSpaceBytes(const std::string& process) {
  uint64_t pages = 0;
  std::ifstream(absl::StrCat(process, "/statm")) >> pages;
  return pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

bool IsLimit(const Event& event) { return absl::StartsWith(event.kind, "limit-"); }
bool IsChange(const Event& event) { return absl::StartsWith(event.kind, "change-"); }

/// True for events inside of the call, false for events at a phase of the save.
bool IsOfCall(const Event& event) {
  return event.kind == "kill-in-call" || event.kind == "lose-copy" ||
         ((IsChange(event) || IsLimit(event)) && !event.in_flight);
}

__rlimit_resource ResourceOf(const Event& event) {
  if (event.kind == "limit-files") return RLIMIT_NOFILE;
  return event.kind == "limit-memory" ? RLIMIT_AS : RLIMIT_FSIZE;
}

rlim_t LimitOf(const Event& event, int pid) {
  const std::string process = pid == 0 ? "/proc/self" : absl::StrCat("/proc/", pid);
  if (event.kind == "limit-memory") return AddressSpaceBytes(process) + event.bytes;
  if (event.kind == "limit-size") return event.bytes;
  rlim_t value = 0;
  for (const int fd : NumbersIn(process + "/fd"))
    value = std::max(value, static_cast<rlim_t>(fd) + 1);
  return value;
}

/// A foreign fork: the child uses its memory, and ends. The memory is less than a limit of another
/// event leaves.
void Fork() {
  std::string memory(1 << 16, 'f');
  const pid_t child = fork();
  if (child == 0) {
    for (char& byte : memory) byte = 'c';
    _exit(0);
  }
  waitpid(child, nullptr, 0);
}

void RunProgram() {
  const char* const arguments[] = {"true", nullptr};
  pid_t child = 0;
  if (posix_spawnp(&child, "true", nullptr, nullptr, const_cast<char* const*>(arguments),
                   environ) == 0)
    waitpid(child, nullptr, 0);
}

}  // namespace

void Teller::SetWho(uint32_t rank, uint32_t job) {
  rank_ = rank;
  job_ = job;
}

void Teller::Tell(const std::string& event, json values) {
  values["event"] = event;
  values["rank"] = rank_;
  values["job"] = job_;
  const std::lock_guard lock(mutex_);
  values["at"] = WallNanoseconds();
  const std::string line = values.dump(-1, ' ', true, json::error_handler_t::replace) + "\n";
  for (size_t at = 0; at < line.size();) {
    const ssize_t wrote = write(fd_, line.data() + at, line.size() - at);
    if (wrote < 0 && errno != EINTR) return;  // the driver is gone
    if (wrote > 0) at += static_cast<size_t>(wrote);
  }
}

void Teller::TellFailure(const std::string& event, uint64_t number, const absl::Status& error,
                         json values) {
  values["n"] = number;
  values["errors"] = json::array({{{"rank", ""},
                                   {"type", "absl::Status"},
                                   {"ours", true},
                                   {"code", absl::StatusCodeToString(error.code())},
                                   {"errno", ErrnoOf(error)},
                                   {"message", std::string(error.message().substr(0, 600))}}});
  Tell(event, std::move(values));
}

void Events::Fired(uint64_t number, const Event& event, const std::string& phase) {
  WithMemory([&] {
    teller_->Tell("fired", {{"n", number}, {"kind", event.kind}, {"phase", phase}});
  });
}

Limit::Limit(const Event& event, const std::vector<int>& pids) : resource_(ResourceOf(event)) {
  for (const int pid : pids) processes_.push_back({.pid = pid, .less = LimitOf(event, pid)});
}

void Limit::Begin() {
  for (Process& process : processes_) {
    rlimit before{};
    if (prlimit(process.pid, resource_, nullptr, &before) != 0) continue;
    const rlimit less{.rlim_cur = process.less, .rlim_max = before.rlim_max};
    if (prlimit(process.pid, resource_, &less, nullptr) == 0) process.before = before;
  }
}

Limit::~Limit() {
  for (const Process& process : processes_)
    if (process.before.has_value()) prlimit(process.pid, resource_, &*process.before, nullptr);
}

void Events::BeginCall(uint64_t number, const Event& event) {
  if (event.in_flight) {
    const std::lock_guard lock(sealed_->mutex);
    sealed_->keeps = IsChange(event);
  } else if (IsChange(event)) {
    changing_ = event;
    change_ = number;
  } else if (event.kind == "kill-in-call") {
    // The save of the call has no handle yet: in flight is the one before.
    threads_.emplace_back([this, number, event, last = last_] {
      Sleep(event.seconds / 10);
      const std::string before = last.has_value() ? last->progress().phase : "done";
      Fired(number, event, HasEnded(before) ? "call" : before);
      StrikeTrainer(event);
    });
  } else if (IsLimit(event)) {
    std::vector<int> pids = {0};
    if (event.kind == "limit-size")
      for (const int child : Children()) pids.push_back(child);
    limit_.emplace(event, pids);
    // Before the limit: telling may need what is limited.
    Fired(number, event, "call");
    limit_->Begin();
  }
}

void Events::EndCall() {
  if (limiting_.joinable()) limiting_.join();
  if (!limit_.has_value()) return;
  if (!limit_->IsOfFiles()) Sleep(0.05);  // the worker starts
  limit_.reset();
}

void Events::EndSave() {
  change_ = 0;
  Join();
  const std::lock_guard lock(sealed_->mutex);
  sealed_->keeps = false;
  sealed_->extents.clear();
}

void Events::Sealed(const SealedExtent& extent) {
  if (extent.bytes == 0) return;
  if (const std::lock_guard lock(sealed_->mutex); sealed_->keeps)
    sealed_->extents.push_back(extent);
  const uint64_t number = change_.exchange(0);
  if (number == 0) return;
  volatile char* const place = static_cast<char*>(extent.memory) + extent.bytes / 2;
  const char old = *place;
  *place = static_cast<char>(old ^ 0x10);
  Fired(number, changing_, "sealed");
  if (changing_.kind == "change-sealed") return;
  // The caller waits for the save's end, then for this thread.
  threads_.emplace_back([place, old, seconds = changing_.seconds] {
    Sleep(seconds);
    *place = old;
  });
}

void SealedExtents::Release(const void* memory, uint64_t bytes) {
  const char* const begin = static_cast<const char*>(memory);
  const std::lock_guard lock(mutex);
  extents.remove_if([begin, bytes](const SealedExtent& extent) {
    const char* const at = static_cast<const char*>(extent.memory);
    return at >= begin && at < begin + bytes;
  });
}

void Events::ChangeSealed(uint64_t number, const Event& event, const std::string& phase) {
  std::unique_lock lock(sealed_->mutex);
  const std::list<SealedExtent>& extents = sealed_->extents;
  if (extents.empty()) return;
  const SealedExtent changed = *std::next(
      extents.begin(), static_cast<ptrdiff_t>(static_cast<double>(extents.size()) * event.place));
  volatile char* const place = static_cast<char*>(changed.memory) + changed.bytes / 2;
  const char old = *place;
  *place = static_cast<char>(old ^ 0x10);
  lock.unlock();
  Fired(number, event, phase);
  if (event.kind == "change-sealed") return;
  Sleep(event.seconds);
  lock.lock();
  // Memory that was released may have been sealed again.
  if (std::any_of(extents.begin(), extents.end(), [&changed](const SealedExtent& extent) {
        return extent.file == changed.file && extent.file_offset == changed.file_offset;
      }))
    *place = old;
}

void Events::Watch(uint64_t number, const std::optional<Event>& given, const SaveHandle& save) {
  last_ = save;
  if (!given.has_value() || IsOfCall(*given)) return;
  std::thread& waiting = IsLimit(*given) ? limiting_ : threads_.emplace_back();
  waiting = std::thread([this, number, event = *given, save] {
    while (true) {
      const SaveProgress now = WithMemory([&] { return save.progress(); });
      if (IsMoment(event, now)) return Strike(number, event, save, now.phase);
      if (HasEnded(now.phase) || save.IsDone()) return;
      std::this_thread::sleep_for(kPoll);
    }
  });
}

void Events::Strike(uint64_t number, const Event& event, const SaveHandle& save,
                    std::string phase) {
  if (event.phase == "later") {
    Sleep(event.seconds);
    phase = WithMemory([&] { return save.progress().phase; });
  }
  if (IsChange(event)) return ChangeSealed(number, event, phase);
  if (IsLimit(event)) {
    std::vector<int> pids = Children();
    pids.push_back(0);
    Limit limit(event, pids);
    Fired(number, event, phase);
    limit.Begin();
    return Sleep(event.seconds);
  }
  pid_t worker = IsOfWorker(event.kind) ? save.worker_pid() : 0;
  if (worker == getpid()) worker = 0;
  if (worker == 0 && IsOfWorker(event.kind) && event.kind != "kill-both") return;
  if (worker != 0) {
    if (kill(worker, SIGSTOP) != 0) return;
    // What is told now was so when it stopped.
    phase = WithMemory([&] { return save.progress().phase; });
  }
  if ((worker != 0 && event.kind != "stop-worker") || event.kind == "cancel")
    WithMemory([&] { on_end_(number); });
  Fired(number, event, phase);
  if (event.kind == "stop-worker") Sleep(event.seconds);
  if (event.kind == "hang-worker") Sleep(hung_seconds_);
  if (event.kind == "terminate-worker") kill(worker, SIGTERM);
  if (worker != 0 && (event.kind == "kill-worker" || event.kind == "kill-both"))
    kill(worker, SIGKILL);
  if (event.kind == "oom-worker") RunOutOfMemory(event, worker, [&save] { return save.IsDone(); });
  StrikeTrainer(event);
  if (event.kind == "cancel") (void)WithMemory([&] { return save.Cancel(); });
  if (worker != 0) kill(worker, SIGCONT);
}

void Events::RunOutOfMemory(const Event& event, int pid, const std::function<bool()>& is_over) {
  WithMemory([&] { teller_->Tell("out of memory", {{"pid", pid}, {"kind", event.kind}}); });
  for (int i = 0; i < kMemoryPollsMax && !is_over(); ++i) std::this_thread::sleep_for(kMemoryPoll);
}

void Events::StrikeTrainer(const Event& event) {
  if (event.kind == "kill-trainer" || event.kind == "kill-both" || event.kind == "kill-in-call")
    kill(getpid(), SIGKILL);
  if (event.kind == "terminate-trainer") kill(getpid(), SIGTERM);
  if (event.kind == "oom-trainer") RunOutOfMemory(event, getpid(), [] { return false; });
  if (event.kind == "exit-trainer") {
    WithMemory([&] { teller_->Tell("exiting"); });
    exit(0);
  }
  if (event.kind == "stop-trainer") {
    WithMemory([&] { teller_->Tell("stopping", {{"seconds", event.seconds}}); });
    kill(getpid(), SIGSTOP);
  }
  if (event.kind == "fork") Fork();
  if (event.kind == "program") RunProgram();
}

void Events::Join() {
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

}  // namespace holdfast::trainer
