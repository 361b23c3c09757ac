// The cost of a save call beside the copies, in a small trainer and in a large trainer: 300
// tensors, so small that copying does not matter.
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "absl/strings/str_cat.h"
#include "holdfast/device.h"
#include "tools/bench/turns.h"
#include "tools/bench/workload.h"
#include "tools/words.h"

namespace holdfast::bench {
namespace {

constexpr uint32_t kCallTensors = 300;
constexpr uint64_t kArenaBytes = uint64_t{16} << 20;
constexpr uint64_t kBallastSmallBytes = uint64_t{100} << 20;
constexpr uint32_t kRounds = 9;

/// A stand-in for an accelerator: a thread of its own copies in the order of the tickets, as the
/// copy engine of a GPU does.
class LateDevice : public Device {
 public:
  LateDevice() : thread_([this] { Run(); }) {}
  ~LateDevice() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }

  std::string name() const override { return "late:0"; }
  bool is_host() const override { return false; }
  absl::Status RegisterMemory(void*, size_t) override { return absl::OkStatus(); }
  absl::Status UnregisterMemory(void*, size_t) override { return absl::OkStatus(); }
  absl::Status OrderAfter(StreamHandle) override { return absl::OkStatus(); }
  absl::Status MakeStreamWait(StreamHandle) override { return absl::OkStatus(); }
  absl::StatusOr<CopyTicket> CopyToHost(void* to, const void* from, size_t bytes) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    copies_.push_back({to, from, bytes});
    changed_.notify_all();
    return ++started_;
  }
  absl::StatusOr<CopyTicket> CopyFromHost(void* to, const void* from, size_t bytes) override {
    return CopyToHost(to, from, bytes);
  }
  absl::StatusOr<bool> IsDone(CopyTicket ticket) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return done_ >= ticket;
  }
  absl::Status Wait(CopyTicket ticket, absl::Duration timeout) override {
    std::unique_lock<std::mutex> lock(mutex_);
    const bool done = changed_.wait_for(lock, absl::ToChronoNanoseconds(timeout),
                                        [this, ticket] { return done_ >= ticket; });
    return done ? absl::OkStatus() : absl::DeadlineExceededError("the copy goes on");
  }

 private:
  struct Copy {
    void* to;
    const void* from;
    size_t bytes;
  };

  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || !copies_.empty(); });
      if (copies_.empty()) return;
      const Copy copy = copies_.front();
      copies_.pop_front();
      lock.unlock();
      std::memcpy(copy.to, copy.from, copy.bytes);
      lock.lock();
      ++done_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Copy> copies_;
  CopyTicket started_ = 0;  // The ticket of the newest copy.
  CopyTicket done_ = 0;     // The last ended copy.
  bool stopping_ = false;
  std::thread thread_;
};

/// Makes `calls` save calls. Adds the time of each as a sample `name`, and the median as `name` +
/// "_median". The checkpoints stay: ext4 without a journal makes directories slowly for a minute
/// after deletions, because it passes over the inodes that they freed (recently_deleted).
absl::Status Calls(const Bench& bench, Launcher launcher, uint32_t calls,
                   const std::vector<TensorSource>& tensors, const std::string& name,
                   uint64_t* saves, Way* way) {
  CheckpointerOptions options = OptionsFor(bench, kArenaBytes);
  options.launcher = launcher;
  const absl::StatusOr<std::unique_ptr<Checkpointer>> checkpointer = Checkpointer::Create(options);
  if (!checkpointer.ok()) return checkpointer.status();
  constexpr uint32_t kWarmUp = 2;  // The first calls touch memory that later calls reuse.
  std::vector<double> microseconds;
  for (uint32_t i = 0; i < calls + kWarmUp; ++i) {
    const absl::StatusOr<SaveCost> cost =
        MeasureSave(checkpointer->get(), absl::StrCat("call-", ++*saves), tensors);
    if (!cost.ok()) return cost.status();
    if (i >= kWarmUp) {
      microseconds.push_back((cost->call_seconds - cost->report.time_copying) * kUsPerSecond);
      way->Note(name, microseconds.back());
      way->Note("launching", cost->report.time_launching * kUsPerSecond);
      way->labels = LabelsOf(cost->report);
    }
  }
  way->Note(name + "_median", Median(microseconds));
  return absl::OkStatus();
}

}  // namespace

absl::Status RunHandoff(const Bench& bench) {
  const absl::StatusOr<Memory> memory =
      Memory::MakeNoise(kCallTensors * kSmallTensorBytes, Pages::kBase);
  if (!memory.ok()) return memory.status();
  const std::vector<TensorSource> tensors = memory->CutTensors(kCallTensors);
  LateDevice device;
  std::vector<TensorSource> on_device = tensors;
  for (TensorSource& tensor : on_device) tensor.device = &device;
  // The machine must keep some free memory.
  const uint64_t large = std::min(bench.options.ballast_bytes, MemoryAvailable() / 4 * 3);
  bench.figures.AddFact("handoff.ballast_bytes", absl::StrCat(large));
  const uint32_t rounds = std::min(kRounds, bench.options.pairs);
  const uint32_t calls = std::max(1u, (bench.options.calls + rounds - 1) / rounds);

  std::string size;  // Of the trainer.
  uint64_t saves = 0;
  std::vector<Way> ways;
  const auto add = [&](const std::string& name, Launcher launcher,
                       const std::vector<TensorSource>& sources) {
    ways.push_back({name, [&, launcher](Way* way) {
                      ShowStep(absl::StrCat("handoff: ", way->name, ", ", size, " trainer"));
                      return Calls(bench, launcher, calls, sources, size, &saves, way);
                    }});
  };
  for (const auto& [word, launcher] : tools::LauncherWords()) add(word, launcher, tensors);
  // The same call with device tensors, whose copies end after the call has returned.
  add("device", bench.options.launcher, on_device);
  // Not in turn: one ballast serves all ways of a round.
  for (uint32_t round = 0; round < rounds; ++round) {
    for (const bool is_large : {false, true}) {
      const absl::StatusOr<Memory> ballast =
          Memory::Make(is_large ? large : kBallastSmallBytes, Pages::kBase);
      if (!ballast.ok()) return ballast.status();
      size = is_large ? "large" : "small";
      for (Way& way : ways) {
        if (way.failure.ok()) way.failure = way.turn(&way);
      }
    }
  }
  const Way& late = ways.back();
  for (const Way& way : ways) {
    AddFigure(bench, "handoff.median_us." + way.name, "us", way, "small");
    AddFigure(bench, "handoff.median_us_large_trainer." + way.name, "us", way, "large");
    AddFigure(bench, "handoff.launching_us." + way.name, "us", way, "launching");
    AddRatio(bench, "handoff.growth_ratio." + way.name, way, "large_median",
             way.Of("small_median"));
    if (way.name == WordOf(bench.options.launcher) && way.failure.ok()) {
      AddRatio(bench, "handoff.device_ratio", late, "small_median", way.Of("small_median"));
    }
  }
  return absl::OkStatus();
}

}  // namespace holdfast::bench
