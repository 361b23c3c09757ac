#include "tools/demo/session.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "holdfast/checkpointer.h"
#include "holdfast/load.h"
#include "holdfast/recovery.h"
#include "tools/demo/training_state.h"
#include "tools/progress_bar.h"

namespace holdfast::demo {
namespace {

using Clock = std::chrono::steady_clock;

/// Damages bytes on purpose, as an allocator would that hands out memory in use.
///
/// \threadsafety All methods may be called from any thread.
class Saboteur {
 public:
  /// Attacks the next sealed extent.
  void Arm() {
    const std::lock_guard<std::mutex> lock(mutex_);
    armed_ = true;
  }

  /// For CheckpointerOptions::on_sealed.
  void OnSealed(const SealedExtent& extent) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!std::exchange(armed_, false)) return;
    // The end of the extent: tensor bytes also where the extent begins with the file's header.
    const uint32_t bytes = std::clamp(extent.bytes / 16, 1u, 4096u);
    char* const at = static_cast<char*>(extent.memory) + extent.bytes - bytes;
    // Every bit flips, so that the bytes change from any value.
    for (uint32_t i = 0; i < bytes; ++i) at[i] = static_cast<char>(~at[i]);
    const uint64_t end = extent.file_offset + extent.bytes;
    deed_ = absl::StrCat("overwrote ", bytes, " sealed bytes of ", extent.file, " [", end - bytes,
                         ", ", end, ") in staging memory");
  }

  /// Returns a description of the damage, for people; empty without damage.
  std::string deed() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return deed_;
  }

 private:
  mutable std::mutex mutex_;
  bool armed_ = false;
  std::string deed_;
};

class Session {
 public:
  explicit Session(const Options& options) : options_(options) {}

  /// \error if the session cannot go on; faults found are in the outcome.
  absl::Status Run();
  Outcome TakeOutcome() { return std::move(outcome_); }

 private:
  absl::Status Prepare();
  void TrainAndSave();
  void StartSave(bool attack);
  void TrainSteps(uint32_t steps);
  void Print(const std::string& line);
  void DrawProgress();
  void TakeEnded(bool wait);
  absl::Status Prove();
  absl::Status LoadNewest();
  void Judge();

  const Options options_;
  Outcome outcome_;
  std::vector<double> step_seconds_;
  std::unique_ptr<TrainingState> state_;
  std::optional<tools::ProgressBar> bar_;
  std::string bar_of_;
  // Declared before the checkpointer, so that the checkpointer's threads end first.
  Saboteur saboteur_;
  std::unique_ptr<Checkpointer> checkpointer_;
};

absl::Status Session::Run() {
  if (const absl::Status prepared = Prepare(); !prepared.ok()) return prepared;
  TrainAndSave();
  if (const absl::Status proved = Prove(); !proved.ok()) return proved;
  if (const absl::Status loaded = LoadNewest(); !loaded.ok()) return loaded;
  Judge();
  return absl::OkStatus();
}

absl::Status Session::Prepare() {
  absl::StatusOr<std::unique_ptr<TrainingState>> state =
      TrainingState::Make(options_.file, options_.threads, options_.seed);
  if (!state.ok()) return state.status();
  state_ = *std::move(state);
  outcome_.state_bytes = state_->bytes();
  outcome_.state_tensors = state_->tensors().size();
  outcome_.state_origin = state_->origin();
  Print(absl::StrFormat("state: %s, %d tensors, %s", state_->origin(), outcome_.state_tensors,
                        tools::FormatBytes(static_cast<double>(state_->bytes()))));
  const absl::StatusOr<SavePlan> plan = PlanSafetensors("model", state_->tensors(), {});
  if (!plan.ok()) return plan.status();
  CheckpointerOptions options;
  options.directory = options_.directory;
  options.launcher = options_.launcher;
  options.engine = options_.engine;
  options.read_back = options_.read_back;
  options.retention.keep_last = options_.keep_last;
  options.staging.arena_bytes = options_.arena_bytes != 0
                                    ? options_.arena_bytes
                                    : DefaultArenaBytes({.state_bytes = plan->total_bytes()});
  if (options_.mutate_sealed) {
    options.on_sealed = [this](const SealedExtent& extent) { saboteur_.OnSealed(extent); };
  }
  absl::StatusOr<std::unique_ptr<Checkpointer>> made = Checkpointer::Create(options);
  if (made.ok()) checkpointer_ = *std::move(made);
  return made.status();
}

void Session::TrainAndSave() {
  // The second save if there are two, so that a sound save stands beside the refused save.
  const uint32_t attacked = std::min(1u, options_.saves - 1);
  for (uint32_t i = 0; i < options_.saves; ++i) {
    TrainSteps(options_.steps_between);
    StartSave(options_.mutate_sealed && i == attacked);
  }
  // Training goes on while the last save becomes durable.
  while (!outcome_.saves.back().ended) TrainSteps(1);
  TakeEnded(true);
  checkpointer_->Flush(absl::InfiniteDuration()).IgnoreError();  // And deletions.
  outcome_.staging = checkpointer_->staging();
  checkpointer_.reset();
  std::sort(step_seconds_.begin(), step_seconds_.end());
  outcome_.step_seconds = step_seconds_[step_seconds_.size() / 2];
}

void Session::StartSave(bool attack) {
  if (attack) {
    // Flushed first, so that the next sealed extent is this save's. The handles of earlier saves
    // report their failures.
    checkpointer_->Flush(absl::InfiniteDuration()).IgnoreError();
    saboteur_.Arm();
  }
  SaveRow row;
  row.step = state_->steps();
  row.name = absl::StrFormat("step-%07d", row.step);
  row.attacked = attack;
  row.fingerprints = state_->Fingerprints();
  SaveRequest request;
  request.name = row.name;
  request.step = row.step;
  request.tensors = state_->tensors();
  request.replace = options_.replace;
  absl::StatusOr<SaveHandle> handle = checkpointer_->SaveAsync(request);
  row.status = handle.status();
  row.ended = !handle.ok();
  if (handle.ok()) row.handle = *std::move(handle);
  outcome_.saves.push_back(std::move(row));
  if (attack) {
    TakeEnded(true);
    outcome_.deed = saboteur_.deed();
    Print(absl::StrCat(outcome_.saves.back().name, ": on purpose: ", outcome_.deed));
  }
}

void Session::TrainSteps(uint32_t steps) {
  for (uint32_t i = 0; i < steps; ++i) {
    const Clock::time_point begin = Clock::now();
    state_->Step();
    step_seconds_.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    TakeEnded(false);
    DrawProgress();
  }
}

void Session::Print(const std::string& line) {
  bar_.reset();
  std::fprintf(Lines(options_), "%s\n", line.c_str());
  std::fflush(Lines(options_));
}

/// Shows the oldest save in flight.
void Session::DrawProgress() {
  const auto row = std::find_if(outcome_.saves.begin(), outcome_.saves.end(),
                                [](const SaveRow& save) { return !save.ended; });
  if (row == outcome_.saves.end()) return bar_.reset();
  if (!bar_.has_value() || bar_of_ != row->name) {
    bar_of_ = row->name;
    bar_.emplace("saving " + row->name, stderr, true);
  }
  const SaveProgress progress = row->handle.progress();
  bar_->Update(progress.bytes_written, progress.bytes_total);
}

void Session::TakeEnded(bool wait) {
  for (SaveRow& row : outcome_.saves) {
    if (row.ended || (!wait && !row.handle.IsDone())) continue;
    absl::StatusOr<SaveReport> report = row.handle.WaitDurable(absl::InfiniteDuration());
    row.ended = true;
    row.status = report.status();
    if (!report.ok()) {
      Print(absl::StrCat(row.name, ": refused: ", report.status().ToString()));
      continue;
    }
    row.report = *std::move(report);
    Print(absl::StrFormat("%s: durable after %.2f s; the call took %.0f ms", row.name,
                          row.report.time_to_durable, row.report.time_in_call * 1e3));
  }
}

absl::Status Session::Prove() {
  const absl::StatusOr<std::vector<CheckpointInfo>> there = ListCheckpoints(options_.directory);
  if (!there.ok()) return there.status();
  for (SaveRow& row : outcome_.saves) {
    if (!row.status.ok()) continue;
    row.deleted = options_.keep_last != 0 &&
                  std::none_of(there->begin(), there->end(), [&row](const CheckpointInfo& info) {
                    return info.name == row.name;
                  });
    if (row.deleted) continue;
    tools::ProgressBar bar("verifying " + row.name, stderr, true);
    VerifyOptions options;
    options.progress = [&bar](uint64_t done, uint64_t total) { bar.Update(done, total); };
    absl::StatusOr<VerifyReport> report = Verify(row.report.path, options);
    if (!report.ok()) return report.status();
    row.verify = *std::move(report);
    row.verified = true;
  }
  return absl::OkStatus();
}

absl::Status Session::LoadNewest() {
  const auto newest = std::find_if(outcome_.saves.rbegin(), outcome_.saves.rend(),
                                   [](const SaveRow& row) { return row.status.ok(); });
  if (newest == outcome_.saves.rend()) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<CheckpointReader>> reader =
      CheckpointReader::Open(newest->report.path);
  if (!reader.ok()) return reader.status();
  outcome_.loaded = newest->name;
  state_->Poison();
  const absl::StatusOr<LoadReport> loaded = (*reader)->Load(state_->Targets(), {});
  if (!loaded.ok()) return loaded.status();
  outcome_.load_seconds = loaded->seconds;
  outcome_.loaded_equal = state_->Fingerprints() == newest->fingerprints;
  outcome_.findings.push_back(absl::StrFormat(
      "%s was loaded back in %.2f s and is %s the state at its save call.", newest->name,
      loaded->seconds, outcome_.loaded_equal ? "equal to" : "NOT EQUAL to"));
  return absl::OkStatus();
}

void Session::Judge() {
  int* const exit_status = &outcome_.exit_status;
  *exit_status = outcome_.loaded_equal || outcome_.loaded.empty() ? kExitSound : kExitFaultMissed;
  uint32_t sound = 0;
  for (const SaveRow& row : outcome_.saves) {
    if (!row.status.ok()) {
      outcome_.findings.push_back(
          absl::StrCat(row.name, " was refused: ", std::string(row.status.message())));
      const bool damage = row.status.code() == absl::StatusCode::kDataLoss;
      *exit_status = std::max(*exit_status, damage ? kExitFaultFound : kExitFailed);
    } else if (row.verified && row.verify.verdict == Verdict::kSound) {
      ++sound;
    } else if (row.verified) {
      *exit_status = std::max(*exit_status, kExitFaultFound);
      outcome_.findings.push_back(absl::StrCat(row.name, ": verifying found damage on disk"));
    }
    if (row.attacked && row.status.ok()) {
      *exit_status = kExitFaultMissed;
      outcome_.findings.push_back(absl::StrCat(row.name, " was attacked and NOT refused"));
    }
  }
  outcome_.findings.push_back(
      absl::StrCat(sound, " of ", outcome_.saves.size(), " checkpoints verified sound."));
}

}  // namespace

Outcome RunSession(const Options& options) {
  Session session(options);
  const absl::Status status = session.Run();
  Outcome outcome = session.TakeOutcome();
  if (!status.ok()) {
    outcome.exit_status = kExitFailed;
    outcome.findings.push_back(absl::StrCat("failed: ", status.ToString()));
  }
  return outcome;
}

}  // namespace holdfast::demo
