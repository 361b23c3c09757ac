#include "tools/bench/memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace holdfast::bench {
namespace {

constexpr uint64_t kBasePageBytes = 4096;

}  // namespace

absl::StatusOr<Memory> Memory::Make(uint64_t bytes, Pages pages) {
  void* const data =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("take ", bytes, " bytes of memory: ", std::strerror(errno)));
  }
  // Advice only: without huge pages everything works, slower.
  madvise(data, bytes, pages == Pages::kHuge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  Memory memory(static_cast<char*>(data), bytes);
  for (uint64_t at = 0; at < bytes; at += kBasePageBytes) memory.data_[at] = 1;
  return memory;
}

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Memory::~Memory() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

void FillWithNoise(const Memory& memory) {
  uint64_t state = 0x9E3779B97F4A7C15ull ^ memory.bytes();
  for (uint64_t at = 0; at + sizeof(state) <= memory.bytes(); at += sizeof(state)) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(memory.data() + at, &state, sizeof(state));
  }
}

std::vector<TensorSource> CutTensors(const Memory& memory, uint32_t count) {
  std::vector<TensorSource> tensors(count);
  const uint64_t each = memory.bytes() / count / sizeof(float) * sizeof(float);
  for (uint32_t i = 0; i < count; ++i) {
    tensors[i].name = absl::StrCat("tensor.", i);
    tensors[i].dtype = "F32";
    tensors[i].shape = {static_cast<int64_t>(each / sizeof(float))};
    tensors[i].data = memory.data() + i * each;
    tensors[i].bytes = each;
  }
  return tensors;
}

}  // namespace holdfast::bench
