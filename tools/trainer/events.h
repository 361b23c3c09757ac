// What happens to a save, to its worker, and to this process.
#ifndef HOLDFAST_TOOLS_TRAINER_EVENTS_H_
#define HOLDFAST_TOOLS_TRAINER_EVENTS_H_

#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "holdfast/save.h"
#include "holdfast/staging.h"
#include "tools/trainer/task.h"

namespace holdfast::trainer {

/// Repeats `step`, of a thread beside the calls of saves, until it gets its memory: a limit of
/// memory ends soon.
template <typename Step>
auto WithMemory(const Step& step) {
  while (true) {
    try {
      return step();
    } catch (const std::bad_alloc&) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

/// Writes lines to the driver. \threadsafety Any.
class Teller {
 public:
  explicit Teller(int fd) : fd_(fd) {}

  /// The process of a job that the next lines are of.
  void SetWho(uint32_t rank, uint32_t job);
  void Tell(const std::string& event, nlohmann::json values = nlohmann::json::object());
  /// Tells an error of the save `number`; 0: of none.
  void TellFailure(const std::string& event, uint64_t number, const absl::Status& error,
                   nlohmann::json values = nlohmann::json::object());

 private:
  std::mutex mutex_;
  const int fd_;
  uint32_t rank_ = 0;
  uint32_t job_ = 0;
};

/// Limits a resource of some processes, from Begin until its destructor.
class Limit {
 public:
  /// A process may have its present memory and descriptors, and the event's bytes or one descriptor
  /// more; or no file of more than these bytes.
  Limit(const Event& event, const std::vector<int>& pids);
  ~Limit();
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;

  /// Takes no memory: the limit may be one of memory.
  void Begin();
  bool IsOfFiles() const { return resource_ == RLIMIT_NOFILE; }

 private:
  struct Process {
    int pid = 0;
    rlim_t less = 0;
    std::optional<rlimit> before{};
  };

  const __rlimit_resource resource_;
  std::vector<Process> processes_;
};

/// Extents of one save that are sealed and not released. A Checkpointer may release memory after
/// the end of a life: its callback owns a share.
struct SealedExtents {
  /// For StagingOptions::on_released.
  void Release(const void* memory, uint64_t bytes);

  std::mutex mutex;
  bool keeps = false;
  std::list<SealedExtent> extents;
};

/// The events of one life. A thread waits for the moment of each.
class Events {
 public:
  /// `on_end` is called with the number of a save whose worker is about to end.
  Events(Teller* teller, double hung_seconds, std::function<void(uint64_t number)> on_end)
      : teller_(teller), hung_seconds_(hung_seconds), on_end_(std::move(on_end)) {}
  ~Events() { Join(); }
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;

  /// Before the call of a save: limits begin here, and what happens inside of the call.
  void BeginCall(uint64_t number, const Event& event);
  /// The save is in flight: waits for the event's moment. Call it within the call's limits.
  void Watch(uint64_t number, const std::optional<Event>& event, const SaveHandle& save);
  /// After the call: waits until limits have ended, also those of a moment.
  void EndCall();

  /// The save has ended, or was refused: no later one is changed in its place.
  void EndSave();

  /// For CheckpointerOptions::on_sealed.
  void Sealed(const SealedExtent& extent);
  const std::shared_ptr<SealedExtents>& sealed() const { return sealed_; }

  /// Tells that the event happened, in a phase of the save.
  void Fired(uint64_t number, const Event& event, const std::string& phase);

  /// Waits for every event's end.
  void Join();

 private:
  void Strike(uint64_t number, const Event& event, const SaveHandle& save, std::string phase);
  void StrikeTrainer(const Event& event);
  /// Changes a bit of sealed memory that the runtime still holds, and with "change-and-restore"
  /// back.
  void ChangeSealed(uint64_t number, const Event& event, const std::string& phase);
  /// Waits while the driver lets the kernel kill the process `pid` for lack of memory.
  void RunOutOfMemory(const Event& event, int pid, const std::function<bool()>& is_over);

  Teller* const teller_;
  const double hung_seconds_;
  const std::function<void(uint64_t number)> on_end_;
  std::vector<std::thread> threads_;
  std::thread limiting_;             // of a limit that begins at a moment
  std::optional<Limit> limit_;       // of a call
  std::optional<SaveHandle> last_;   // the save that was watched last
  std::atomic<uint64_t> change_{0};  // number of the save whose next extent is changed
  Event changing_;
  // Of the save whose memory is changed at a moment.
  const std::shared_ptr<SealedExtents> sealed_ = std::make_shared<SealedExtents>();
};

}  // namespace holdfast::trainer

#endif  // HOLDFAST_TOOLS_TRAINER_EVENTS_H_
