// Damage on purpose: a stand-in for a framework's allocator that hands out memory that is still in
// use.
#ifndef HOLDFAST_TOOLS_DEMO_SABOTEUR_H_
#define HOLDFAST_TOOLS_DEMO_SABOTEUR_H_

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "holdfast/staging.h"
#include "tools/demo/options.h"

namespace holdfast::demo {

/// Attacks one extent of one save. Between seal and publication it overwrites some bytes of sealed
/// staging memory. With Mischief::kMutateAndRestore it then waits until the worker has handed that
/// extent to the kernel, stops the worker (as a busy machine may at any time), lets the disk take
/// the wrong bytes, puts the right ones back and lets the worker go on: by the time that it digests
/// the extent again, memory is what it was at seal. The worker is stopped before the first extent
/// is published, too, so that all up to the victim are submitted in one go: then the victim's write
/// is under way for some time.
///
/// \threadsafety OnSealed may be called from any thread, the rest from one.
class Saboteur {
 public:
  explicit Saboteur(Mischief mischief) : mischief_(mischief) {}
  ~Saboteur() { Disarm(); }
  Saboteur(const Saboteur&) = delete;
  Saboteur& operator=(const Saboteur&) = delete;

  /// For CheckpointerOptions::on_sealed.
  void OnSealed(const SealedExtent& extent);

  /// Attacks the extent that is sealed as number `victim` (from 0) from now on. No other save may
  /// be in flight.
  void Arm(uint32_t victim);

  /// Ends the attack and waits for its end.
  void Disarm();

  /// What was done, for people; empty if nothing was.
  std::string deed() const;
  /// Whether bytes that were overwritten were put back behind the worker's back.
  bool restored() const { return restored_; }
  /// How long the disk is given; the next attempts give it longer.
  void GiveDiskLonger() { disk_ms_ *= 2; }

 private:
  void Overwrite(const SealedExtent& extent);
  void RestoreBehindWorker();

  const Mischief mischief_;
  std::atomic<int64_t> countdown_{-1};  // Extents until the victim; negative: not armed.
  std::atomic<uint32_t> sealed_{0};     // Since Arm.
  std::atomic<bool> hit_{false};
  std::atomic<bool> ready_{false};  // The restorer holds the worker still, or does not need to.
  std::atomic<bool> disarmed_{false};
  std::atomic<bool> restored_{false};
  uint32_t disk_ms_ = 500;
  std::thread restorer_;

  mutable std::mutex mutex_;  // What follows: the sealing thread writes, the restorer reads.
  std::string deed_;
  char* at_ = nullptr;
  std::vector<char> original_;
  uint64_t bytes_before_ = 0;  // Sealed up to and including the victim.
};

}  // namespace holdfast::demo

#endif  // HOLDFAST_TOOLS_DEMO_SABOTEUR_H_
