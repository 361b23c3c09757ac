#include "tools/words.h"

#include <initializer_list>

#include "absl/strings/escaping.h"
#include "absl/strings/str_replace.h"

namespace holdfast::tools {
namespace {

template <typename Enum>
std::map<std::string, Enum> Words(std::initializer_list<Enum> values) {
  std::map<std::string, Enum> words;
  for (const Enum value : values) words[WordOf(value)] = value;
  return words;
}

}  // namespace

std::map<std::string, Launcher> LauncherWords() {
  return Words({Launcher::kSpawn, Launcher::kFork, Launcher::kPersistent, Launcher::kThread});
}

std::map<std::string, EngineRung> EngineWords() {
  return Words(
      {EngineRung::kAuto, EngineRung::kUringFixed, EngineRung::kUring, EngineRung::kPwrite});
}

std::string Printable(absl::string_view text) {
  // The first pair keeps an escaped backslash in front of a quote whole.
  return absl::StrReplaceAll(absl::Utf8SafeCEscape(text), {{"\\\\", "\\\\"}, {"\\'", "'"}});
}

}  // namespace holdfast::tools
