// The limits of comparison: fio, the same engine without digests, and plain buffered writing.
#ifndef HOLDFAST_TOOLS_BENCH_LIMITS_H_
#define HOLDFAST_TOOLS_BENCH_LIMITS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "tools/bench/turns.h"

namespace holdfast::bench {

/// One file below the scratch directory.
struct LimitFile {
  std::string name;
  uint64_t bytes = 0;
};

// Each of these functions is one turn: adds the sample "rate" (bytes per second), and "cpu"
// (seconds per GiB) except for fio.

/// Runs fio with direct I/O, 4 MiB blocks, 8 in flight: writes and fsyncs a fresh, reserved file,
/// or reads an existing file. \error kUnavailable when fio is not installed or fails.
absl::Status FioWrite(const Bench& bench, const LimitFile& file, Way* way);
absl::Status FioRead(const Bench& bench, const LimitFile& file, Way* way);

/// Writes a fresh, reserved file with direct I/O, 4 MiB blocks at a time and as many in flight as a
/// save has; from the first submit until its fsync is done.
absl::Status RawWrite(const Bench& bench, const LimitFile& file, EngineRung engine, Way* way);

/// Reads an existing file the same way; `bytes` is a multiple of kIoAlignment.
absl::Status RawRead(const Bench& bench, const LimitFile& file, Way* way);

/// write(2) through the page cache to a fresh file, and fsync.
absl::Status BufferedWrite(const Bench& bench, const LimitFile& file, Way* way);

}  // namespace holdfast::bench

#endif  // HOLDFAST_TOOLS_BENCH_LIMITS_H_
