// holdfast-bench: measures, side by side and in one run.
#include <sys/utsname.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "holdfast/pod.h"
#include "tools/bench/figures.h"
#include "tools/bench/memory.h"
#include "tools/bench/options.h"
#include "tools/bench/scratch.h"
#include "tools/bench/sections.h"

namespace holdfast::bench {
namespace {

/// The largest file, twice: the one that is measured and the one that is being deleted.
uint64_t DiskNeeded(const Options& options) { return options.bytes / 4 * 9; }

void AddFacts(const Options& options, const std::string& command, Figures* figures) {
  utsname machine = {};
  uname(&machine);
  figures->AddFact("machine.kernel", machine.release);
  figures->AddFact("machine.architecture", machine.machine);
  figures->AddFact("machine.cpus", absl::StrCat(std::thread::hardware_concurrency()));
  figures->AddFact("run.bytes", absl::StrCat(options.bytes));
  figures->AddFact("run.pairs", absl::StrCat(options.pairs));
  figures->AddFact("run.launcher", WordOf(options.launcher));
  figures->AddFact("run.command", command);
}

int Run(const Options& options, const std::string& command) {
  const absl::StatusOr<Scratch> scratch =
      Scratch::Make(options.directory, DiskNeeded(options), options.settle_ms);
  if (!scratch.ok()) {
    std::fprintf(stderr, "holdfast-bench: %s\n", scratch.status().ToString().c_str());
    return kExitFailed;
  }
  Figures figures;
  AddFacts(options, command, &figures);
  const Bench bench = {.options = options, .scratch = *scratch, .figures = figures};
  int exit_status = kExitOk;
  for (const Section& section : Sections()) {
    const bool wanted = options.only.empty() || std::find(options.only.begin(), options.only.end(),
                                                          section.name) != options.only.end();
    if (!wanted) continue;
    const absl::Status status = section.run(bench);
    scratch->Empty();
    ShowStep("");
    if (status.ok()) continue;
    std::fprintf(stderr, "holdfast-bench: %s: %s\n", section.name, status.ToString().c_str());
    exit_status = kExitFailed;
  }
  figures.FillMissing(options.only.empty() ? "its section failed" : "its section was not run");
  std::fputs(figures.Table().c_str(), options.json ? stderr : stdout);
  if (options.json) std::fputs(figures.Json().c_str(), stdout);
  return exit_status;
}

}  // namespace
}  // namespace holdfast::bench

int main(int argc, char** argv) {
  int exit_status = 0;
  const std::optional<holdfast::bench::Options> options =
      holdfast::bench::ParseOptions(argc, argv, &exit_status);
  if (!options.has_value()) return exit_status;
  std::string command = "holdfast-bench";
  for (int i = 1; i < argc; ++i) command += std::string(" ") + argv[i];
  return holdfast::bench::Run(*options, command);
}
