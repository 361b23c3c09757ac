// The place that the bench writes to: a directory of its own, emptied and settled between samples.
#ifndef HOLDFAST_TOOLS_BENCH_SCRATCH_H_
#define HOLDFAST_TOOLS_BENCH_SCRATCH_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace holdfast::bench {

class Scratch {
 public:
  /// A new directory below `directory`. \error kResourceExhausted when less than `bytes_needed` are
  /// free there.
  static absl::StatusOr<Scratch> Make(const std::string& directory, uint64_t bytes_needed,
                                      uint32_t settle_ms);
  Scratch(Scratch&& other) noexcept;
  Scratch& operator=(Scratch&&) = delete;
  ~Scratch();

  const std::string& path() const { return path_; }
  int fd() const { return fd_; }

  /// Deletes everything in it and lets the disk come to rest: deleting is work that would otherwise
  /// be paid by the next sample.
  void Empty() const;

 private:
  Scratch(std::string path, int fd, uint32_t settle_ms);
  std::string path_;
  int fd_;
  uint32_t settle_ms_;
};

}  // namespace holdfast::bench

#endif  // HOLDFAST_TOOLS_BENCH_SCRATCH_H_
