#include "runtime/staging/prefault.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/base/status.h"
#include "runtime/base/thread.h"
#include "runtime/sys/retry.h"
#include "runtime/sys/system.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace holdfast::staging {
namespace {

// Large enough to hide the cost of a call, small enough that threads end together.
constexpr uint64_t kSliceBytes = uint64_t{32} << 20;

// Before Linux 5.14 there is no MADV_POPULATE_WRITE. Reserving the pages in the file first turns
// "no memory" into an error here; a bare touch would turn it into SIGBUS.
int ReserveAndTouch(const MappedFile& file, uint64_t offset, uint64_t bytes) {
  if (sys::Sys().fallocate(file.fd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0)
    return errno;
  const uint64_t page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  for (uint64_t at = offset; at < offset + bytes; at += page_bytes) {
    volatile char* byte = file.base + at;
    *byte = *byte;
  }
  return 0;
}

int PrefaultRange(const MappedFile& file, uint64_t offset, uint64_t bytes) {
  const int result = sys::Uninterrupted([&] {
    const int populated = sys::Sys().madvise(file.base + offset, bytes, MADV_POPULATE_WRITE);
    if (populated != 0 && errno == EAGAIN) errno = EINTR;  // madvise(2): try again
    return populated;
  });
  if (result == 0) return 0;
  return errno == EINVAL ? ReserveAndTouch(file, offset, bytes) : errno;
}

// State shared by the threads: the next piece of work, and the first error.
class Work {
 public:
  Work(const MappedFile& file, const PrefaultPattern& pattern) : file_(file), pattern_(pattern) {}

  void Run() {
    // relaxed: the threads share only these two numbers, and join orders other writes.
    while (error_.load(std::memory_order_relaxed) == 0) {
      const uint64_t offset = next_.fetch_add(1, std::memory_order_relaxed) * pattern_.stride_bytes;
      if (offset >= file_.bytes) return;
      const uint64_t bytes = std::min(pattern_.touch_bytes, file_.bytes - offset);
      const int error = PrefaultRange(file_, offset, bytes);
      if (error != 0) error_.store(error, std::memory_order_relaxed);
    }
  }

  int error() const { return error_.load(std::memory_order_relaxed); }

 private:
  const MappedFile& file_;
  const PrefaultPattern& pattern_;
  std::atomic<uint64_t> next_{0};
  std::atomic<int> error_{0};
};

}  // namespace

absl::Status Prefault(const MappedFile& file, const PrefaultPattern& pattern) {
  Work work(file, pattern);
  std::vector<std::unique_ptr<base::Thread>> threads;
  const uint64_t pieces = (file.bytes + pattern.stride_bytes - 1) / pattern.stride_bytes;
  const uint64_t useful = std::min<uint64_t>(pattern.threads, pieces);
  while (threads.size() + 1 < useful) {
    auto thread = std::make_unique<base::Thread>();
    if (!thread->Start([&work] { work.Run(); }).ok()) break;  // Fewer threads do the work.
    threads.push_back(std::move(thread));
  }
  work.Run();
  threads.clear();
  if (work.error() == 0) return absl::OkStatus();
  // EFAULT stands for a SIGBUS: the file has no page to give. Every errno here means that memory is
  // short.
  absl::Status status = absl::ResourceExhaustedError(absl::StrCat(
      "provide pages: ", base::ErrnoStatus("madvise", "staging arena", work.error()).message()));
  status.SetPayload(base::kErrnoPayload, absl::Cord(absl::StrCat(work.error())));
  return status;
}

absl::Status PrefaultAll(const MappedFile& file, uint32_t threads) {
  return Prefault(file,
                  {.stride_bytes = kSliceBytes, .touch_bytes = kSliceBytes, .threads = threads});
}

}  // namespace holdfast::staging
