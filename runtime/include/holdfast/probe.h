// Probes the abilities of a machine and a directory.
#ifndef HOLDFAST_PROBE_H_
#define HOLDFAST_PROBE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "holdfast/pod.h"

namespace holdfast {

struct ProbeOptions {
  absl::Duration speed_probe = absl::Seconds(2);  ///< Zero skips it.
};

/// The findings of holdfast-doctor.
struct ProbeReport {
  std::string directory;
  std::string file_system;  ///< "ext4", "tmpfs", ...
  EngineRung engine = EngineRung::kAuto;
  std::string engine_reason;
  PageRung pages = PageRung::kAuto;
  std::string pages_reason;
  uint64_t page_bytes = 0;       ///< Of the staging arena.
  uint64_t base_page_bytes = 0;  ///< Of the machine.
  DirectIo direct_io = DirectIo::kNo;
  uint32_t memory_alignment = 0;  ///< From STATX_DIOALIGN, 0 where the kernel reports none.
  uint32_t offset_alignment = 0;
  bool reserve = false;  ///< fallocate(2) works.
  bool rename_noreplace = false;
  bool rename_exchange = false;
  bool lock = false;  ///< flock(2) on a directory works.
  uint64_t free_bytes = 0;
  uint64_t memlock_bytes = 0;  ///< RLIMIT_MEMLOCK, UINT64_MAX is unlimited.
  bool worker_program_found = false;
  std::string worker_program;
  std::string digest_unit;  ///< Vector unit of the digests.
  std::vector<std::string> gpus;
  double write_bytes_per_second = 0;  ///< Speed probe; 0 when skipped.
  double digest_bytes_per_second = 0;
  double copy_bytes_per_second = 0;
  std::vector<std::string> advice;  ///< Proposed changes, most useful first.
};

absl::StatusOr<ProbeReport> Probe(const std::string& directory, const ProbeOptions& options);

}  // namespace holdfast

#endif  // HOLDFAST_PROBE_H_
