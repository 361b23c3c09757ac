// Text in headers, manifests and messages: UTF-8, JSON strings, quoted names.
#ifndef HOLDFAST_RUNTIME_FORMAT_TEXT_H_
#define HOLDFAST_RUNTIME_FORMAT_TEXT_H_

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace holdfast::format {

/// True if `text` is UTF-8 as in the Unicode standard: shortest forms only, no surrogates, nothing
/// over U+10FFFF.
bool IsUtf8(absl::string_view text);

/// Appends `text`, which is UTF-8, as a JSON string with quotes. Escapes quotes, backslashes and
/// control characters only.
void AppendJsonString(absl::string_view text, std::string* out);

/// Appends `value` in decimal.
void AppendNumber(uint64_t value, std::string* out);

/// Appends "[2,3]"; dimensions are not negative.
void AppendShape(absl::Span<const int64_t> shape, std::string* out);

/// Length of `text` as AppendJsonString writes it, quotes included.
size_t JsonStringBytes(absl::string_view text);

/// Writes text into memory of sufficient size.
class TextWriter {
 public:
  explicit TextWriter(char* at) : at_(at) {}

  void Add(absl::string_view text) {
    std::memcpy(at_, text.data(), text.size());
    at_ += text.size();
  }
  void AddNumber(uint64_t value) { at_ = std::to_chars(at_, at_ + kDigitsMax, value).ptr; }
  void AddJsonString(absl::string_view text);
  void AddShape(absl::Span<const int64_t> shape);
  void AddBlanks(size_t count) {
    std::memset(at_, ' ', count);
    at_ += count;
  }
  char* at() const { return at_; }

 private:
  static constexpr size_t kDigitsMax = 20;
  char* at_;
};

/// Counts the bytes that a TextWriter would write.
class TextCounter {
 public:
  void Add(absl::string_view text) { bytes_ += text.size(); }
  void AddNumber(uint64_t value);
  void AddJsonString(absl::string_view text) { bytes_ += JsonStringBytes(text); }
  void AddShape(absl::Span<const int64_t> shape);
  void AddBlanks(uint64_t count) { bytes_ += count; }
  uint64_t bytes() const { return bytes_; }

 private:
  uint64_t bytes_ = 0;
};

/// `"name"` for a message: control characters escaped, cut after 200 bytes.
std::string Quoted(absl::string_view name);

}  // namespace holdfast::format

#endif  // HOLDFAST_RUNTIME_FORMAT_TEXT_H_
