// Words of command lines for the runtime's choices, and text from files.
#ifndef HOLDFAST_TOOLS_WORDS_H_
#define HOLDFAST_TOOLS_WORDS_H_

#include <map>
#include <string>

#include "absl/strings/string_view.h"
#include "holdfast/pod.h"

namespace holdfast::tools {

/// WordOf, backwards.
std::map<std::string, Launcher> LauncherWords();
std::map<std::string, EngineRung> EngineWords();

/// Returns names and reasons from files, which may be hostile, with control characters escaped.
/// Single quotes stay, because the programs quote with double quotes.
std::string Printable(absl::string_view text);

}  // namespace holdfast::tools

#endif  // HOLDFAST_TOOLS_WORDS_H_
