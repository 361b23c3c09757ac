// ParseCommitRecord. An input is tried as it is, and with a right self-digest.
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "fuzz/expect.h"
#include "fuzz/self_digest.h"
#include "runtime/format/commit_record.h"

namespace {

void Check(const std::string& text) {
  const auto record = holdfast::format::ParseCommitRecord(text);
  if (!record.ok()) {
    HOLDFAST_EXPECT(record.status().code() == absl::StatusCode::kDataLoss);
    return;
  }
  HOLDFAST_EXPECT(nlohmann::json::accept(text));
  HOLDFAST_EXPECT(record->world_size > 0 && record->manifests.size() == record->world_size);
  HOLDFAST_EXPECT(record->attempt != holdfast::AttemptId{});
  HOLDFAST_EXPECT(record->checkpoint.find('/') == std::string::npos);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  const std::string text(reinterpret_cast<const char*>(data), bytes);
  Check(text);
  Check(holdfast::fuzz::WithSelfDigest(text));
  return 0;
}
