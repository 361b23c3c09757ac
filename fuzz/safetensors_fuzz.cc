// ParseSafetensors on a file of exactly the input's bytes, and on the input as the JSON of a header
// in front of so much data as it asks for.
#include <cstddef>
#include <cstdint>
#include <string>

#include "fuzz/expect.h"
#include "runtime/format/safetensors.h"

namespace {

void Check(const std::string& prefix, uint64_t file_bytes) {
  const auto header = holdfast::format::ParseSafetensors(prefix, file_bytes);
  if (!header.ok()) return;
  uint64_t end = header->data_begin;
  for (const holdfast::PlannedTensor& tensor : header->tensors) {
    HOLDFAST_EXPECT(tensor.begin == end && tensor.end >= tensor.begin);
    end = tensor.end;
  }
  HOLDFAST_EXPECT(end == file_bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  const std::string text(reinterpret_cast<const char*>(data), bytes);
  const auto length = holdfast::format::HeaderLength(text, text.size());
  if (length.ok()) {
    HOLDFAST_EXPECT(*length + 8 <= text.size());
    Check(text.substr(0, 8 + *length), text.size());
  }
  std::string prefix(8, '\0');
  for (size_t i = 0; i < 8; ++i) prefix[i] = static_cast<char>(text.size() >> (8 * i));
  for (const uint64_t data_bytes : {0, 4, 11, 30}) {
    Check(prefix + text, 8 + text.size() + data_bytes);
  }
  return 0;
}
