#include "tools/verify_output.h"

#include <array>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/progress_bar.h"
#include "tools/words.h"

namespace holdfast::tools {
namespace {

double Rate(uint64_t bytes, double seconds) {
  return seconds > 0 ? static_cast<double>(bytes) / seconds : 0;
}

std::string Amount(uint64_t bytes, double seconds) {
  return absl::StrFormat("%s in %.2f s (%s/s)", FormatBytes(static_cast<double>(bytes)), seconds,
                         FormatBytes(Rate(bytes, seconds)));
}

std::string Hex(const AttemptId& attempt) {
  return absl::StrFormat("%016x%016x", attempt.high, attempt.low);
}

nlohmann::ordered_json JsonOf(const Fault& fault) {
  return {{"file", fault.file},  {"tensor", fault.tensor}, {"begin", fault.begin},
          {"end", fault.end},    {"reason", fault.reason}, {"expected", fault.expected},
          {"found", fault.found}};
}

nlohmann::ordered_json JsonOf(const VerifyReport& report) {
  nlohmann::ordered_json faults = nlohmann::ordered_json::array();
  for (const Fault& fault : report.faults) faults.push_back(JsonOf(fault));
  return {{"path", report.path},
          {"verdict", WordOf(report.verdict)},
          {"checked", report.checked},
          {"note", report.note},
          {"bytes", report.bytes},
          {"files", report.files},
          {"tensors", report.tensors},
          {"seconds", report.seconds},
          {"bytes_per_second", Rate(report.bytes, report.seconds)},
          {"step", report.step},
          {"attempt", Hex(report.attempt)},
          {"engine", report.engine == EngineRung::kAuto ? "none" : WordOf(report.engine)},
          {"direct_io", WordOf(report.direct_io)},
          {"faults_total", report.faults_total},
          {"faults", std::move(faults)}};
}

}  // namespace

std::string FaultLines(const VerifyReport& report) {
  std::string lines;
  for (const Fault& fault : report.faults) {
    absl::StrAppend(&lines, Printable(report.path));
    if (!fault.file.empty()) absl::StrAppend(&lines, ": ", Printable(fault.file));
    if (!fault.tensor.empty())
      absl::StrAppend(&lines, ": tensor \"", Printable(fault.tensor), "\"");
    if (fault.begin != fault.end) {
      absl::StrAppend(&lines, ": bytes [", fault.begin, ", ", fault.end, ")");
    }
    absl::StrAppend(&lines, ": ", Printable(fault.reason), ": expected ", Printable(fault.expected),
                    ", found ", Printable(fault.found), "\n");
  }
  if (report.faults_total > report.faults.size()) {
    absl::StrAppend(&lines, Printable(report.path), ": and ",
                    report.faults_total - report.faults.size(), " more faults\n");
  }
  return lines;
}

std::string ReportLines(const VerifyReport& report) {
  std::string line = absl::StrCat(Printable(report.path), ": ", WordOf(report.verdict));
  if (report.faults_total > 0) {
    absl::StrAppend(&line, " (", report.faults_total,
                    report.faults_total == 1 ? " fault)" : " faults)");
  }
  absl::StrAppend(&line, ": ", report.files, report.files == 1 ? " file, " : " files, ",
                  report.tensors, report.tensors == 1 ? " tensor, " : " tensors, ",
                  Amount(report.bytes, report.seconds), "; checked: ", report.checked, "\n");
  if (!report.note.empty()) absl::StrAppend(&line, "  ", Printable(report.note), "\n");
  return line;
}

std::string UncommittedLines(const std::vector<std::string>& uncommitted) {
  std::string lines;
  for (const std::string& path : uncommitted) {
    absl::StrAppend(&lines, Printable(path), ": not verified: no committed checkpoint\n");
  }
  return lines;
}

std::string SummaryLine(const std::vector<VerifyReport>& reports) {
  uint64_t bytes = 0;
  double seconds = 0;
  std::array<int, 4> counts = {};
  for (const VerifyReport& report : reports) {
    bytes += report.bytes;
    seconds += report.seconds;
    ++counts[static_cast<size_t>(report.verdict)];
  }
  std::string line = absl::StrCat(reports.size(), " checkpoints:");
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] == 0) continue;
    absl::StrAppend(&line, " ", counts[i], " ", WordOf(static_cast<Verdict>(i)), ",");
  }
  return absl::StrCat(line, " ", Amount(bytes, seconds), "\n");
}

std::string Json(const std::vector<VerifyReport>& reports,
                 const std::vector<std::string>& uncommitted, int exit_status) {
  nlohmann::ordered_json paths = nlohmann::ordered_json::array();
  Verdict worst = Verdict::kSound;
  for (const VerifyReport& report : reports) {
    paths.push_back(JsonOf(report));
    worst = Worse(worst, report.verdict);
  }
  const nlohmann::ordered_json document = {
      {"program", "verify-checkpoint"}, {"version", 1},
      {"verdict", WordOf(worst)},       {"exit_status", exit_status},
      {"uncommitted", uncommitted},     {"paths", std::move(paths)}};
  // Names that are not UTF-8 must not end the program: they appear with replacement characters.
  return document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace holdfast::tools
