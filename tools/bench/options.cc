#include "tools/bench/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>

#include "tools/bench/sections.h"
#include "tools/words.h"

namespace holdfast::bench {
namespace {

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

constexpr uint64_t kQuickBytes = uint64_t{512} << 20;
constexpr uint64_t kQuickBallastBytes = uint64_t{1} << 30;
constexpr uint64_t kBytesMin = uint64_t{64} << 20;
constexpr uint64_t kBytesMax = uint64_t{1} << 40;

}  // namespace

std::optional<Options> ParseOptions(int argc, char** argv, int* exit_status) {
  Options options;
  CLI::App app(kAbout, "holdfast-bench");
  app.footer(kMore);
  app.add_option("--dir", options.directory, "Directory to write to; everything made is removed")
      ->check(CLI::ExistingDirectory)
      ->capture_default_str();
  const CLI::Option* const bytes =
      app.add_option("--bytes", options.bytes, "Bytes per sample, as 512M or 4GiB; 4GiB by default")
          ->transform(CLI::AsSizeValue(false))
          ->check(CLI::Range(kBytesMin, kBytesMax));
  const CLI::Option* const pairs =
      app.add_option("--pairs", options.pairs, "Samples per figure")->check(CLI::Range(1u, 1000u));
  const CLI::Option* const calls =
      app.add_option("--calls", options.calls,
                     "Save calls per launcher and size of the trainer, for the stall")
          ->check(CLI::Range(2u, 100000u));
  const CLI::Option* const ballast =
      app.add_option("--ballast", options.ballast_bytes,
                     "Resident memory of the large trainer in the growth figures; 8GiB by default")
          ->transform(CLI::AsSizeValue(false));
  app.add_option("--settle-ms", options.settle_ms, "Pause after deleting");
  app.add_option("--launcher", options.launcher, "For everything but the stall, which has all")
      ->transform(CLI::CheckedTransformer(tools::LauncherWords(), CLI::ignore_case))
      ->default_str("spawn");
  app.add_option("--only", options.only, "Sections, separated by commas")
      ->delimiter(',')
      ->check(CLI::IsMember(SectionNames()));
  app.add_flag("--quick", options.quick,
               "A first impression: 512 MiB, 3 samples, 40 calls, 1 GiB of ballast");
  app.add_flag("--json", options.json, "One JSON document on standard output");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    *exit_status = app.exit(error) == 0 ? kExitOk : kExitUsage;
    return std::nullopt;
  }
  if (options.quick) {
    if (bytes->count() == 0) options.bytes = kQuickBytes;
    if (pairs->count() == 0) options.pairs = 3;
    if (calls->count() == 0) options.calls = 40;
    if (ballast->count() == 0) options.ballast_bytes = kQuickBallastBytes;
    options.settle_ms = std::min(options.settle_ms, 50u);
  }
  return options;
}

}  // namespace holdfast::bench
