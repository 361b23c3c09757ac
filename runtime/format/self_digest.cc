#include "runtime/format/self_digest.h"

#include "absl/strings/str_cat.h"
#include "holdfast/pod.h"
#include "runtime/digest/digest.h"

namespace holdfast::format {
namespace {

constexpr size_t kTrailerBytes = kSelfDigestKey.size() + 32 + kSelfDigestEnd.size();

}  // namespace

absl::Status CheckSelfDigest(absl::string_view what, absl::string_view text, uint64_t bytes_max) {
  const auto wrong = [what](absl::string_view where, absl::string_view why) {
    return absl::DataLossError(absl::StrCat(what, ": ", where, ": ", why));
  };
  if (text.size() > bytes_max) {
    return wrong("size", absl::StrCat(text.size(), " bytes are over the limit of ", bytes_max));
  }
  if (text.size() < kTrailerBytes + 1 || text.front() != '{') {
    return wrong("byte 0", absl::StrCat("this is not a ", what, ", or its end is missing"));
  }
  const absl::string_view trailer = text.substr(text.size() - kTrailerBytes);
  if (trailer.substr(0, kSelfDigestKey.size()) != kSelfDigestKey ||
      trailer.substr(kTrailerBytes - kSelfDigestEnd.size()) != kSelfDigestEnd) {
    return wrong("end", "it does not end in a self-digest");
  }
  const size_t covered = text.size() - 32 - kSelfDigestEnd.size();
  Digest recorded;
  if (!digest::FromHex(text.data() + covered, &recorded)) {
    return wrong("self_digest",
                 absl::StrCat("not 32 hex digits: the ", what, " was never completed"));
  }
  const Digest found = digest::Of(text.data(), covered);
  if (found != recorded) {
    char hex[32];
    digest::ToHex(found, hex);
    return wrong("self_digest", absl::StrCat("it is of other bytes than these, whose digest is ",
                                             absl::string_view(hex, sizeof(hex))));
  }
  return absl::OkStatus();
}

}  // namespace holdfast::format
