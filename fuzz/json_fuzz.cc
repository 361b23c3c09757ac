// The JSON reader against nlohmann::json: whatever ours accepts, the other accepts with the same
// value; and what our writer writes, both read back.
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fuzz/expect.h"
#include "runtime/format/json_reader.h"
#include "runtime/format/text.h"

namespace {

using holdfast::format::JsonReader;

void CompareStrings(const std::string& text) {
  JsonReader reader(text);
  std::string value;
  if (!reader.String(&value) || !reader.AtEnd()) return;
  const auto other = nlohmann::json::parse(text, nullptr, false);
  HOLDFAST_EXPECT(other.is_string() && other.get<std::string>() == value);
}

void CompareShapes(const std::string& text) {
  JsonReader reader(text);
  std::vector<int64_t> value;
  if (!reader.Shape(&value) || !reader.AtEnd()) return;
  const auto other = nlohmann::json::parse(text, nullptr, false);
  HOLDFAST_EXPECT(other.is_array() && other.get<std::vector<int64_t>>() == value);
}

void CompareObjects(const std::string& text) {
  JsonReader reader(text);
  if (!reader.EnterObject()) return;
  std::string key;
  std::vector<std::pair<std::string, uint64_t>> entries;
  while (reader.NextKey(&key)) {
    uint64_t value = 0;
    if (reader.Unsigned(&value)) entries.emplace_back(key, value);
  }
  if (!reader.AtEnd()) return;
  const auto other = nlohmann::json::parse(text, nullptr, false);
  HOLDFAST_EXPECT(other.is_object() && other.size() <= entries.size());
  for (const auto& [name, value] : entries) HOLDFAST_EXPECT(other.contains(name));
}

void RoundTrip(const std::string& text) {
  if (!holdfast::format::IsUtf8(text)) return;
  std::string json;
  holdfast::format::AppendJsonString(text, &json);
  JsonReader reader(json);
  std::string value;
  HOLDFAST_EXPECT(reader.String(&value) && reader.AtEnd() && value == text);
  CompareStrings(json);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  const std::string text(reinterpret_cast<const char*>(data), bytes);
  CompareStrings(text);
  CompareStrings("\"" + text + "\"");
  CompareShapes(text);
  CompareObjects(text);
  RoundTrip(text);
  return 0;
}
