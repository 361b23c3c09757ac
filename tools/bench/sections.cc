#include "tools/bench/sections.h"

#include <unistd.h>

#include <cstdio>

namespace holdfast::bench {

const std::vector<Section>& Sections() {
  static const std::vector<Section> kSections = {{"write", RunWrite},
                                                 {"read", RunRead},
                                                 {"copy", RunCopy},
                                                 {"handoff", RunHandoff},
                                                 {"memory", RunMemory}};
  return kSections;
}

std::vector<std::string> SectionNames() {
  std::vector<std::string> names;
  for (const Section& section : Sections()) names.emplace_back(section.name);
  return names;
}

void ShowStep(const std::string& text) {
  if (isatty(STDERR_FILENO) == 0) return;
  std::fprintf(stderr, "\r\x1b[K%s", text.c_str());
  std::fflush(stderr);
}

}  // namespace holdfast::bench
