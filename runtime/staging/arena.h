// The shared mapping of all staging memory.
#ifndef HOLDFAST_RUNTIME_STAGING_ARENA_H_
#define HOLDFAST_RUNTIME_STAGING_ARENA_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "holdfast/pod.h"
#include "runtime/base/unique_fd.h"
#include "runtime/staging/page_source.h"

namespace holdfast::staging {

struct ArenaOptions {
  uint64_t bytes = 0;
  PageRung pages = PageRung::kAuto;
  uint32_t threads = 1;  ///< Threads that pre-fault in parallel.
};

/// A MAP_SHARED mapping, pre-faulted on the largest available pages. The mapping is DONTFORK and
/// DONTDUMP in this process; other processes attach by its fd. Where the rung allows (memfd), seals
/// prevent shrinking and growing: another holder of the fd cannot turn an access into a SIGBUS.
///
/// \forksafety In a child of fork() the mapping is absent and the fd is closed; the destructor does
/// nothing.
class Arena {
 public:
  /// \error kResourceExhausted when memory is short; the message names the option to change.
  /// \error kFailedPrecondition and others when the required rung is unavailable.
  static absl::StatusOr<std::unique_ptr<Arena>> Create(const ArenaOptions& options);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  char* base() const { return base_; }
  uint64_t bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }
  PageRung pages() const { return pages_; }
  uint64_t page_bytes() const { return page_bytes_; }
  const std::string& reason() const { return reason_; }
  bool resident() const { return resident_.load(std::memory_order_acquire); }

  /// Returns all pages to the system (punches the file). The caller must have dropped every
  /// registration (promise 4): a punched page lives on in its registration.
  absl::Status Punch();

  /// Allocates the pages again after Punch.
  /// \error kResourceExhausted when pages are short; the arena is unchanged.
  absl::Status Populate();

 private:
  Arena() = default;
  static absl::StatusOr<std::unique_ptr<Arena>> CreateOn(PageRung rung,
                                                         const ArenaOptions& options);
  absl::Status Map(const PageSource& source);
  absl::Status AdviseHuge();
  absl::Status ProveHuge();

  char* base_ = nullptr;
  uint64_t bytes_ = 0;
  base::UniqueFd fd_;
  PageRung pages_ = PageRung::kSmall;
  uint64_t page_bytes_ = 0;
  uint32_t threads_ = 1;
  // Stats read the flag without the pool's lock. Release and acquire: pages exist for a reader of
  // true.
  std::atomic<bool> resident_{false};
  std::string reason_;
  base::ForkGuard guard_;
};

}  // namespace holdfast::staging

#endif  // HOLDFAST_RUNTIME_STAGING_ARENA_H_
