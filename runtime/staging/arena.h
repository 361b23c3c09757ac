// The one shared mapping that all staging memory comes from.
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
  uint32_t threads = 1;  ///< That pre-fault in parallel.
};

/// MAP_SHARED, pre-faulted, on the largest pages that the machine gives; DONTFORK and DONTDUMP
/// here; attachable elsewhere by its fd. Sealed against shrinking and growing where the rung allows
/// (memfd), so that no other holder of the fd can turn an access into a SIGBUS.
///
/// \forksafety In a child of fork() the mapping is not there and the fd is closed; the destructor
/// does nothing.
class Arena {
 public:
  /// \error kResourceExhausted when the memory is not there; the message says what to change.
  /// \error kFailedPrecondition and others when the rung that was asked for cannot be had.
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

  /// Gives all pages back (punches the file). The caller has dropped every registration first
  /// (promise 4): a page punched under a registration lives on in the registration only.
  absl::Status Punch();

  /// Takes the pages again after Punch. \error kResourceExhausted when the machine has them no
  /// more; the arena is as it was.
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
  // Read by stats without the pool's lock; release and acquire, so that who sees true sees pages.
  std::atomic<bool> resident_{false};
  std::string reason_;
  base::ForkGuard guard_;
};

}  // namespace holdfast::staging

#endif  // HOLDFAST_RUNTIME_STAGING_ARENA_H_
