#include "tools/doctor_output.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "holdfast/pod.h"
#include "holdfast/version.h"
#include "tools/progress_bar.h"
#include "tools/words.h"

namespace holdfast::tools {
namespace {

// Less than the smallest arena holds: nothing worth the name can be saved.
constexpr uint64_t kFreeBytesMin = uint64_t{16} << 20;

std::string Bytes(uint64_t bytes) { return FormatBytes(static_cast<double>(bytes)); }

std::string Line(const std::string& label, const std::string& value) {
  return absl::StrFormat("  %-18s %s\n", label, value);
}

std::string WithReason(const std::string& word, const std::string& reason) {
  return reason.empty() ? word : absl::StrCat(word, " (", Printable(reason), ")");
}

const char* YesNo(bool value) { return value ? "yes" : "no"; }

std::string DirectLine(const ProbeReport& report) {
  std::string line = WordOf(report.direct_io);
  if (report.offset_alignment != 0) {
    absl::StrAppend(&line, " (alignment: memory ", report.memory_alignment, ", offset ",
                    report.offset_alignment, ")");
  }
  return line;
}

std::string Speed(double bytes_per_second) {
  return bytes_per_second > 0 ? absl::StrCat(FormatBytes(bytes_per_second), "/s") : "not measured";
}

std::string DirectoryLines(const ProbeReport& report) {
  return absl::StrCat(
      Line("file system",
           absl::StrCat(report.file_system, ", ", Bytes(report.free_bytes), " free")),
      Line("direct I/O", DirectLine(report)), Line("space reserved", YesNo(report.reserve)),
      Line("rename", absl::StrCat("no-replace ", YesNo(report.rename_noreplace), ", exchange ",
                                  YesNo(report.rename_exchange))),
      Line("locks", YesNo(report.lock)));
}

std::string MachineLines(const ProbeReport& report) {
  const std::string engine = report.engine == EngineRung::kAuto ? "none" : WordOf(report.engine);
  const std::string pages =
      report.pages == PageRung::kAuto
          ? "none"
          : absl::StrCat(WordOf(report.pages), ", ", Bytes(report.page_bytes));
  return absl::StrCat(
      Line("engine", WithReason(engine, report.engine_reason)),
      Line("arena pages", WithReason(pages, report.pages_reason)),
      Line("base page", Bytes(report.base_page_bytes)),
      Line("memlock limit",
           report.memlock_bytes == UINT64_MAX ? "unlimited" : Bytes(report.memlock_bytes)),
      Line("worker program", report.worker_program_found ? Printable(report.worker_program)
                                                         : std::string("not found")),
      Line("digests with", report.digest_unit),
      Line("GPUs", report.gpus.empty() ? "none" : Printable(absl::StrJoin(report.gpus, ", "))));
}

std::string Bulleted(const char* title, const std::vector<std::string>& lines) {
  if (lines.empty()) return "";
  std::string text = absl::StrCat("\n", title, "\n");
  for (const std::string& line : lines) absl::StrAppend(&text, "  - ", Printable(line), "\n");
  return text;
}

}  // namespace

std::vector<std::string> Refusals(const ProbeReport& report) {
  std::vector<std::string> refusals;
  if (report.engine == EngineRung::kAuto) refusals.push_back("no engine can write here");
  if (report.pages == PageRung::kAuto) refusals.push_back("the staging arena cannot be made");
  if (!report.worker_program_found) {
    refusals.push_back("holdfast-worker is missing, which the default launcher needs");
  }
  if (report.free_bytes < kFreeBytesMin) refusals.push_back("the disk is full");
  return refusals;
}

std::string DoctorText(const ProbeReport& report) {
  const std::vector<std::string> refusals = Refusals(report);
  return absl::StrCat(
      Printable(report.directory), "\n", DirectoryLines(report),
      Line("write speed", Speed(report.write_bytes_per_second)), "\nthis machine\n",
      MachineLines(report), Line("digest speed", Speed(report.digest_bytes_per_second)),
      Line("copy speed", Speed(report.copy_bytes_per_second)), Bulleted("does not work:", refusals),
      Bulleted("what to change:", report.advice),
      refusals.empty()
          ? (report.advice.empty() ? "\nEverything is as it should be.\n" : "\nSaves work here.\n")
          : "\nSaves do not work here.\n");
}

std::string DoctorJson(const ProbeReport& report, int exit_status) {
  const nlohmann::ordered_json document = {
      {"program", "holdfast-doctor"},
      {"version", std::string(Version())},
      {"exit_status", exit_status},
      {"directory", report.directory},
      {"refusals", Refusals(report)},
      {"advice", report.advice},
      {"file_system", report.file_system},
      {"free_bytes", report.free_bytes},
      {"direct_io", WordOf(report.direct_io)},
      {"memory_alignment", report.memory_alignment},
      {"offset_alignment", report.offset_alignment},
      {"reserve", report.reserve},
      {"rename_noreplace", report.rename_noreplace},
      {"rename_exchange", report.rename_exchange},
      {"lock", report.lock},
      {"engine", report.engine == EngineRung::kAuto ? "none" : WordOf(report.engine)},
      {"engine_reason", report.engine_reason},
      {"pages", report.pages == PageRung::kAuto ? "none" : WordOf(report.pages)},
      {"pages_reason", report.pages_reason},
      {"page_bytes", report.page_bytes},
      {"base_page_bytes", report.base_page_bytes},
      {"memlock_bytes", report.memlock_bytes},
      {"worker_program_found", report.worker_program_found},
      {"worker_program", report.worker_program},
      {"digest_unit", report.digest_unit},
      {"gpus", report.gpus},
      {"write_bytes_per_second", report.write_bytes_per_second},
      {"digest_bytes_per_second", report.digest_bytes_per_second},
      {"copy_bytes_per_second", report.copy_bytes_per_second}};
  // A path need not be UTF-8.
  return absl::StrCat(
      document.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace), "\n");
}

std::string DoctorFailedText(const std::string& error) {
  return absl::StrCat("holdfast-doctor: ", Printable(error), "\n\nSaves do not work here.\n");
}

std::string DoctorFailedJson(const std::string& directory, const std::string& error,
                             int exit_status) {
  const nlohmann::ordered_json document = {
      {"program", "holdfast-doctor"}, {"version", std::string(Version())},
      {"exit_status", exit_status},   {"directory", directory},
      {"refusals", {error}},          {"advice", nlohmann::ordered_json::array()}};
  return absl::StrCat(
      document.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace), "\n");
}

}  // namespace holdfast::tools
