#include "tools/words.h"

namespace holdfast::tools {

const char* LauncherWord(Launcher launcher) {
  switch (launcher) {
    case Launcher::kSpawn:
      return "spawn";
    case Launcher::kFork:
      return "fork";
    case Launcher::kPersistent:
      return "persistent";
    case Launcher::kThread:
      return "thread";
  }
  return "unknown";
}

const char* EngineWord(EngineRung engine) {
  switch (engine) {
    case EngineRung::kUringFixed:
      return "io_uring-fixed";
    case EngineRung::kUring:
      return "io_uring";
    case EngineRung::kPwrite:
      return "pwrite";
    case EngineRung::kAuto:
      break;
  }
  return "auto";
}

const char* PagesWord(PageRung pages) {
  switch (pages) {
    case PageRung::kHugetlb:
      return "hugetlb";
    case PageRung::kTmpfsHuge:
      return "tmpfs-huge";
    case PageRung::kMadviseHuge:
      return "madvise-huge";
    case PageRung::kSmall:
      return "small";
    case PageRung::kAuto:
      break;
  }
  return "auto";
}

const char* DirectWord(DirectIo direct_io) {
  switch (direct_io) {
    case DirectIo::kProven:
      return "proven";
    case DirectIo::kClaimed:
      return "claimed";
    case DirectIo::kNo:
      break;
  }
  return "no";
}

std::map<std::string, Launcher> LauncherWords() {
  return {{"spawn", Launcher::kSpawn},
          {"fork", Launcher::kFork},
          {"persistent", Launcher::kPersistent},
          {"thread", Launcher::kThread}};
}

std::map<std::string, EngineRung> EngineWords() {
  return {{"auto", EngineRung::kAuto},
          {"io_uring-fixed", EngineRung::kUringFixed},
          {"io_uring", EngineRung::kUring},
          {"pwrite", EngineRung::kPwrite}};
}

std::map<std::string, PageRung> PagesWords() {
  return {{"auto", PageRung::kAuto},
          {"hugetlb", PageRung::kHugetlb},
          {"tmpfs-huge", PageRung::kTmpfsHuge},
          {"madvise-huge", PageRung::kMadviseHuge},
          {"small", PageRung::kSmall}};
}

}  // namespace holdfast::tools
