// The self-digest at the end of a manifest or a commit record.
#ifndef HOLDFAST_RUNTIME_FORMAT_SELF_DIGEST_H_
#define HOLDFAST_RUNTIME_FORMAT_SELF_DIGEST_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace holdfast::format {

/// Readers find the self-digest from the file's end. So the digest is the last field, between the
/// key and exactly the three bytes of the end.
constexpr absl::string_view kSelfDigestKey = "\"self_digest\":\"";
constexpr absl::string_view kSelfDigestEnd = "\"}\n";

/// Compares the digits at the end with the preceding bytes, before any field is trusted. The digits
/// stand at a fixed place, so no parsing is needed. `what` names the text in messages. \error
/// kDataLoss
absl::Status CheckSelfDigest(absl::string_view what, absl::string_view text, uint64_t bytes_max);

}  // namespace holdfast::format

#endif  // HOLDFAST_RUNTIME_FORMAT_SELF_DIGEST_H_
