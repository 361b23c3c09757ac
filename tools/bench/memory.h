// Memory of the bench: tensors to save, buffers to copy to, ballast that makes a trainer large.
#ifndef HOLDFAST_TOOLS_BENCH_MEMORY_H_
#define HOLDFAST_TOOLS_BENCH_MEMORY_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "holdfast/plan.h"

namespace holdfast::bench {

enum class Pages {
  kHuge,  ///< 2 MiB pages where the machine gives them.
  kBase,  ///< Base pages: most page tables, the worst case for fork(2).
};

/// Private memory, touched: every page is there.
class Memory {
 public:
  static absl::StatusOr<Memory> Make(uint64_t bytes, Pages pages);
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;
  ~Memory();

  char* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

 private:
  Memory(char* data, uint64_t bytes) : data_(data), bytes_(bytes) {}
  char* data_;
  uint64_t bytes_;
};

/// Fills with bytes that do not repeat, so that nothing below can make them fewer.
void FillWithNoise(const Memory& memory);

/// `count` tensors that share `memory` evenly.
std::vector<TensorSource> CutTensors(const Memory& memory, uint32_t count);

}  // namespace holdfast::bench

#endif  // HOLDFAST_TOOLS_BENCH_MEMORY_H_
