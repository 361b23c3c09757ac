// The words that programs use on their command lines and in their output for the runtime's choices.
#ifndef HOLDFAST_TOOLS_WORDS_H_
#define HOLDFAST_TOOLS_WORDS_H_

#include <map>
#include <string>

#include "holdfast/pod.h"

namespace holdfast::tools {

/// "spawn", "fork", "persistent", "thread".
const char* LauncherWord(Launcher launcher);
/// As in the manifest: "io_uring-fixed", "io_uring", "pwrite"; "auto" before one was chosen.
const char* EngineWord(EngineRung engine);
/// "hugetlb", "tmpfs-huge", "madvise-huge", "small"; "auto" before one was chosen.
const char* PagesWord(PageRung pages);
/// "proven", "claimed", "no".
const char* DirectWord(DirectIo direct_io);

/// The same words as a command line takes them.
std::map<std::string, Launcher> LauncherWords();
std::map<std::string, EngineRung> EngineWords();
std::map<std::string, PageRung> PagesWords();

}  // namespace holdfast::tools

#endif  // HOLDFAST_TOOLS_WORDS_H_
