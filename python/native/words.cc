// Text forms of identifiers and choices.
#include <charconv>
#include <cstdio>
#include <initializer_list>
#include <string>

#include "absl/status/status.h"
#include "bindings.h"
#include "status.h"

namespace nb = nanobind;

namespace holdfast::python {
namespace {

constexpr size_t kHalfDigits = 16;
constexpr int kHex = 16;

template <typename Enum>
Enum Find(const char* option, const std::string& word, std::initializer_list<Enum> values) {
  std::string known;
  for (const Enum value : values) {
    if (word == WordOf(value)) return value;
    known += (known.empty() ? "" : ", ") + std::string(WordOf(value));
  }
  const std::string message = std::string(option) + " \"" + word + "\": there is only " + known;
  Raise(absl::InvalidArgumentError(message));
}

}  // namespace

std::string AttemptText(const AttemptId& attempt) {
  if (attempt == AttemptId()) return "";
  char text[2 * kHalfDigits + 1];
  std::snprintf(text, sizeof(text), "%016llx%016llx",
                static_cast<unsigned long long>(attempt.high),  // NOLINT(google-runtime-int)
                static_cast<unsigned long long>(attempt.low));  // NOLINT(google-runtime-int)
  return text;
}

AttemptId AttemptOf(const std::string& text) {
  AttemptId attempt;
  if (text.empty()) return attempt;
  const char* const middle = text.data() + kHalfDigits;
  const char* const end = text.data() + text.size();
  if (text.size() != 2 * kHalfDigits ||
      std::from_chars(text.data(), middle, attempt.high, kHex).ptr != middle ||
      std::from_chars(middle, end, attempt.low, kHex).ptr != end) {
    Raise(absl::InvalidArgumentError("attempt: 32 hex digits are expected"));
  }
  return attempt;
}

Launcher LauncherOf(const std::string& word) {
  return Find("launcher", word,
              {Launcher::kSpawn, Launcher::kPersistent, Launcher::kFork, Launcher::kThread});
}

EngineRung EngineOf(const std::string& word) {
  return Find(
      "engine", word,
      {EngineRung::kAuto, EngineRung::kUringFixed, EngineRung::kUring, EngineRung::kPwrite});
}

PageRung PagesOf(const std::string& word) {
  return Find("pages", word,
              {PageRung::kAuto, PageRung::kHugetlb, PageRung::kTmpfsHuge, PageRung::kMadviseHuge,
               PageRung::kSmall});
}

}  // namespace holdfast::python
