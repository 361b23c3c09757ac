// The limits that Holdfast is held against: the same engine without digests, and plain buffered
// writing.
#ifndef HOLDFAST_TOOLS_BENCH_RAW_IO_H_
#define HOLDFAST_TOOLS_BENCH_RAW_IO_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "holdfast/pod.h"

namespace holdfast::bench {

struct RawResult {
  double seconds = 0;
  double cpu_seconds = 0;
};

struct RawRequest {
  int directory = -1;
  std::string name;
  uint64_t bytes = 0;
  EngineRung engine = EngineRung::kAuto;
};

/// Writes a fresh, reserved file with direct I/O, 4 MiB blocks at a time and as many in flight as a
/// save has; from the first submit until its fsync is done.
absl::StatusOr<RawResult> RawWrite(const RawRequest& request);

/// Reads an existing file the same way; its length is a multiple of kIoAlignment.
absl::StatusOr<RawResult> RawRead(const RawRequest& request);

/// write(2) through the page cache to a fresh file, and fsync.
absl::StatusOr<RawResult> BufferedWrite(const RawRequest& request);

}  // namespace holdfast::bench

#endif  // HOLDFAST_TOOLS_BENCH_RAW_IO_H_
