// Reads all ranges of a verification, and turns failed reads into faults.
#ifndef HOLDFAST_RUNTIME_VERIFY_READ_FAULTS_H_
#define HOLDFAST_RUNTIME_VERIFY_READ_FAULTS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "holdfast/verify.h"
#include "runtime/load/chunk_stream.h"
#include "runtime/verify/fault_log.h"

namespace holdfast::verify {

/// Streams all ranges through `sink` with the options of a verification. Engine and direct I/O go
/// to the report, progress to the caller.
absl::Status StreamAll(absl::Span<const load::StreamFile> files,
                       absl::Span<const load::StreamRange> ranges, const VerifyOptions& options,
                       const load::StreamSink& sink, VerifyReport* report);

/// Logs a failed or short read of a block. Returns false for a complete read.
bool AddReadFault(const load::StreamBlock& block, const std::string& file, FaultLog* log);

}  // namespace holdfast::verify

#endif  // HOLDFAST_RUNTIME_VERIFY_READ_FAULTS_H_
