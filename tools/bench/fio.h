// fio, where it is installed: a limit that somebody else measures.
#ifndef HOLDFAST_TOOLS_BENCH_FIO_H_
#define HOLDFAST_TOOLS_BENCH_FIO_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace holdfast::bench {

/// Bytes per second of fio with direct I/O, 4 MiB blocks, 8 in flight: a fresh, reserved file and
/// its fsync, or reading an existing one. \error kUnavailable when fio is not installed or fails.
absl::StatusOr<double> FioWrite(const std::string& path, uint64_t bytes);
absl::StatusOr<double> FioRead(const std::string& path, uint64_t bytes);

}  // namespace holdfast::bench

#endif  // HOLDFAST_TOOLS_BENCH_FIO_H_
