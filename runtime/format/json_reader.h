// A strict, bounded reader of a small subset of JSON: objects with known keys, arrays, strings,
// booleans and whole numbers.
//
// A pull reader: a parser reads like the format, an error has its byte, and only the caller's
// values are allocated. The reader accepts a subset of RFC 8259 (tests compare with
// nlohmann::json): no fractions, exponents, signs or null, no lone surrogates, UTF-8 checked, no
// nesting beyond kDepthMax.
#ifndef HOLDFAST_RUNTIME_FORMAT_JSON_READER_H_
#define HOLDFAST_RUNTIME_FORMAT_JSON_READER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "holdfast/pod.h"

namespace holdfast::format {

/// The first error sticks: every later call does nothing and returns false (or -1). So a parser
/// checks once, at the end of a loop.
class JsonReader {
 public:
  static constexpr int kDepthMax = 8;

  explicit JsonReader(absl::string_view text) : text_(text) {}

  bool EnterObject() { return Enter('{'); }
  bool EnterArray() { return Enter('['); }

  /// Moves to the next element of the array. Returns false at the array's end, which is consumed.
  bool NextElement();

  /// Reads the next key and its colon. Returns false at the object's end, which is consumed. The
  /// caller checks for duplicates.
  bool NextKey(std::string* key);

  /// As NextKey, for an object with known keys. Returns the index of the next key in `names`, -1 at
  /// the object's end. An unknown key, a repeated key, or a missing key at the end (unless its bit
  /// is in `optional`) is an error. `seen` starts as 0.
  int NextField(absl::Span<const absl::string_view> names, uint64_t optional, uint64_t* seen);

  bool String(std::string* value);
  bool Unsigned(uint64_t* value);
  bool Unsigned32(uint32_t* value);
  bool Bool(bool* value);
  /// An array of whole numbers that are not negative.
  bool Shape(std::vector<int64_t>* value);
  /// A string of exactly 32 lower-case hex digits.
  bool Hex(Digest* value);
  bool Hex(AttemptId* value);

  /// True if only blanks are left.
  bool AtEnd();

  /// Records an error here. \error kDataLoss "byte 17: WHAT".
  bool Fail(absl::string_view what);

  const absl::Status& status() const { return status_; }

 private:
  bool Enter(char bracket);
  /// Handles commas and the closing bracket. Returns true if another item follows.
  bool NextItem(char closing);
  void SkipBlanks();
  bool Take(char expected);
  bool TakeWord(absl::string_view word);
  /// The characters between the quotes, with their escapes.
  bool RawString(absl::string_view* raw);
  bool Unescape(absl::string_view raw, std::string* value);
  bool Fail(size_t at, absl::string_view what);

  absl::string_view text_;
  size_t at_ = 0;
  int depth_ = 0;
  bool first_ = false;  // The next item is the first of its array or object.
  std::string key_;
  absl::Status status_;
};

}  // namespace holdfast::format

#endif  // HOLDFAST_RUNTIME_FORMAT_JSON_READER_H_
