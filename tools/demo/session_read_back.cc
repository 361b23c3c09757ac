// What only read-back finds: memory that is wrong while the disk reads it, and right again when the
// worker looks.
#include <chrono>
#include <filesystem>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tools/demo/session.h"

namespace holdfast::demo {
namespace {

// The worker may look too early, or the disk read too late: then the attempt shows nothing.
constexpr uint32_t kAttemptsMax = 20;

}  // namespace

absl::StatusOr<bool> Session::AttackOnce(bool read_back, uint32_t attempt) {
  const std::string name =
      absl::StrCat(read_back ? "with-read-back-" : "without-read-back-", attempt);
  TrainSteps(options_.steps_between);
  if (const absl::Status started = StartSave(name, true); !started.ok()) return started;
  SaveRow& row = outcome_.saves.back();
  bool reading_back = false;
  while (!row.handle.IsDone()) {
    reading_back = reading_back || row.handle.progress().phase == "reading back";
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  saboteur_->Disarm();
  TakeEnded(true);
  outcome_.deed = saboteur_->deed();
  if (!row.status.ok()) {
    const bool damage = row.status.code() == absl::StatusCode::kDataLoss;
    if (!damage) return row.status;
    if (read_back && reading_back) return true;
    progress_->Print(absl::StrCat(name, ": the worker looked before the bytes were put back"));
    return false;
  }
  if (const absl::Status status = VerifyRow(&row); !status.ok()) return status;
  if (row.verify.verdict == Verdict::kCorrupt) {
    if (!read_back) return true;
    outcome_.exit_status = kExitFaultMissed;
    return absl::DataLossError(absl::StrCat(name, ": read-back let damage pass"));
  }
  progress_->Print(absl::StrCat(name, ": the bytes were put back before the disk took them"));
  saboteur_->GiveDiskLonger();
  return false;
}

absl::Status Session::AttackUntilShown(bool read_back) {
  CheckpointerOptions options = MakeOptions();
  options.read_back = read_back;
  options.queue_depth = 32;     // So that everything up to the victim is submitted at once ...
  options.staging.threads = 1;  // ... in the order of the file.
  if (const absl::Status opened = Open(options); !opened.ok()) return opened;
  for (uint32_t attempt = 1; attempt <= kAttemptsMax; ++attempt) {
    const absl::StatusOr<bool> shown = AttackOnce(read_back, attempt);
    if (!shown.ok()) return shown.status();
    outcome_.staging = checkpointer_->staging();
    if (*shown) return absl::OkStatus();
    // A checkpoint that shows nothing would only be in the way.
    std::error_code ignored;
    if (outcome_.saves.back().status.ok()) {
      std::filesystem::remove_all(outcome_.saves.back().report.path, ignored);
    }
    outcome_.saves.pop_back();
  }
  return absl::DeadlineExceededError(
      absl::StrCat("the bytes could not be put back at the right moment in ", kAttemptsMax,
                   " attempts; try again, or with a larger state"));
}

absl::Status Session::ShowReadBack() {
  outcome_.exit_status = kExitFaultFound;
  if (!options_.read_back) {
    if (const absl::Status shown = AttackUntilShown(false); !shown.ok()) return shown;
    const SaveRow& row = outcome_.saves.back();
    progress_->Print(absl::StrCat(row.name, ": on purpose: ", outcome_.deed,
                                  ", and put them back while the worker was held still"));
    outcome_.findings.push_back(
        absl::StrCat(row.name,
                     ": without read-back the save passed: when the worker looked, memory "
                     "was right again. On disk it is not:"));
    for (const Fault& fault : row.verify.faults) {
      outcome_.findings.push_back(absl::StrCat("  ", fault.file, " [", fault.begin, ", ", fault.end,
                                               ") tensor ", fault.tensor, ": ", fault.reason));
    }
    outcome_.findings.push_back(absl::StrCat("  verify-checkpoint ", row.report.path, " says so."));
  }
  if (const absl::Status shown = AttackUntilShown(true); !shown.ok()) return shown;
  const SaveRow& row = outcome_.saves.back();
  outcome_.findings.push_back(absl::StrCat(
      row.name,
      ": with read-back the same damage was refused: ", std::string(row.status.message())));
  checkpointer_.reset();
  outcome_.step_seconds = MedianStepSeconds();
  return absl::OkStatus();
}

}  // namespace holdfast::demo
