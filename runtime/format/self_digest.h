// The self-digest at the end of a manifest or a commit record.
#ifndef HOLDFAST_RUNTIME_FORMAT_SELF_DIGEST_H_
#define HOLDFAST_RUNTIME_FORMAT_SELF_DIGEST_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace holdfast::format {

/// Compares the digits at the end with the preceding bytes, before any field is trusted. The digits
/// stand at a fixed place, so no parsing is needed. `what` names the text in messages. \error
/// kDataLoss
absl::Status CheckSelfDigest(absl::string_view what, absl::string_view text, uint64_t bytes_max);

}  // namespace holdfast::format

#endif  // HOLDFAST_RUNTIME_FORMAT_SELF_DIGEST_H_
