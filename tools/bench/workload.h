// The bench's tensors, its directory, and the cost of one save.
#ifndef HOLDFAST_TOOLS_BENCH_WORKLOAD_H_
#define HOLDFAST_TOOLS_BENCH_WORKLOAD_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "holdfast/checkpointer.h"
#include "holdfast/plan.h"
#include "tools/bench/bench.h"

namespace holdfast::bench {

inline constexpr double kGib = 1024.0 * 1024.0 * 1024.0;
/// Tensors of the large states.
inline constexpr uint32_t kTensors = 64;
/// Of a tensor where the cost of the call is measured, not that of its bytes.
inline constexpr uint64_t kSmallTensorBytes = 256;
inline constexpr double kUsPerSecond = 1e6;

/// Time and CPU time since a starting point.
class Stopwatch {
 public:
  Stopwatch();
  double seconds() const;
  /// Of the whole process.
  double cpu_seconds() const;
  /// Of children that ended and were waited for since then.
  double children_cpu_seconds() const;

 private:
  double wall_;
  double cpu_;
  double children_;
};

enum class Pages {
  kHuge,  ///< 2 MiB pages where available.
  kBase,  ///< Base pages: most page tables, the worst case for fork(2).
};

/// Private memory with all pages present.
class Memory {
 public:
  static absl::StatusOr<Memory> Make(uint64_t bytes, Pages pages);
  /// Fills memory with bytes that do not repeat, so that no layer can compress them.
  static absl::StatusOr<Memory> MakeNoise(uint64_t bytes, Pages pages = Pages::kHuge);
  Memory(Memory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
  Memory& operator=(Memory&& other) = delete;
  ~Memory();

  char* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  /// Returns `count` tensors that share the memory evenly.
  std::vector<TensorSource> CutTensors(uint32_t count) const;

 private:
  Memory(char* data, uint64_t bytes) : data_(data), bytes_(bytes) {}
  char* data_;
  uint64_t bytes_;
};

/// The bench's directory, emptied and settled between samples.
class Scratch {
 public:
  /// A new directory below `directory`. \error kResourceExhausted when less than `bytes_needed` are
  /// free there.
  static absl::StatusOr<Scratch> Make(const std::string& directory, uint64_t bytes_needed,
                                      uint32_t settle_ms);
  Scratch(Scratch&& other) noexcept
      : path_(std::exchange(other.path_, "")),
        fd_(std::exchange(other.fd_, -1)),
        settle_ms_(other.settle_ms_) {}
  Scratch& operator=(Scratch&&) = delete;
  ~Scratch();

  const std::string& path() const { return path_; }
  int fd() const { return fd_; }

  /// Deletes all entries and lets the disk come to rest: the next sample would otherwise pay for
  /// the deletion.
  void Empty() const;

 private:
  Scratch(std::string path, int fd, uint32_t settle_ms)
      : path_(std::move(path)), fd_(fd), settle_ms_(settle_ms) {}
  std::string path_;
  int fd_;
  uint32_t settle_ms_;
};

struct SaveCost {
  SaveReport report;
  double call_seconds = 0;  ///< Inside SaveAsync, by the caller's clock.
  double worker_cpu = 0;    ///< CPU seconds of the writing side.
  double total_cpu = 0;     ///< Of copying, sealing, supervising and writing together.

  double gib() const { return static_cast<double>(report.bytes) / kGib; }
  /// From the first submit until the checkpoint is durable.
  double write_seconds() const { return report.time_writing + report.time_syncing; }
};

/// Options of a checkpointer in the scratch directory, with an arena of `arena_bytes`.
CheckpointerOptions OptionsFor(const Bench& bench, uint64_t arena_bytes);

/// Saves `tensors` as `name` and waits until the save is durable.
absl::StatusOr<SaveCost> MeasureSave(Checkpointer* checkpointer, const std::string& name,
                                     const std::vector<TensorSource>& tensors);

}  // namespace holdfast::bench

#endif  // HOLDFAST_TOOLS_BENCH_WORKLOAD_H_
