#include "runtime/load/stream_buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "io_uring/queue.h"
#include "runtime/base/status.h"
#include "runtime/sys/system.h"

namespace holdfast::load {
namespace {

// The huge page of x86-64 and of aarch64 with 4 KiB base pages. Elsewhere only an alignment.
constexpr size_t kHugeAlignment = size_t{2} << 20;

}  // namespace

absl::StatusOr<StreamBuffer> StreamBuffer::Create(uint32_t slots) {
  const size_t bytes = size_t{slots} * kChunkBytes;
  // One more huge page, so that the slots can begin at a huge page's border in any mapping.
  // Untouched pages cost nothing.
  const size_t mapping_bytes = bytes + kHugeAlignment;
  void* mapping = sys::Sys().mmap(nullptr, mapping_bytes, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) {
    return base::ErrnoStatus("map read buffer of", absl::StrCat(bytes, " bytes"), errno);
  }
  if (sys::Sys().madvise(mapping, mapping_bytes, MADV_DONTFORK) != 0) {
    // Without MADV_DONTFORK a concurrent fork could divert O_DIRECT reads: fail instead.
    const int error = errno;
    sys::Sys().munmap(mapping, mapping_bytes);
    return base::ErrnoStatus("madvise(MADV_DONTFORK)", "read buffer", error);
  }
  // Both calls are optional: huge pages make pinning cheap, and core dumps need no checkpoint.
  (void)sys::Sys().madvise(mapping, mapping_bytes, MADV_HUGEPAGE);
  (void)sys::Sys().madvise(mapping, mapping_bytes, MADV_DONTDUMP);
  const uintptr_t address = reinterpret_cast<uintptr_t>(mapping);
  char* base = static_cast<char*>(mapping) +
               ((address + kHugeAlignment - 1) / kHugeAlignment * kHugeAlignment - address);
  return StreamBuffer(mapping, mapping_bytes, base, slots);
}

StreamBuffer::StreamBuffer(StreamBuffer&& other) noexcept
    : mapping_(std::exchange(other.mapping_, nullptr)),
      mapping_bytes_(other.mapping_bytes_),
      base_(other.base_),
      slots_(other.slots_),
      abandoned_(other.abandoned_) {}

StreamBuffer::~StreamBuffer() {
  // munmap of a whole own mapping fails only for an invalid range.
  if (mapping_ != nullptr && !abandoned_) (void)sys::Sys().munmap(mapping_, mapping_bytes_);
}

uint32_t SlotsFor(uint64_t buffer_bytes, uint64_t needed) {
  const uint64_t fit = std::clamp<uint64_t>(buffer_bytes / kChunkBytes, 2, io::kDepthMax * 4);
  return static_cast<uint32_t>(std::clamp<uint64_t>(needed, 1, fit));
}

}  // namespace holdfast::load
