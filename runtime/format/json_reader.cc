#include "runtime/format/json_reader.h"

#include "absl/strings/str_cat.h"
#include "runtime/digest/digest.h"
#include "runtime/format/text.h"

namespace holdfast::format {
namespace {

int HexDigit(char character) {
  if (character >= '0' && character <= '9') return character - '0';
  if (character >= 'a' && character <= 'f') return character - 'a' + 10;
  if (character >= 'A' && character <= 'F') return character - 'A' + 10;
  return -1;
}

/// The number of the four hex digits at the front, -1 without four digits.
int32_t CodeUnit(absl::string_view text) {
  if (text.size() < 4) return -1;
  int32_t unit = 0;
  for (size_t i = 0; i < 4; ++i) {
    const int digit = HexDigit(text[i]);
    if (digit < 0) return -1;
    unit = unit * 16 + digit;
  }
  return unit;
}

void AppendUtf8(uint32_t point, std::string* out) {
  const auto push = [out](uint32_t byte) { out->push_back(static_cast<char>(byte)); };
  if (point < 0x80) {
    push(point);
  } else if (point < 0x800) {
    push(0xc0 | point >> 6);
    push(0x80 | (point & 0x3f));
  } else if (point < 0x10000) {
    push(0xe0 | point >> 12);
    push(0x80 | (point >> 6 & 0x3f));
    push(0x80 | (point & 0x3f));
  } else {
    push(0xf0 | point >> 18);
    push(0x80 | (point >> 12 & 0x3f));
    push(0x80 | (point >> 6 & 0x3f));
    push(0x80 | (point & 0x3f));
  }
}

bool IsDigit(char character) { return character >= '0' && character <= '9'; }

}  // namespace

bool JsonReader::Fail(absl::string_view what) { return Fail(at_, what); }

bool JsonReader::Fail(size_t at, absl::string_view what) {
  if (status_.ok()) status_ = absl::DataLossError(absl::StrCat("byte ", at, ": ", what));
  return false;
}

void JsonReader::SkipBlanks() {
  while (at_ < text_.size() &&
         (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r')) {
    ++at_;
  }
}

bool JsonReader::Take(char expected) {
  if (!status_.ok()) return false;
  SkipBlanks();
  if (at_ >= text_.size() || text_[at_] != expected) {
    return Fail(absl::StrCat("expected '", absl::string_view(&expected, 1), "'"));
  }
  ++at_;
  return true;
}

bool JsonReader::Enter(char bracket) {
  if (!Take(bracket)) return false;
  if (++depth_ > kDepthMax) return Fail("nested too deeply");
  first_ = true;
  return true;
}

bool JsonReader::NextItem(char closing) {
  if (!status_.ok()) return false;
  SkipBlanks();
  if (at_ < text_.size() && text_[at_] == closing) {
    ++at_;
    --depth_;
    first_ = false;  // of the surrounding container, which has at least this item
    return false;
  }
  if (!first_ && !Take(',')) return false;
  first_ = false;
  return true;
}

bool JsonReader::NextElement() { return NextItem(']'); }

bool JsonReader::NextKey(std::string* key) { return NextItem('}') && String(key) && Take(':'); }

int JsonReader::NextField(absl::Span<const absl::string_view> names, uint64_t optional,
                          uint64_t* seen) {
  if (!NextKey(&key_)) {
    for (size_t i = 0; i < names.size() && status_.ok(); ++i) {
      if (((*seen | optional) >> i & 1) == 0) Fail(absl::StrCat("no key \"", names[i], "\""));
    }
    return -1;
  }
  for (size_t i = 0; i < names.size(); ++i) {
    if (key_ != names[i]) continue;
    if ((*seen >> i & 1) != 0) {
      Fail(absl::StrCat("key ", Quoted(key_), " a second time"));
      return -1;
    }
    *seen |= uint64_t{1} << i;
    return static_cast<int>(i);
  }
  Fail(absl::StrCat("unknown key ", Quoted(key_)));
  return -1;
}

bool JsonReader::RawString(absl::string_view* raw) {
  if (!status_.ok()) return false;
  SkipBlanks();
  if (at_ >= text_.size() || text_[at_] != '"') return Fail("expected a string");
  const size_t begin = at_ + 1;
  for (size_t i = begin; i < text_.size(); ++i) {
    const char character = text_[i];
    if (character == '"') {
      *raw = text_.substr(begin, i - begin);
      at_ = i + 1;
      return true;
    }
    if (character == '\\') ++i;
    if (static_cast<unsigned char>(character) < 0x20) {
      return Fail(i, "control character in a string");
    }
  }
  return Fail("string without an end");
}

bool JsonReader::Unescape(absl::string_view raw, std::string* value) {
  const size_t begin = at_ - 1 - raw.size();
  value->clear();
  for (size_t i = 0; i < raw.size();) {
    const size_t plain = raw.find('\\', i);
    if (plain == absl::string_view::npos) {
      value->append(raw.data() + i, raw.size() - i);
      break;
    }
    value->append(raw.data() + i, plain - i);
    i = plain + 2;  // RawString has checked that a character follows
    switch (raw[plain + 1]) {
      case '"':
      case '\\':
      case '/':
        value->push_back(raw[plain + 1]);
        continue;
      case 'b':
        value->push_back('\b');
        continue;
      case 'f':
        value->push_back('\f');
        continue;
      case 'n':
        value->push_back('\n');
        continue;
      case 'r':
        value->push_back('\r');
        continue;
      case 't':
        value->push_back('\t');
        continue;
      case 'u':
        break;
      default:
        return Fail(begin + plain, "unknown escape");
    }
    int32_t point = CodeUnit(raw.substr(i));
    if (point < 0) return Fail(begin + plain, "\\u without four hex digits");
    i += 4;
    if (point >= 0xd800 && point <= 0xdfff) {
      const bool pair =
          point < 0xdc00 && i + 6 <= raw.size() && raw[i] == '\\' && raw[i + 1] == 'u';
      const int32_t low = pair ? CodeUnit(raw.substr(i + 2)) : -1;
      if (low < 0xdc00 || low > 0xdfff) return Fail(begin + plain, "half of a surrogate pair");
      point = 0x10000 + ((point - 0xd800) << 10) + (low - 0xdc00);
      i += 6;
    }
    AppendUtf8(static_cast<uint32_t>(point), value);
  }
  return true;
}

bool JsonReader::String(std::string* value) {
  absl::string_view raw;
  if (!RawString(&raw)) return false;
  if (!IsUtf8(raw)) return Fail("string is not UTF-8");
  return Unescape(raw, value);
}

bool JsonReader::Unsigned(uint64_t* value) {
  if (!status_.ok()) return false;
  SkipBlanks();
  if (at_ >= text_.size() || !IsDigit(text_[at_])) return Fail("expected a whole number");
  const size_t begin = at_;
  uint64_t number = 0;
  for (; at_ < text_.size() && IsDigit(text_[at_]); ++at_) {
    if (__builtin_mul_overflow(number, uint64_t{10}, &number) ||
        __builtin_add_overflow(number, static_cast<uint64_t>(text_[at_] - '0'), &number)) {
      return Fail(begin, "number over 2^64 - 1");
    }
  }
  if (text_[begin] == '0' && at_ - begin > 1) return Fail(begin, "number with a leading zero");
  if (at_ < text_.size() && (text_[at_] == '.' || text_[at_] == 'e' || text_[at_] == 'E')) {
    return Fail(begin, "expected a whole number");
  }
  *value = number;
  return true;
}

bool JsonReader::Unsigned32(uint32_t* value) {
  uint64_t number = 0;
  if (!Unsigned(&number)) return false;
  if (number > std::numeric_limits<uint32_t>::max()) return Fail("number over 2^32 - 1");
  *value = static_cast<uint32_t>(number);
  return true;
}

bool JsonReader::Shape(std::vector<int64_t>* value) {
  value->clear();
  if (!EnterArray()) return false;
  while (NextElement()) {
    uint64_t dimension = 0;
    if (!Unsigned(&dimension)) return false;
    if (dimension > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return Fail("dimension over 2^63 - 1");
    }
    value->push_back(static_cast<int64_t>(dimension));
  }
  return status_.ok();
}

bool JsonReader::TakeWord(absl::string_view word) {
  if (text_.substr(at_, word.size()) != word) return false;
  at_ += word.size();
  return true;
}

bool JsonReader::Bool(bool* value) {
  if (!status_.ok()) return false;
  SkipBlanks();
  if (TakeWord("true")) {
    *value = true;
  } else if (TakeWord("false")) {
    *value = false;
  } else {
    return Fail("expected true or false");
  }
  return true;
}

bool JsonReader::Hex(Digest* value) {
  absl::string_view raw;
  if (!RawString(&raw)) return false;
  if (raw.size() != 32 || !digest::FromHex(raw.data(), value)) {
    return Fail("expected 32 lower-case hex digits");
  }
  return true;
}

bool JsonReader::Hex(AttemptId* value) {
  absl::string_view raw;
  if (!RawString(&raw)) return false;
  if (raw.size() != 32 || !digest::FromHex(raw.data(), value)) {
    return Fail("expected 32 lower-case hex digits");
  }
  return true;
}

bool JsonReader::AtEnd() {
  if (!status_.ok()) return false;
  SkipBlanks();
  if (depth_ != 0 || at_ != text_.size()) return Fail("something after the end");
  return true;
}

}  // namespace holdfast::format
