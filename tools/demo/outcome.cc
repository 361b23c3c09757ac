// The outcome of a run: a table for people, a document for machines.
#include <nlohmann/json.hpp>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "holdfast/pod.h"
#include "tools/demo/session.h"
#include "tools/progress_bar.h"

namespace holdfast::demo {
namespace {

constexpr double kMsPerSecond = 1e3;

double Rate(double bytes, double seconds) { return seconds > 0 ? bytes / seconds : 0; }

std::string RateText(double bytes, double seconds) {
  return tools::FormatBytes(Rate(bytes, seconds)) + "/s";
}

std::string VerifyText(const SaveRow& row) {
  if (row.deleted) return "deleted by retention";
  if (!row.verified) return "-";
  if (row.verify.verdict != Verdict::kSound) {
    return absl::StrCat(row.verify.faults_total, " fault(s)");
  }
  return absl::StrFormat("sound %6.2f s  %s", row.verify.seconds,
                         RateText(static_cast<double>(row.verify.bytes), row.verify.seconds));
}

std::string RowText(const SaveRow& row) {
  if (!row.status.ok()) return absl::StrFormat("%-20s refused\n", row.name);
  const SaveReport& r = row.report;
  return absl::StrFormat("%-20s %9.2f %9.2f %9.2f %9.2f | %8.3f %8.3f %8.3f %8.3f  %-12s | %s\n",
                         row.name, r.time_in_call * kMsPerSecond, r.time_copying * kMsPerSecond,
                         r.time_launching * kMsPerSecond, r.time_waiting_memory * kMsPerSecond,
                         r.time_to_staged, r.time_writing, r.time_syncing, r.time_to_durable,
                         RateText(static_cast<double>(r.bytes), r.time_to_durable),
                         VerifyText(row));
}

const SaveRow* FirstDurable(const Outcome& outcome) {
  for (const SaveRow& row : outcome.saves) {
    if (row.ended && row.status.ok()) return &row;
  }
  return nullptr;
}

const char* OutcomeWord(int exit_status) {
  return WordIn({"sound", "damage found", "damage missed", "failed"}, exit_status);
}

nlohmann::json RowJson(const SaveRow& row) {
  nlohmann::json json = {{"name", row.name},
                         {"step", row.step},
                         {"attacked", row.attacked},
                         {"status", absl::StatusCodeToString(row.status.code())},
                         {"message", std::string(row.status.message())}};
  if (row.ended && row.status.ok()) {
    ForEachField(row.report, [&json](const char* name, const auto& value) {
      using Value = std::decay_t<decltype(value)>;
      if constexpr (std::is_enum_v<Value>) {
        json[name] = WordOf(value);
      } else if constexpr (!std::is_same_v<Value, AttemptId>) {
        json[name] = value;
      }
    });
  }
  json["deleted"] = row.deleted;
  if (row.verified) {
    nlohmann::json faults = nlohmann::json::array();
    for (const Fault& fault : row.verify.faults) {
      faults.push_back({{"file", fault.file},
                        {"tensor", fault.tensor},
                        {"begin", fault.begin},
                        {"end", fault.end},
                        {"reason", fault.reason}});
    }
    json["verify"] = {{"sound", row.verify.verdict == Verdict::kSound},
                      {"seconds", row.verify.seconds},
                      {"bytes", row.verify.bytes},
                      {"faults", faults}};
  }
  return json;
}

}  // namespace

std::string Text(const Options& options, const Outcome& outcome) {
  std::string out = absl::StrFormat("\n%-20s %39s | %35s\n", "", "stall: time in the call, ms",
                                    "in the background, s");
  absl::StrAppendFormat(&out, "%-20s %9s %9s %9s %9s | %8s %8s %8s %8s  %-12s | %s\n", "checkpoint",
                        "all", "copying", "launching", "waiting", "staged", "writing", "syncing",
                        "durable", "rate", "verify");
  for (const SaveRow& row : outcome.saves) absl::StrAppend(&out, RowText(row));
  if (const SaveRow* row = FirstDurable(outcome); row != nullptr) {
    absl::StrAppendFormat(
        &out, "\nlauncher %s, engine %s (%s), pages %s (%s), direct I/O %s%s\n",
        WordOf(row->report.launcher), WordOf(row->report.engine), row->report.engine_reason,
        WordOf(row->report.pages), outcome.staging.pages_reason, WordOf(row->report.direct_io),
        row->report.streamed ? ", streamed: the state is larger than the staging memory" : "");
  }
  absl::StrAppendFormat(&out, "training step %.0f ms; staging memory %s, at most %s of it held\n",
                        outcome.step_seconds * kMsPerSecond,
                        tools::FormatBytes(static_cast<double>(outcome.staging.arena_bytes)),
                        tools::FormatBytes(static_cast<double>(outcome.staging.bytes_held_peak)));
  for (const std::string& finding : outcome.findings) absl::StrAppend(&out, finding, "\n");
  absl::StrAppend(&out,
                  options.temporary ? "The checkpoints were in a temporary directory, which "
                                      "is removed: "
                                    : "The checkpoints are in ",
                  options.directory, "\n");
  return out;
}

std::string Json(const Options& options, const Outcome& outcome) {
  nlohmann::json json;
  json["outcome"] = OutcomeWord(outcome.exit_status);
  json["exit_status"] = outcome.exit_status;
  json["directory"] = options.directory;
  json["directory_kept"] = !options.temporary;
  json["state"] = {{"origin", outcome.state_origin},
                   {"tensors", outcome.state_tensors},
                   {"bytes", outcome.state_bytes},
                   {"step_seconds", outcome.step_seconds}};
  json["arena"] = {{"bytes", outcome.staging.arena_bytes},
                   {"bytes_peak", outcome.staging.bytes_held_peak},
                   {"pages", WordOf(outcome.staging.pages)},
                   {"pages_reason", outcome.staging.pages_reason}};
  json["deed"] = outcome.deed;
  json["saves"] = nlohmann::json::array();
  for (const SaveRow& row : outcome.saves) json["saves"].push_back(RowJson(row));
  json["loaded"] = {
      {"name", outcome.loaded}, {"equal", outcome.loaded_equal}, {"seconds", outcome.load_seconds}};
  json["findings"] = outcome.findings;
  constexpr int kIndent = 2;
  return json.dump(kIndent, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace holdfast::demo
