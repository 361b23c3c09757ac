// holdfast-bench: measures Holdfast and the machine side by side, in one run.
#include <sys/utsname.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "holdfast/version.h"
#include "tools/bench/bench.h"
#include "tools/bench/workload.h"
#include "tools/words.h"

namespace holdfast::bench {

void ShowStep(const std::string& text) {
  if (isatty(STDERR_FILENO) == 0) return;
  std::fprintf(stderr, "\r\x1b[K%s", text.c_str());
  std::fflush(stderr);
}

namespace {

constexpr int kExitOk = 0;
constexpr int kExitFailed = 3;
constexpr int kExitUsage = 64;

struct Section {
  const char* name;
  absl::Status (*run)(const Bench& bench);
};
constexpr Section kSections[] = {{"write", RunWrite},     {"read", RunRead}, {"copy", RunCopy},
                                 {"handoff", RunHandoff}, {"call", RunCall}, {"memory", RunMemory}};

constexpr char kAbout[] =
    "Measures Holdfast on this machine, side by side with the limits of the disk and the memory.\n"
    "\n"
    "What is compared is measured in turn, in one run, with old files deleted and settled "
    "between.\n"
    "Figures are medians, with their smallest and largest value.";

constexpr char kMore[] =
    "With --json a flat document on standard output (the table then goes to standard error). Each\n"
    "key KEY is the median; KEY.min, KEY.max and KEY.samples are its spread, KEY.launcher,\n"
    "KEY.engine and KEY.pages what it was measured with. What could not be measured is null, and\n"
    "KEY.reason says why.\n"
    "\n"
    "Exit status: 0 measured; 3 a section failed; 64 the command line is wrong.\n"
    "\n"
    "Examples:\n"
    "  holdfast-bench --dir /data --json > figures.json     about 15 minutes, 13 GiB of memory\n"
    "  holdfast-bench --dir /data --quick                   about a minute\n"
    "  holdfast-bench --dir /data --only write,read --bytes 2GiB\n";

void Declare(CLI::App* app, Options* options) {
  constexpr uint64_t kBytesMin = uint64_t{64} << 20;
  constexpr uint64_t kBytesMax = uint64_t{1} << 40;
  std::vector<std::string> sections;
  for (const Section& section : kSections) sections.emplace_back(section.name);
  app->add_option("--dir", options->directory, "Directory to write to; everything made is removed")
      ->check(CLI::ExistingDirectory)
      ->capture_default_str();
  app->add_option("--bytes", options->bytes, "Bytes per sample, as 512M or 4GiB; 4GiB by default")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(kBytesMin, kBytesMax));
  app->add_option("--pairs", options->pairs, "Samples per figure")->check(CLI::Range(1u, 1000u));
  app->add_option("--calls", options->calls,
                  "Save calls per launcher and size of the trainer, for the stall")
      ->check(CLI::Range(2u, 100000u));
  app->add_option("--ballast", options->ballast_bytes,
                  "Resident memory of the large trainer in the growth figures; 8GiB by default")
      ->transform(CLI::AsSizeValue(false));
  app->add_option("--settle-ms", options->settle_ms, "Pause after deleting");
  app->add_option("--launcher", options->launcher, "For everything but the stall, which has all")
      ->transform(CLI::CheckedTransformer(tools::LauncherWords(), CLI::ignore_case))
      ->default_str("spawn");
  app->add_option("--only", options->only, "Sections, separated by commas")
      ->delimiter(',')
      ->check(CLI::IsMember(sections));
  app->add_flag("--quick", options->quick,
                "A first impression: 512 MiB, 3 samples, 40 calls, 1 GiB of ballast");
  app->add_flag("--json", options->json, "One JSON document on standard output");
}

/// Applies --quick, except for options of the command line.
void MakeQuick(const CLI::App& app, Options* options) {
  if (app.count("--bytes") == 0) options->bytes = uint64_t{512} << 20;
  if (app.count("--pairs") == 0) options->pairs = 3;
  if (app.count("--calls") == 0) options->calls = 40;
  if (app.count("--ballast") == 0) options->ballast_bytes = uint64_t{1} << 30;
  options->settle_ms = std::min(options->settle_ms, 50u);
}

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
  // Twice the largest file: the measured file, and the file that is being deleted.
  const uint64_t disk_needed = options.bytes / 4 * 9;
  const absl::StatusOr<Scratch> scratch =
      Scratch::Make(options.directory, disk_needed, options.settle_ms);
  if (!scratch.ok()) {
    std::fprintf(stderr, "holdfast-bench: %s\n", scratch.status().ToString().c_str());
    return kExitFailed;
  }
  Figures figures;
  AddFacts(options, command, &figures);
  const Bench bench = {.options = options, .scratch = *scratch, .figures = figures};
  int exit_status = kExitOk;
  for (const Section& section : kSections) {
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

int Main(int argc, char** argv) {
  Options options;
  CLI::App app(kAbout, "holdfast-bench");
  app.footer(kMore);
  app.set_version_flag("--version", absl::StrCat("holdfast-bench ", Version()));
  Declare(&app, &options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitOk : kExitUsage;
  }
  if (options.quick) MakeQuick(app, &options);
  std::string command = "holdfast-bench";
  for (int i = 1; i < argc; ++i) command += std::string(" ") + argv[i];
  return Run(options, command);
}

}  // namespace
}  // namespace holdfast::bench

int main(int argc, char** argv) { return holdfast::bench::Main(argc, argv); }
