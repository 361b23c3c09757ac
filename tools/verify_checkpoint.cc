// verify-checkpoint: proves checkpoints on disk again, any day.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "holdfast/verify.h"
#include "holdfast/version.h"
#include "tools/progress_bar.h"
#include "tools/standard_output.h"
#include "tools/verify_output.h"
#include "tools/words.h"

namespace holdfast::tools {
namespace {

constexpr int kExitUsage = 64;  // EX_USAGE of sysexits.h

constexpr char kDescription[] =
    "Verifies checkpoints: reads every byte again and compares it with the digests that were taken "
    "when it was saved.\n\n"
    "A PATH is a checkpoint directory (all its ranks), one file of it, or a file or directory that "
    "another program\nwrote (safetensors; torch.save zips, .distcp files): there, what the format "
    "allows is checked, and the report says\nthat this is less. Of any other directory all "
    "checkpoints below are verified. Nothing is ever executed or unpickled.\n\n"
    "The command holdfast verify also takes URLs that a drain fills, with the options --storage "
    "KEY=VALUE,\n--storage-file FILE and --json.";

constexpr char kFooter[] =
    "Output: one line per fault (file, tensor, byte range, reason, expected and found), then one "
    "line per checkpoint.\n"
    "Directories of saves that were never committed are listed below a directory, and not "
    "verified.\n"
    "\n"
    "Exit status:\n"
    "  0  sound       everything is there and is what was saved\n"
    "  1  corrupt     bytes differ, sizes differ, or a manifest does not parse\n"
    "  2  incomplete  files or manifests of ranks are missing, or the save was never committed\n"
    "  3  unreadable  it could not be read, or its format is not known: nothing is proven\n"
    "  64 usage       the command line was wrong\n"
    "With several checkpoints it is that of the worst: corrupt, then unreadable, then incomplete, "
    "then "
    "sound.\n"
    "\n"
    "--json prints one document with the keys: program, version, verdict, exit_status, "
    "uncommitted (directories), and paths, a list with one\n"
    "entry per checkpoint: path, verdict, checked, note, bytes, files, tensors, seconds, "
    "bytes_per_second, step, attempt, engine,\n"
    "direct_io, faults_total, and faults, a list of: file, tensor, begin, end, reason, expected, "
    "found.\n"
    "Reasons: digest, crc32, size, missing, manifest, attempt, step, world size, structure, "
    "partial, read, adopt.\n"
    "\n"
    "Examples:\n"
    "  verify-checkpoint /checkpoints/step-1200\n"
    "  verify-checkpoint --json /checkpoints | jq '.paths[] | select(.verdict != "
    "\"sound\")'\n"
    "  verify-checkpoint --adopt downloaded-model/   # from now on every byte of it can be proven";

struct Arguments {
  std::vector<std::string> paths;
  bool json = false;
  bool adopt = false;
  bool quiet = false;
  bool buffered = false;
  VerifyOptions options;
};

void Declare(CLI::App* app, Arguments* arguments) {
  app->footer(kFooter);
  app->set_version_flag("--version", absl::StrCat("verify-checkpoint ", Version()));
  app->add_option("PATH", arguments->paths, "Checkpoint directories or files")->required();
  app->add_flag("--json", arguments->json, "Print one JSON document instead of lines");
  app->add_flag("--adopt", arguments->adopt,
                "Write a manifest for files of other programs, from what is on disk now, then "
                "verify; refuses what an unfinished save left");
  app->add_flag("-q,--quiet", arguments->quiet, "Print faults only, and no progress bar");
  app->add_option("--threads", arguments->options.threads,
                  "Threads that compute digests; 0 is one per CPU, at most 4")
      ->capture_default_str();
  app->add_option("--faults-max", arguments->options.faults_max,
                  "Faults that are listed per PATH; more are counted")
      ->capture_default_str();
  app->add_option("--engine", arguments->options.engine,
                  "How to read: auto takes the best that works here; io_uring-fixed, io_uring, "
                  "pwrite (threads)")
      ->transform(CLI::CheckedTransformer(EngineWords()).description(""))
      ->option_text("ENGINE");
  app->add_flag("--buffered", arguments->buffered,
                "Read through the page cache; shows what programs see, not what is on disk");
}

/// Reports a path that could not be adopted.
VerifyReport NotAdopted(const std::string& path, const absl::Status& status) {
  VerifyReport report;
  report.path = path;
  report.checked = "nothing";
  switch (status.code()) {
    case absl::StatusCode::kDataLoss:
      report.verdict = Verdict::kCorrupt;
      break;
    case absl::StatusCode::kFailedPrecondition:
      report.verdict = Verdict::kIncomplete;
      break;
    default:
      report.verdict = Verdict::kUnreadable;
      break;
  }
  report.faults_total = 1;
  report.faults.push_back({.reason = "adopt",
                           .expected = "files that can be adopted",
                           .found = std::string(status.message())});
  return report;
}

absl::StatusOr<VerifyReport> Check(const std::string& path, const Arguments& arguments) {
  if (arguments.adopt) {
    const absl::Status adopted = Adopt(path);
    if (!adopted.ok()) return NotAdopted(path, adopted);
  }
  ProgressBar bar(path, stderr, !arguments.quiet);
  VerifyOptions options = arguments.options;
  options.direct_io = !arguments.buffered;
  options.progress = [&bar](uint64_t done, uint64_t total) { bar.Update(done, total); };
  return Verify(path, options);
}

/// All checkpoints at the paths of the command line.
FoundCheckpoints Find(const Arguments& arguments) {
  if (arguments.adopt) return {.checkpoints = arguments.paths};
  FoundCheckpoints all;
  for (const std::string& path : arguments.paths) {
    const FoundCheckpoints found = FindCheckpoints(path);
    all.checkpoints.insert(all.checkpoints.end(), found.checkpoints.begin(),
                           found.checkpoints.end());
    all.uncommitted.insert(all.uncommitted.end(), found.uncommitted.begin(),
                           found.uncommitted.end());
  }
  return all;
}

/// True for a checkpoint that was found and that retention has removed since.
bool RemovedMeanwhile(const VerifyReport& report, const Arguments& arguments) {
  std::error_code error;
  return report.verdict != Verdict::kSound &&
         std::find(arguments.paths.begin(), arguments.paths.end(), report.path) ==
             arguments.paths.end() &&
         !std::filesystem::exists(report.path, error) && !error;
}

int Run(const Arguments& arguments) {
  std::vector<VerifyReport> reports;
  Verdict worst = Verdict::kSound;
  const FoundCheckpoints found = Find(arguments);
  for (const std::string& path : found.checkpoints) {
    absl::StatusOr<VerifyReport> report = Check(path, arguments);
    if (!report.ok()) {
      std::fprintf(stderr, "verify-checkpoint: %s\n", report.status().ToString().c_str());
      return kExitUsage;
    }
    if (RemovedMeanwhile(*report, arguments)) continue;
    worst = Worse(worst, report->verdict);
    if (!arguments.json) {
      std::fputs(FaultLines(*report).c_str(), stdout);
      if (!arguments.quiet) std::fputs(ReportLines(*report).c_str(), stdout);
      std::fflush(stdout);
    }
    reports.push_back(*std::move(report));
  }
  const int exit_status = static_cast<int>(worst);
  if (arguments.json) {
    std::fputs(Json(reports, found.uncommitted, exit_status).c_str(), stdout);
  } else if (!arguments.quiet) {
    std::fputs(UncommittedLines(found.uncommitted).c_str(), stdout);
    if (reports.size() > 1) std::fputs(SummaryLine(reports).c_str(), stdout);
  }
  return ExitStatus("verify-checkpoint", exit_status,
                    static_cast<int>(Worse(worst, Verdict::kUnreadable)));
}

}  // namespace
}  // namespace holdfast::tools

int main(int argc, char** argv) {
  // "holdfast verify" runs this program under its own name.
  CLI::App app(holdfast::tools::kDescription, std::filesystem::path(argv[0]).filename());
  holdfast::tools::Arguments arguments;
  holdfast::tools::Declare(&app, &arguments);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int status = app.exit(error) == 0 ? 0 : holdfast::tools::kExitUsage;
    return holdfast::tools::ExitStatus("verify-checkpoint", status,
                                       static_cast<int>(holdfast::Verdict::kUnreadable));
  }
  return holdfast::tools::Run(arguments);
}
