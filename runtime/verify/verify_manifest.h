// Compares every chunk of the files in manifests with the recorded digests.
#ifndef HOLDFAST_RUNTIME_VERIFY_VERIFY_MANIFEST_H_
#define HOLDFAST_RUNTIME_VERIFY_VERIFY_MANIFEST_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "holdfast/verify.h"
#include "runtime/format/manifest.h"
#include "runtime/verify/fault_log.h"

namespace holdfast::verify {

/// Reads the files of `manifests` (only the file `only`, if not empty) and compares. Missing files
/// and files of another size were reported before; their remaining chunks are compared. Fills the
/// report's counts.
/// \error of the reading mechanism.
absl::Status VerifyManifests(int directory, const std::vector<format::Manifest>& manifests,
                             const std::string& only, const VerifyOptions& options, FaultLog* log,
                             VerifyReport* report);

}  // namespace holdfast::verify

#endif  // HOLDFAST_RUNTIME_VERIFY_VERIFY_MANIFEST_H_
