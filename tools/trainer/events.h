// What happens to a save, to its worker, and to this process.
#ifndef HOLDFAST_TOOLS_TRAINER_EVENTS_H_
#define HOLDFAST_TOOLS_TRAINER_EVENTS_H_

#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "holdfast/save.h"
#include "holdfast/staging.h"
#include "tools/trainer/task.h"

namespace holdfast::trainer {

/// Repeats `step`, of a thread beside the calls of saves, until it gets its memory: a limit of
/// memory is of one call, and ends with it.
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
  /// After the call: limits end.
  void EndCall();
  /// The save is in flight: waits for the event's moment.
  void Watch(uint64_t number, const Event& event, const SaveHandle& save);

  /// The save has ended, or was refused: no later one is changed in its place.
  void EndSave();

  /// For CheckpointerOptions::on_sealed.
  void Sealed(const SealedExtent& extent);

  /// Waits for every event's end.
  void Join();

 private:
  struct Limit {
    int pid = 0;
    rlimit before{};
  };

  void Strike(uint64_t number, const Event& event, const SaveHandle& save, std::string phase);
  void StrikeTrainer(const Event& event);
  /// Waits while the driver lets the kernel kill the process `pid` for lack of memory.
  void RunOutOfMemory(const Event& event, int pid, const std::function<bool()>& is_over);
  void Fired(uint64_t number, const Event& event, const std::string& phase);

  Teller* const teller_;
  const double hung_seconds_;
  const std::function<void(uint64_t number)> on_end_;
  std::vector<std::thread> threads_;
  std::vector<Limit> limits_;
  int limited_ = 0;                  // RLIMIT_*
  std::atomic<uint64_t> change_{0};  // number of the save whose next extent is changed
  Event changing_;
};

}  // namespace holdfast::trainer

#endif  // HOLDFAST_TOOLS_TRAINER_EVENTS_H_
