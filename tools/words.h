// Words of command lines for the runtime's choices.
#ifndef HOLDFAST_TOOLS_WORDS_H_
#define HOLDFAST_TOOLS_WORDS_H_

#include <map>
#include <string>

#include "holdfast/pod.h"

namespace holdfast::tools {

/// WordOf, backwards.
std::map<std::string, Launcher> LauncherWords();
std::map<std::string, EngineRung> EngineWords();

}  // namespace holdfast::tools

#endif  // HOLDFAST_TOOLS_WORDS_H_
