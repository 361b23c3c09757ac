// holdfast-doctor: the capabilities of this machine and one directory, and advice for changes.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "holdfast/probe.h"
#include "holdfast/version.h"
#include "tools/doctor_output.h"
#include "tools/standard_output.h"

namespace holdfast::tools {
namespace {

constexpr int kExitFine = 0;
constexpr int kExitRefuses = 1;
constexpr int kExitUnprinted = 2;
constexpr int kExitUsage = 64;  // EX_USAGE of sysexits.h

constexpr char kDescription[] =
    "Tells what this machine and the directory DIR can do for saving checkpoints, found by trying: "
    "how bytes reach\nthe disk, what pages the staging memory is made of, whether direct I/O is "
    "proven, what locks and renames do,\nand how fast it is. Works in a temporary directory below "
    "DIR and removes it.";

constexpr char kFooter[] =
    "Exit status:\n"
    "  0   fine      saves work here; what could be better is listed\n"
    "  1   refuses   something that saves need does not work; it is listed\n"
    "  2   trouble   the result could not be printed\n"
    "  64  usage     the command line was wrong\n"
    "\n"
    "--json prints one document with the keys: program, version, exit_status, directory, refusals, "
    "advice (lists of\n"
    "sentences), file_system, free_bytes, direct_io (proven, claimed, no), memory_alignment, "
    "offset_alignment, reserve,\n"
    "rename_noreplace, rename_exchange, lock, engine (io_uring-fixed, io_uring, pwrite, none), "
    "engine_reason,\n"
    "pages (hugetlb, tmpfs-huge, madvise-huge, small, none), pages_reason, page_bytes, "
    "base_page_bytes, memlock_bytes,\n"
    "worker_program_found, worker_program, digest_unit, gpus, write_bytes_per_second, "
    "digest_bytes_per_second,\n"
    "copy_bytes_per_second (0: not measured). If DIR cannot be used at all, advice is the last "
    "key.\n"
    "\n"
    "Examples:\n"
    "  holdfast-doctor /checkpoints\n"
    "  holdfast-doctor --quick --json /checkpoints | jq .engine";

int Run(const std::string& directory, bool json, bool quick) {
  ProbeOptions options;
  if (quick) options.speed_probe = absl::ZeroDuration();
  const absl::StatusOr<ProbeReport> report = Probe(directory, options);
  int exit_status = kExitRefuses;
  if (report.ok()) {
    exit_status = Refusals(*report).empty() ? kExitFine : kExitRefuses;
    std::fputs((json ? DoctorJson(*report, exit_status) : DoctorText(*report)).c_str(), stdout);
  } else {
    const std::string error(report.status().message());
    std::fputs(
        (json ? DoctorFailedJson(directory, error, exit_status) : DoctorFailedText(error)).c_str(),
        json ? stdout : stderr);
  }
  return ExitStatus("holdfast-doctor", exit_status, kExitUnprinted);
}

}  // namespace
}  // namespace holdfast::tools

int main(int argc, char** argv) {
  // "holdfast doctor" runs this program under its own name.
  CLI::App app(holdfast::tools::kDescription, std::filesystem::path(argv[0]).filename());
  app.footer(holdfast::tools::kFooter);
  app.set_version_flag("--version", absl::StrCat("holdfast-doctor ", holdfast::Version()));
  std::string directory;
  bool json = false;
  bool quick = false;
  app.add_option("DIR", directory, "The directory that checkpoints are to be made in")->required();
  app.add_flag("--json", json, "Print one JSON document instead of a table");
  app.add_flag("--quick", quick, "Leave out the speed probe, which takes two seconds");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int status = app.exit(error) == 0 ? 0 : holdfast::tools::kExitUsage;
    return holdfast::tools::ExitStatus("holdfast-doctor", status, holdfast::tools::kExitUnprinted);
  }
  return holdfast::tools::Run(directory, json, quick);
}
