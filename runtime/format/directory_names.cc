#include "runtime/format/directory_names.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "runtime/digest/digest.h"

namespace holdfast::format {
namespace {

struct Kind {
  DirectoryKind kind;
  absl::string_view infix;
  bool hidden = false;
};
// A complete checkpoint awaiting removal must not appear in listings.
constexpr Kind kKinds[] = {{DirectoryKind::kPartial, ".partial-"},
                           {DirectoryKind::kFenced, ".fenced-", true},
                           {DirectoryKind::kRetired, ".retired-", true}};

}  // namespace

DirectoryName ParseDirectoryName(absl::string_view name) {
  DirectoryName parsed;
  parsed.checkpoint = std::string(name);
  if (name.size() <= digest::kHexDigits) return parsed;
  const absl::string_view digits = name.substr(name.size() - digest::kHexDigits);
  const absl::string_view rest = name.substr(0, name.size() - digest::kHexDigits);
  AttemptId attempt;
  if (!digest::FromHex(digits.data(), &attempt)) return parsed;
  for (const Kind& kind : kKinds) {
    if (rest.size() <= kind.infix.size() || !absl::EndsWith(rest, kind.infix)) continue;
    const size_t length = rest.size() - kind.infix.size();
    const size_t dot = kind.hidden && length > 1 && rest[0] == '.' ? 1 : 0;
    parsed.checkpoint = std::string(rest.substr(dot, length - dot));
    parsed.kind = kind.kind;
    parsed.attempt = attempt;
    return parsed;
  }
  return parsed;
}

bool IsUncommittedName(absl::string_view name) {
  return ParseDirectoryName(name).kind != DirectoryKind::kFinal;
}

std::string FormatDirectoryName(const DirectoryName& name) {
  for (const Kind& kind : kKinds) {
    if (kind.kind != name.kind) continue;
    char digits[digest::kHexDigits];
    digest::ToHex(name.attempt, digits);
    std::string formatted =
        absl::StrCat(name.checkpoint, kind.infix, absl::string_view(digits, digest::kHexDigits));
    if (kind.hidden && formatted.size() + 1 < kNameBytes) formatted.insert(0, 1, '.');
    return formatted;
  }
  return name.checkpoint;
}

std::string SeriesOf(absl::string_view checkpoint) {
  constexpr char kDigits[] = "0123456789";
  const size_t last = checkpoint.find_last_of(kDigits);
  if (last == absl::string_view::npos) return std::string(checkpoint);
  const size_t before = checkpoint.find_last_not_of(kDigits, last);
  const size_t first = before == absl::string_view::npos ? 0 : before + 1;
  return absl::StrCat(checkpoint.substr(0, first), "{}", checkpoint.substr(last + 1));
}

std::string PartialName(absl::string_view checkpoint, const AttemptId& attempt) {
  return FormatDirectoryName(
      {.checkpoint = std::string(checkpoint), .kind = DirectoryKind::kPartial, .attempt = attempt});
}

}  // namespace holdfast::format
