// Inputs of the parsers of text with a self-digest.
#ifndef HOLDFAST_FUZZ_SELF_DIGEST_H_
#define HOLDFAST_FUZZ_SELF_DIGEST_H_

#include <string>

#include "runtime/digest/digest.h"

namespace holdfast::fuzz {

/// Returns `text` with the digest of its bytes at its end, in place of an older digest. Without it
/// an input does not pass the check of the digest, and no code behind the check runs.
inline std::string WithSelfDigest(const std::string& text) {
  std::string whole = text.substr(0, text.rfind(",\n\"self_digest\"")) + ",\n\"self_digest\":\"";
  char hex[32];
  digest::ToHex(digest::Of(whole.data(), whole.size()), hex);
  return whole + std::string(hex, sizeof(hex)) + "\"}\n";
}

}  // namespace holdfast::fuzz

#endif  // HOLDFAST_FUZZ_SELF_DIGEST_H_
