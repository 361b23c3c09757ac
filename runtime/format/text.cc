#include "runtime/format/text.h"

#include <charconv>
#include <cstddef>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace holdfast::format {
namespace {

/// Length of the UTF-8 sequence at the front of `text`, 0 for an invalid sequence. Source: Unicode
/// 15, table 3-7, "Well-Formed UTF-8 Byte Sequences".
size_t SequenceBytes(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const auto follows = [&](size_t i, unsigned low, unsigned high) {
    return i < text.size() && byte(i) >= low && byte(i) <= high;
  };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first <= 0xdf) return follows(1, 0x80, 0xbf) ? 2 : 0;
  if (first >= 0xe0 && first <= 0xef) {
    const unsigned low = first == 0xe0 ? 0xa0 : 0x80;   // below: a longer form than needed
    const unsigned high = first == 0xed ? 0x9f : 0xbf;  // above: a surrogate
    return follows(1, low, high) && follows(2, 0x80, 0xbf) ? 3 : 0;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    const unsigned low = first == 0xf0 ? 0x90 : 0x80;
    const unsigned high = first == 0xf4 ? 0x8f : 0xbf;  // above: over U+10FFFF
    return follows(1, low, high) && follows(2, 0x80, 0xbf) && follows(3, 0x80, 0xbf) ? 4 : 0;
  }
  return 0;
}

bool NeedsEscape(char character) {
  return static_cast<unsigned char>(character) < 0x20 || character == '"' || character == '\\';
}

/// Length of the front of `text` that needs no escapes in a JSON string. Most names need no
/// escapes, so the loop tests eight bytes at a time.
size_t PlainBytes(absl::string_view text) {
  constexpr uint64_t kOnes = 0x0101010101010101u;
  constexpr uint64_t kHighs = 0x8080808080808080u;
  size_t at = 0;
  for (; at + 8 <= text.size(); at += 8) {
    uint64_t word;
    std::memcpy(&word, text.data() + at, sizeof(word));
    // A byte of `word - low` borrows into its highest bit if the byte is below `low`; a byte of a
    // difference, if the byte is zero.
    const uint64_t quotes = word ^ (kOnes * '"');
    const uint64_t backslashes = word ^ (kOnes * '\\');
    const uint64_t escapes = ((word - kOnes * 0x20) & ~word) | ((quotes - kOnes) & ~quotes) |
                             ((backslashes - kOnes) & ~backslashes);
    if ((escapes & kHighs) != 0) break;
  }
  while (at < text.size() && !NeedsEscape(text[at])) ++at;
  return at;
}

absl::string_view EscapeOf(char character, char (&buffer)[6]) {
  switch (character) {
    case '"':
      return "\\\"";
    case '\\':
      return "\\\\";
    case '\n':
      return "\\n";
    case '\t':
      return "\\t";
    case '\r':
      return "\\r";
    default:
      break;
  }
  constexpr char kHex[] = "0123456789abcdef";
  const unsigned byte = static_cast<unsigned char>(character);
  const char escape[] = {'\\', 'u', '0', '0', kHex[byte >> 4], kHex[byte & 15]};
  std::memcpy(buffer, escape, sizeof(escape));
  return {buffer, sizeof(buffer)};
}

/// Calls `add` with the parts of `text` as a JSON string, between its quotes.
template <typename Add>
void ForEachPart(absl::string_view text, const Add& add) {
  while (true) {
    const size_t plain = PlainBytes(text);
    add(text.substr(0, plain));
    if (plain == text.size()) return;
    char buffer[6];
    add(EscapeOf(text[plain], buffer));
    text.remove_prefix(plain + 1);
  }
}

size_t DigitsOf(uint64_t value) {
  size_t digits = 1;
  for (; value >= 10'000; value /= 10'000) digits += 4;
  return digits + (value >= 10 ? 1 : 0) + (value >= 100 ? 1 : 0) + (value >= 1000 ? 1 : 0);
}

}  // namespace

bool IsUtf8(absl::string_view text) {
  while (!text.empty()) {
    // Most names are ASCII: eight bytes at a time while ASCII.
    while (text.size() >= 8) {
      uint64_t word;
      std::memcpy(&word, text.data(), sizeof(word));
      if ((word & 0x8080808080808080u) != 0) break;
      text.remove_prefix(8);
    }
    if (text.empty()) break;
    const size_t bytes = SequenceBytes(text);
    if (bytes == 0) return false;
    text.remove_prefix(bytes);
  }
  return true;
}

void AppendJsonString(absl::string_view text, std::string* out) {
  out->push_back('"');
  ForEachPart(text, [out](absl::string_view part) { out->append(part.data(), part.size()); });
  out->push_back('"');
}

void AppendNumber(uint64_t value, std::string* out) {
  char digits[20];
  const char* const end = std::to_chars(digits, digits + sizeof(digits), value).ptr;
  out->append(digits, static_cast<size_t>(end - digits));
}

void AppendShape(absl::Span<const int64_t> shape, std::string* out) {
  out->push_back('[');
  bool first = true;
  for (const int64_t dimension : shape) {
    if (!first) out->push_back(',');
    first = false;
    AppendNumber(static_cast<uint64_t>(dimension), out);
  }
  out->push_back(']');
}

size_t JsonStringBytes(absl::string_view text) {
  size_t bytes = 2;
  ForEachPart(text, [&bytes](absl::string_view part) { bytes += part.size(); });
  return bytes;
}

void TextWriter::AddJsonString(absl::string_view text) {
  Add("\"");
  ForEachPart(text, [this](absl::string_view part) { Add(part); });
  Add("\"");
}

void TextWriter::AddShape(absl::Span<const int64_t> shape) {
  Add("[");
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i != 0) Add(",");
    AddNumber(static_cast<uint64_t>(shape[i]));
  }
  Add("]");
}

void TextCounter::AddNumber(uint64_t value) { bytes_ += DigitsOf(value); }

void TextCounter::AddShape(absl::Span<const int64_t> shape) {
  bytes_ += shape.empty() ? 2 : 1 + shape.size();
  for (const int64_t dimension : shape) AddNumber(static_cast<uint64_t>(dimension));
}

std::string Quoted(absl::string_view name) {
  constexpr size_t kBytesMax = 200;
  const bool cut = name.size() > kBytesMax;
  if (cut) {
    name = name.substr(0, kBytesMax);
    // Cut between sequences: a message stays UTF-8.
    while (!name.empty() && (static_cast<unsigned char>(name.back()) & 0xc0) == 0x80) {
      name.remove_suffix(1);
    }
    if (!name.empty() && static_cast<unsigned char>(name.back()) >= 0xc0) name.remove_suffix(1);
  }
  const std::string text = IsUtf8(name) ? absl::Utf8SafeCHexEscape(name) : absl::CHexEscape(name);
  return absl::StrCat("\"", text, cut ? "..." : "", "\"");
}

}  // namespace holdfast::format
