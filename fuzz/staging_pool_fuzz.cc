// StagingPool against a model: epochs, leases and their states, admission to memory, and control
// memory. After each step no byte has two owners, no byte of a quarantined or live lease is given
// out again, every released byte is reported once, and epochs get leases in order.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "fuzz/expect.h"
#include "fuzz/input.h"
#include "fuzz/planted.h"
#include "runtime/staging/staging_pool.h"

namespace {

using holdfast::kChunkBytes;
using holdfast::kIoAlignment;
using holdfast::fuzz::Input;
using holdfast::staging::Lease;
using holdfast::staging::LeaseState;
using holdfast::staging::StagingPool;

constexpr uint64_t kArenaBytes = holdfast::kArenaBytesMin;
constexpr uint64_t kControlBytesMax = 1000;
constexpr size_t kStepsMax = 120;
constexpr size_t kEpochsMax = 6;

using Run = std::pair<uint64_t, uint64_t>;  // offset, bytes
std::vector<Run> g_released;                // by the pool since the last step

/// One pool for all inputs: an arena takes milliseconds to make.
StagingPool& Pool() {
  static StagingPool* const pool = [] {
    static const char* base = nullptr;
    auto made = StagingPool::Create(
        {.arena_bytes = kArenaBytes,
         .control_bytes_max = kControlBytesMax,
         .pages = holdfast::PageRung::kSmall,
         .on_released = [](void* memory, uint64_t bytes) {
           g_released.emplace_back(static_cast<uint64_t>(static_cast<char*>(memory) - base), bytes);
         }});
    HOLDFAST_EXPECT(made.ok());
    base = (*made)->arena().base();
    return made->release();
  }();
  return *pool;
}

struct Epoch {
  bool leasing_done = false;
  bool aborted = false;
  bool quarantined = false;
};

struct Held {
  Lease lease;
  LeaseState state = LeaseState::kFilling;
};

class Model {
 public:
  explicit Model(Input* input) : input_(*input) {}

  void Step() {
    g_released.clear();
    expected_.clear();
    switch (input_.Below(14)) {
      case 0:
      case 1:
        Open();
        break;
      case 2:
      case 3:
      case 4:
      case 5:
        Acquire(Pick(), Size());
        break;
      case 6:
        Advance();
        break;
      case 7:
      case 8:
        Release();
        break;
      case 9:
        FinishLeasing(Pick());
        break;
      case 10:
        Abort(Pick());
        break;
      case 11:
        Quarantine();
        break;
      case 12:
        Retire();
        break;
      default:
        Control();
    }
    Compare();
  }

  void End() {
    g_released.clear();
    expected_.clear();
    while (!epochs_.empty()) RetireOne(epochs_.begin()->first);
    pool_.ReturnControlBytes(control_);
    control_ = 0;
    Compare();
    HOLDFAST_EXPECT(pool_.stats().bytes_held == 0);
    // All bytes are one run again.
    const uint64_t epoch = pool_.OpenEpoch();
    for (uint64_t at = 0; at < kArenaBytes; at += kChunkBytes) {
      HOLDFAST_EXPECT(pool_.TryAcquire(epoch, kChunkBytes).ok());
    }
    pool_.Retire(epoch);
  }

 private:
  /// An open epoch, or sometimes one that has ended; 0: there was none yet.
  uint64_t Pick() {
    const size_t choice = input_.Byte();
    if (choice % 16 == 15 || epochs_.empty()) return last_ended_;
    return std::next(epochs_.begin(), static_cast<long>(choice % epochs_.size()))->first;
  }
  /// Mostly large, so that the memory runs out.
  uint32_t Size() {
    const uint32_t choice = input_.Short();
    if (choice % 4 == 0) return kChunkBytes;
    return 1 + choice % (choice % 4 == 1 ? 3 * kIoAlignment : kChunkBytes / 64) * 64;
  }
  uint64_t AtTurn() const {
    for (const auto& [id, epoch] : epochs_) {
      if (!epoch.leasing_done) return id;
    }
    return 0;
  }
  uint64_t HeldBy(uint64_t epoch) const {
    uint64_t bytes = 0;
    for (const Held& held : held_) bytes += held.lease.epoch == epoch ? held.lease.bytes : 0;
    return bytes;
  }
  /// Leaves out quarantined bytes.
  bool OthersHoldNothing(uint64_t self) const {
    return std::all_of(epochs_.begin(), epochs_.end(), [&](const auto& entry) {
      return entry.first == self || entry.second.quarantined || HeldBy(entry.first) == 0;
    });
  }
  bool Overlaps(const Lease& lease) const {
    return std::any_of(held_.begin(), held_.end(), [&](const Held& held) {
      return lease.offset < held.lease.offset + held.lease.bytes &&
             held.lease.offset < lease.offset + lease.bytes;
    });
  }
  /// Returns true when a free run between the leases has room.
  bool Fits(uint64_t bytes) const {
    std::vector<Run> runs;
    for (const Held& held : held_) runs.emplace_back(held.lease.offset, held.lease.bytes);
    runs.emplace_back(kArenaBytes, 0);
    std::sort(runs.begin(), runs.end());
    uint64_t at = 0;
    for (const auto& [offset, length] : runs) {
      if (offset - at >= bytes) return true;
      at = offset + length;
    }
    return false;
  }

  void Open() {
    if (epochs_.size() == kEpochsMax) return;
    const uint64_t epoch = pool_.OpenEpoch();
    HOLDFAST_EXPECT(epochs_.empty() || epoch > epochs_.rbegin()->first);
    epochs_.emplace(epoch, Epoch());
  }

  void Acquire(uint64_t epoch, uint32_t bytes) {
    if (epoch == 0) return;
    const auto self = epochs_.find(epoch);
    absl::StatusCode expected = absl::StatusCode::kOk;
    if (self == epochs_.end() || self->second.aborted) {
      expected = absl::StatusCode::kAborted;
    } else if (self->second.leasing_done) {
      expected = absl::StatusCode::kFailedPrecondition;
    } else if (AtTurn() != epoch || !Fits(holdfast::AlignUp(bytes))) {
      expected = absl::StatusCode::kUnavailable;
    }
    const auto lease = pool_.TryAcquire(epoch, bytes);
    HOLDFAST_EXPECT(lease.status().code() == expected);
    if (!lease.ok()) return;
    HOLDFAST_EXPECT(lease->bytes == holdfast::AlignUp(bytes) && lease->epoch == epoch);
    HOLDFAST_EXPECT(lease->offset % kIoAlignment == 0);
    HOLDFAST_EXPECT(lease->offset + lease->bytes <= kArenaBytes);
    HOLDFAST_EXPECT(!Overlaps(*lease));
    HOLDFAST_EXPECT(lease->serial > last_serial_);
    last_serial_ = lease->serial;
    held_.push_back({.lease = *lease});
  }

  void Advance() {
    if (held_.empty()) return;
    Held& held = held_[input_.Below(held_.size())];
    if (held.state == LeaseState::kFilling) {
      pool_.Seal(held.lease);
      held.state = LeaseState::kSealed;
    } else if (held.state == LeaseState::kSealed) {
      pool_.StartWriting(held.lease);
      held.state = LeaseState::kWriting;
    }
  }

  /// Also of a lease in a wrong state, of one given back before, and of one that was never given.
  void Release() {
    const size_t choice = input_.Byte();
    if (choice % 8 == 0) {
      Lease lease = stale_;
      lease.offset += choice / 8 * kIoAlignment;
      HOLDFAST_EXPECT(!pool_.Release(lease));
      return;
    }
    if (held_.empty()) return;
    const size_t at = choice % held_.size();
    const Held held = held_[at];
    HOLDFAST_EXPECT(pool_.Release(held.lease) == (held.state == LeaseState::kWriting));
    if (held.state != LeaseState::kWriting) return;
    stale_ = held.lease;
    Expect(held.lease);
    held_.erase(held_.begin() + static_cast<long>(at));
  }

  void FinishLeasing(uint64_t epoch) {
    if (epoch == 0) return;
    pool_.FinishLeasing(epoch);
    if (epochs_.contains(epoch)) epochs_[epoch].leasing_done = true;
  }

  void Abort(uint64_t epoch) {
    if (epoch == 0) return;
    pool_.AbortEpoch(epoch);
    if (epochs_.contains(epoch)) epochs_[epoch].aborted = epochs_[epoch].leasing_done = true;
  }

  void Quarantine() {
    if (epochs_.empty()) return;
    const uint64_t epoch =
        std::next(epochs_.begin(), static_cast<long>(input_.Below(epochs_.size())))->first;
    if (holdfast::fuzz::Planted()) {
      // As if the bytes of a stuck transfer were free at once.
      pool_.Retire(epoch);
    } else {
      pool_.Quarantine(epoch, "a transfer is stuck");
    }
    epochs_[epoch] = {.leasing_done = true, .aborted = true, .quarantined = true};
  }

  void Retire() {
    if (epochs_.empty()) return;
    RetireOne(std::next(epochs_.begin(), static_cast<long>(input_.Below(epochs_.size())))->first);
  }

  void RetireOne(uint64_t epoch) {
    for (const Held& held : held_) {
      if (held.lease.epoch == epoch) Expect(held.lease);
    }
    std::erase_if(held_, [epoch](const Held& held) { return held.lease.epoch == epoch; });
    pool_.Retire(epoch);
    epochs_.erase(epoch);
    last_ended_ = epoch;
  }

  void Control() {
    const uint64_t bytes = input_.Short() % (kControlBytesMax + 100);
    if (bytes % 2 == 0) {
      const absl::Status status = pool_.TakeControlBytes(bytes);
      HOLDFAST_EXPECT(status.ok() == (control_ + bytes <= kControlBytesMax));
      HOLDFAST_EXPECT(status.ok() || absl::IsResourceExhausted(status));
      if (status.ok()) control_ += bytes;
    } else {
      const uint64_t returned = std::min(bytes, control_);
      pool_.ReturnControlBytes(returned);
      control_ -= returned;
    }
  }

  void Expect(const Lease& lease) { expected_.emplace_back(lease.offset, lease.bytes); }

  /// A save that would not wait gets all its bytes at once.
  void CheckAdmission(uint64_t bytes) {
    if (pool_.WouldWait(bytes)) {
      HOLDFAST_EXPECT(!epochs_.empty());
      return;
    }
    uint64_t left = holdfast::AlignUp(bytes);
    const bool alone = OthersHoldNothing(0);
    // Without another save in flight it streams: its first chunk is enough.
    if (alone) left = std::min<uint64_t>(left, kChunkBytes);
    const uint64_t epoch = pool_.OpenEpoch();
    while (left > 0) {
      const auto lease = pool_.TryAcquire(
          epoch, static_cast<uint32_t>(alone ? left : std::min<uint64_t>(left, Size())));
      HOLDFAST_EXPECT(lease.ok());
      HOLDFAST_EXPECT(!Overlaps(*lease));
      last_serial_ = lease->serial;
      left -= std::min<uint64_t>(left, lease->bytes);
    }
    pool_.Retire(epoch);
    last_ended_ = epoch;
  }

  void Compare() {
    std::sort(g_released.begin(), g_released.end());
    std::sort(expected_.begin(), expected_.end());
    HOLDFAST_EXPECT(g_released == expected_);
    const holdfast::StagingStats stats = pool_.stats();
    uint64_t sum = 0, quarantined = 0;
    HOLDFAST_EXPECT(stats.epochs.size() == epochs_.size());
    size_t i = 0;
    for (const auto& [id, epoch] : epochs_) {
      const holdfast::EpochHolding& shown = stats.epochs[i++];
      const uint64_t bytes = HeldBy(id);
      HOLDFAST_EXPECT(shown.epoch == id && shown.bytes_held == bytes);
      HOLDFAST_EXPECT(shown.quarantined.empty() != epoch.quarantined);
      sum += bytes;
      quarantined += epoch.quarantined ? bytes : 0;
      const bool alone = AtTurn() == id && OthersHoldNothing(id);
      HOLDFAST_EXPECT(pool_.HoldsAlone(id) == alone);
    }
    HOLDFAST_EXPECT(stats.bytes_held == sum && stats.bytes_quarantined == quarantined);
    HOLDFAST_EXPECT(stats.bytes_held <= stats.bytes_held_peak && sum <= kArenaBytes);
    HOLDFAST_EXPECT(stats.control_bytes_held == control_ && stats.leases >= last_serial_);
    if (input_.Byte() % 4 == 0) CheckAdmission(1 + input_.Short() * uint64_t{400});
  }

  Input& input_;
  StagingPool& pool_ = Pool();
  std::map<uint64_t, Epoch> epochs_;
  std::vector<Held> held_;
  std::vector<Run> expected_;  // to be released in this step
  Lease stale_;
  uint64_t last_ended_ = 0;
  uint64_t last_serial_ = 0;
  uint64_t control_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  Input input(data, bytes);
  Model model(&input);
  for (size_t step = 0; step < kStepsMax && !input.AtEnd(); ++step) model.Step();
  model.End();
  return 0;
}
