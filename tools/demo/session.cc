#include "tools/demo/session.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "holdfast/load.h"
#include "holdfast/recovery.h"
#include "holdfast/verify.h"
#include "tools/progress_bar.h"

namespace holdfast::demo {
namespace {

using Clock = std::chrono::steady_clock;

double Seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

Session::Session(const Options& options, LiveProgress* progress)
    : options_(options),
      progress_(progress),
      saboteur_(std::make_unique<Saboteur>(options.mischief)) {}

absl::Status Session::Prepare() {
  absl::StatusOr<std::unique_ptr<TrainingState>> state =
      options_.file.empty()
          ? TrainingState::Gpt2(options_.threads, options_.seed)
          : TrainingState::FromFile(options_.file, options_.threads, options_.seed);
  if (!state.ok()) return state.status();
  state_ = *std::move(state);
  const absl::StatusOr<SavePlan> plan = PlanSafetensors("model", state_->tensors(), {});
  if (!plan.ok()) return plan.status();
  file_bytes_ = plan->total_bytes();
  outcome_.state_bytes = state_->bytes();
  outcome_.state_tensors = state_->tensors().size();
  outcome_.state_origin = state_->origin();
  progress_->Print(absl::StrFormat("state: %s, %d tensors, %s", state_->origin(),
                                   outcome_.state_tensors,
                                   tools::FormatBytes(static_cast<double>(state_->bytes()))));
  return absl::OkStatus();
}

CheckpointerOptions Session::MakeOptions() const {
  CheckpointerOptions options;
  options.directory = options_.directory;
  options.launcher = options_.launcher;
  options.engine = options_.engine;
  options.read_back = options_.read_back;
  options.retention.keep_last = options_.keep_last;
  options.staging.arena_bytes = options_.arena_bytes != 0
                                    ? options_.arena_bytes
                                    : DefaultArenaBytes({.state_bytes = file_bytes_});
  if (options_.mischief != Mischief::kNone) {
    Saboteur* const saboteur = saboteur_.get();
    options.on_sealed = [saboteur](const SealedExtent& extent) { saboteur->OnSealed(extent); };
  }
  return options;
}

absl::Status Session::Open(const CheckpointerOptions& options) {
  checkpointer_.reset();  // Its memory first, then the next one's.
  absl::StatusOr<std::unique_ptr<Checkpointer>> checkpointer = Checkpointer::Create(options);
  if (!checkpointer.ok()) return checkpointer.status();
  checkpointer_ = *std::move(checkpointer);
  return absl::OkStatus();
}

void Session::TrainSteps(uint32_t steps) {
  for (uint32_t i = 0; i < steps; ++i) {
    const Clock::time_point begin = Clock::now();
    state_->Step();
    step_seconds_.push_back(Seconds(Clock::now() - begin));
    TakeEnded(false);
  }
}

absl::Status Session::StartSave(const std::string& name, bool attack) {
  if (attack) {
    // Alone, so that the extents that are sealed from now on are this save's. Earlier saves that
    // failed are told about by their own handles.
    checkpointer_->Flush(absl::InfiniteDuration()).IgnoreError();
    saboteur_->Arm(Victim());
  }
  SaveRow row;
  row.name = name;
  row.step = state_->steps();
  row.attacked = attack;
  row.fingerprints = state_->Fingerprints();
  SaveRequest request;
  request.name = name;
  request.step = row.step;
  request.tensors = state_->tensors();
  request.replace = options_.replace;
  absl::StatusOr<SaveHandle> handle = checkpointer_->SaveAsync(request);
  if (!handle.ok()) return handle.status();
  row.handle = *handle;
  progress_->Watch(name, *handle);
  outcome_.saves.push_back(std::move(row));
  return absl::OkStatus();
}

void Session::TakeEnded(bool wait) {
  for (SaveRow& row : outcome_.saves) {
    if (row.ended || (!wait && !row.handle.IsDone())) continue;
    absl::StatusOr<SaveReport> report = row.handle.WaitDurable(absl::InfiniteDuration());
    row.ended = true;
    row.status = report.status();
    if (!report.ok()) {
      progress_->Print(absl::StrCat(row.name, ": refused: ", report.status().ToString()));
      continue;
    }
    row.report = *std::move(report);
    progress_->Print(absl::StrFormat("%s: durable after %.2f s; the call took %.0f ms", row.name,
                                     row.report.time_to_durable, row.report.time_in_call * 1e3));
  }
}

uint32_t Session::Victim() const {
  // Enough in front of it to keep the disk busy for a while, and within the staging memory: the
  // first extents of a save that streams must be written before there is room for later ones.
  constexpr uint64_t kExtentsBefore = 15;
  const uint64_t extents = (file_bytes_ + kChunkBytes - 1) / kChunkBytes;
  const uint64_t arena = checkpointer_->options().staging.arena_bytes / kChunkBytes;
  return static_cast<uint32_t>(std::min({kExtentsBefore, extents - 1, arena - 1}));
}

absl::Status Session::TrainAndSave() {
  if (const absl::Status opened = Open(MakeOptions()); !opened.ok()) return opened;
  // The second save if there are two, so that a sound one stands beside the refused one.
  const uint32_t attacked = std::min(1u, options_.saves - 1);
  for (uint32_t i = 0; i < options_.saves; ++i) {
    TrainSteps(options_.steps_between);
    const bool attack = options_.mischief == Mischief::kMutateSealed && i == attacked;
    const std::string name = absl::StrFormat("step-%07d", state_->steps());
    if (const absl::Status started = StartSave(name, attack); !started.ok()) {
      TakeEnded(true);
      return started;
    }
    if (attack) {
      // All sealed, so it is done; what became of the save is told next.
      outcome_.saves.back().handle.WaitStaged(absl::InfiniteDuration()).IgnoreError();
      saboteur_->Disarm();
      outcome_.deed = saboteur_->deed();
      progress_->Print(absl::StrCat(name, ": on purpose: ", outcome_.deed));
      TakeEnded(true);
    }
  }
  // Training goes on while the last save becomes durable.
  while (!outcome_.saves.back().handle.IsDone()) TrainSteps(1);
  TakeEnded(true);
  checkpointer_->Flush(absl::InfiniteDuration()).IgnoreError();  // And deletions.
  outcome_.staging = checkpointer_->staging();
  outcome_.step_seconds = MedianStepSeconds();
  checkpointer_.reset();
  if (const absl::Status proved = Prove(); !proved.ok()) return proved;
  Judge();
  return absl::OkStatus();
}

absl::Status Session::VerifyRow(SaveRow* row) {
  tools::ProgressBar bar("verifying " + row->name, stderr, true);
  VerifyOptions options;
  options.progress = [&bar](uint64_t done, uint64_t total) { bar.Update(done, total); };
  absl::StatusOr<VerifyReport> report = Verify(row->report.path, options);
  if (!report.ok()) return report.status();
  row->verify = *std::move(report);
  row->verified = true;
  return absl::OkStatus();
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
    if (const absl::Status status = VerifyRow(&row); !status.ok()) return status;
  }
  return LoadNewest();
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
  std::vector<TensorTarget> targets;
  for (const TensorSource& tensor : state_->tensors()) {
    targets.push_back({.name = tensor.name,
                       .data = const_cast<void*>(tensor.data),  // The state's own memory.
                       .bytes = tensor.bytes});
  }
  const absl::StatusOr<LoadReport> loaded = (*reader)->Load(targets, {});
  if (!loaded.ok()) return loaded.status();
  outcome_.load_seconds = loaded->seconds;
  outcome_.loaded_equal = state_->Fingerprints() == newest->fingerprints;
  outcome_.findings.push_back(absl::StrFormat(
      "%s was loaded back in %.2f s and is %s the state at its save call.", newest->name,
      loaded->seconds, outcome_.loaded_equal ? "equal to" : "NOT EQUAL to"));
  return absl::OkStatus();
}

double Session::MedianStepSeconds() const {
  std::vector<double> sorted = step_seconds_;
  std::sort(sorted.begin(), sorted.end());
  return sorted.empty() ? 0 : sorted[sorted.size() / 2];
}

void Session::Judge() {
  outcome_.exit_status =
      outcome_.loaded_equal || outcome_.loaded.empty() ? kExitSound : kExitFaultMissed;
  uint32_t sound = 0;
  for (const SaveRow& row : outcome_.saves) {
    sound += row.verified && row.verify.verdict == Verdict::kSound ? 1 : 0;
    if (!row.status.ok()) {
      outcome_.findings.push_back(
          absl::StrCat(row.name, " was refused: ", std::string(row.status.message())));
      const bool damage = row.status.code() == absl::StatusCode::kDataLoss;
      outcome_.exit_status = std::max(outcome_.exit_status, damage ? kExitFaultFound : kExitFailed);
    }
    if (row.verified && row.verify.verdict != Verdict::kSound) {
      outcome_.exit_status = std::max(outcome_.exit_status, kExitFaultFound);
      outcome_.findings.push_back(absl::StrCat(row.name, ": verifying found damage on disk"));
    }
    if (row.attacked && row.status.ok()) {
      outcome_.exit_status = kExitFaultMissed;
      outcome_.findings.push_back(absl::StrCat(row.name, " was attacked and NOT refused"));
    }
  }
  outcome_.findings.push_back(
      absl::StrCat(sound, " of ", outcome_.saves.size(), " checkpoints verified sound."));
}

}  // namespace holdfast::demo
