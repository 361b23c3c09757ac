// Rough speeds of one directory and this machine, each from a fraction of a second.
#ifndef HOLDFAST_RUNTIME_DOCTOR_SPEED_PROBE_H_
#define HOLDFAST_RUNTIME_DOCTOR_SPEED_PROBE_H_

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "holdfast/probe.h"
#include "io_uring/queue.h"
#include "runtime/staging/arena.h"

namespace holdfast::doctor {

/// Fills the three rates of `report` in about `time`:
/// - writing a fresh, reserved file with `queue` from `arena`, fsync included;
/// - digests of one thread;
/// - copies of one thread into the arena.
/// Takes at most a quarter of the free space and 2 GiB, and frees the space afterwards. \error of
/// the disk.
absl::Status MeasureSpeeds(int scratch, io::Queue* queue, const staging::Arena& arena,
                           absl::Duration time, ProbeReport* report);

}  // namespace holdfast::doctor

#endif  // HOLDFAST_RUNTIME_DOCTOR_SPEED_PROBE_H_
