#include "runtime/writer/save_state.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "runtime/base/clock.h"
#include "runtime/base/status.h"
#include "runtime/layout/progress.h"
#include "runtime/sys/system.h"
#include "runtime/worker/rank_board.h"

namespace holdfast {
namespace {

constexpr double kNsPerSecond = 1e9;

double Seconds(uint64_t from_ns, uint64_t to_ns) {
  return to_ns > from_ns && from_ns != 0 ? static_cast<double>(to_ns - from_ns) / kNsPerSecond : 0;
}

}  // namespace

void SaveState::FailStaging(const absl::Status& why) {
  const base::MutexLock lock(&mutex_);
  FailStagingLocked(why);
}

void SaveState::FailStagingLocked(const absl::Status& why) {
  if (staging_status_.ok()) {
    staging_status_ = why;
    char(&text)[sizeof(layout::Job::staging_error)] = table->job()->staging_error;
    worker::CopyText(std::string(why.message()).c_str(), text, sizeof(text));
  }
  staging_failed_.store(true, std::memory_order_relaxed);
  // release: the worker reads the text behind the flag.
  table->job()->trainer_failed.store(1, std::memory_order_release);
  if (link != nullptr) link->RingDoorbell();
  changed_.NotifyAll();
}

void SaveState::DropUser() {
  // acq_rel: this user's writes to leases precede the retirement that the last drop allows.
  if (users.fetch_sub(1, std::memory_order_acq_rel) == 1) wake_supervisor();
}

void SaveState::Publish(uint32_t index) {
  published.Append(index);
  table->job()->published_count.fetch_add(1, std::memory_order_relaxed);
  link->RingDoorbell();
}

void SaveState::MarkStaged(std::optional<uint32_t> last_extent) {
  const base::MutexLock lock(&mutex_);
  staged_ = true;
  report_.time_to_staged = Seconds(entered_ns, sys::NowNs());
  changed_.NotifyAll();
  if (needs_confirmation && !confirmed_) {
    unconfirmed_ = last_extent;
  } else if (last_extent.has_value()) {
    Publish(*last_extent);
  }
}

void SaveState::Confirm(const absl::Status& capture) {
  const base::MutexLock lock(&mutex_);
  if (done_ || confirmed_) return;  // after its end a save has no table
  confirmed_ = true;
  if (!capture.ok()) {
    FailStagingLocked(capture);
  } else if (unconfirmed_.has_value()) {
    Publish(*unconfirmed_);
  }
}

void SaveState::NotifyQueued() {
  const base::MutexLock lock(&mutex_);
  changed_.NotifyAll();
}

void SaveState::Finish(const absl::Status& status) {
  const writer::Completion& told = result.has_value() ? *result : writer::Completion();
  const layout::JobTimes& times = told.times;
  const base::MutexLock lock(&mutex_);
  last_progress_ = ReadProgress();
  if (status.ok()) last_progress_.phase = "done";
  static_cast<WorkerFigures&>(report_) = told.figures;
  report_.engine_reason = told.reason;
  report_.streamed = layout::Streams(*table->job());
  report_.time_writing = Seconds(times.first_submit, times.last_complete);
  report_.time_syncing =
      Seconds(times.last_complete, std::max(times.committed, times.manifest_synced));
  report_.time_to_durable = Seconds(entered_ns, sys::NowNs());
  report_.entered_ns = entered_ns;
  report_.at_worker_started = Seconds(entered_ns, times.started);
  report_.at_first_submit = Seconds(entered_ns, times.first_submit);
  report_.at_last_complete = Seconds(entered_ns, times.last_complete);
  report_.at_data_synced = Seconds(entered_ns, times.data_synced);
  report_.at_manifest_synced = Seconds(entered_ns, times.manifest_synced);
  report_.at_committed = Seconds(entered_ns, times.committed);
  report_.cpu_sealing =
      static_cast<double>(cpu_sealing_ns.load(std::memory_order_relaxed)) / kNsPerSecond;
  report_.time_waiting_memory =
      static_cast<double>(time_waiting_memory_ns.load(std::memory_order_relaxed)) / kNsPerSecond;
  report_.cpu_worker = static_cast<double>(times.cpu) / kNsPerSecond;
  status_ = status;
  done_ = true;
  staged_ = staged_ || !status.ok();
  changed_.NotifyAll();
}

absl::Status SaveState::WaitStaged(absl::Duration timeout) {
  const absl::Time deadline = base::Now() + timeout;
  const base::MutexLock lock(&mutex_);
  while (!staged_ && !done_ && staging_status_.ok()) {
    if (!changed_.WaitUntil(&mutex_, deadline) && !staged_ && !done_ && staging_status_.ok()) {
      return base::TimeOut(
          absl::StrCat("wait until ", checkpoint, " is staged: not yet; the save goes on"));
    }
  }
  if (!staging_status_.ok()) return staging_status_;
  return done_ ? status_ : absl::OkStatus();
}

absl::Status SaveState::WaitQueued(absl::Duration timeout) {
  const absl::Time deadline = base::Now() + timeout;
  const base::MutexLock lock(&mutex_);
  while (device_extents_to_queue.load(std::memory_order_acquire) != 0 && !done_ &&
         staging_status_.ok()) {
    if (!changed_.WaitUntil(&mutex_, deadline)) {
      return base::TimeOut(absl::StrCat("wait until the copies of ", checkpoint,
                                        " are queued: not yet; the save goes on"));
    }
  }
  return staging_status_;
}

absl::StatusOr<SaveReport> SaveState::WaitDurable(absl::Duration timeout) {
  const absl::Time deadline = base::Now() + timeout;
  const base::MutexLock lock(&mutex_);
  while (!done_) {
    if (!changed_.WaitUntil(&mutex_, deadline) && !done_) {
      return base::TimeOut(
          absl::StrCat("wait until ", checkpoint, " is durable: not yet; the save goes on"));
    }
  }
  seen_ = true;
  if (!status_.ok()) return status_;
  return report_;
}

bool SaveState::IsDone() {
  const base::MutexLock lock(&mutex_);
  return done_;
}

SaveProgress SaveState::Progress() {
  const base::MutexLock lock(&mutex_);
  return done_ ? last_progress_ : ReadProgress();
}

int SaveState::WorkerPid() {
  const base::MutexLock lock(&mutex_);
  const bool begun = !done_ && table->job()->worker_pid.load(std::memory_order_relaxed) != 0;
  return begun ? static_cast<int>(link->pid()) : 0;
}

SaveProgress SaveState::ReadProgress() const {
  const layout::Job& job = *table->job();
  SaveProgress progress;
  progress.bytes_total = bytes_total;
  progress.bytes_sealed = bytes_sealed.load(std::memory_order_relaxed);
  progress.bytes_written =
      std::min(job.bytes_completed.load(std::memory_order_relaxed), bytes_total);
  progress.phase = layout::PhaseWord(job, progress.bytes_sealed, bytes_total);
  return progress;
}

std::string SaveState::TensorName(uint32_t tensor) const {
  return tensor < plan->tensors.size() ? absl::StrCat("tensor \"", plan->tensors.name(tensor), "\"")
                                       : std::string("the file's header");
}

base::FailureNames SaveState::Names() const {
  base::FailureNames names;
  names.checkpoint = path;
  if (!single_file) {  // the path of a single file names the file
    for (const format::PackedFile& file : plan->files) names.files.push_back(file.name);
  }
  for (size_t i = 0; i < plan->tensors.size(); ++i)
    names.tensors.emplace_back(plan->tensors.name(i));
  return names;
}

bool SaveState::ErrorWasSeen() {
  const base::MutexLock lock(&mutex_);
  return seen_;
}

void SaveState::MarkErrorReturned() {
  const base::MutexLock lock(&mutex_);
  seen_ = true;
}

void SaveState::Cancel() {
  const base::MutexLock lock(&mutex_);
  if (done_) return;
  table->job()->cancel.store(1, std::memory_order_relaxed);
  link->RingDoorbell();
}

void SaveState::ReleaseResources() {
  // With everything inside, such as the descriptors of the rank board.
  on_finished = nullptr;
  on_given_up = nullptr;
  tell_ranks = nullptr;
  const base::MutexLock lock(&mutex_);
  table.reset();
  link.reset();
  parent.reset();
  checksums.reset();
  plan.reset();
  leases = std::vector<staging::Lease>();
}

absl::Status SaveState::StagingStatus() {
  const base::MutexLock lock(&mutex_);
  return staging_status_;
}

absl::Status SaveState::TakeUnseenError() {
  const base::MutexLock lock(&mutex_);
  if (!done_ || seen_) return absl::OkStatus();
  seen_ = true;
  return status_;
}

namespace {

absl::Status NotHere() {
  return absl::FailedPreconditionError("use of a save handle in a process that did not create it");
}

}  // namespace

absl::Status SaveHandle::WaitStaged(absl::Duration timeout) const {
  if (state_ == nullptr || !state_->guard.InCreator()) return NotHere();
  return state_->WaitStaged(timeout);
}

absl::Status SaveHandle::WaitStagedOn(Device* device, StreamHandle stream) const {
  if (state_ == nullptr || !state_->guard.InCreator()) return NotHere();
  if (device == nullptr || device->is_host()) return WaitStaged(absl::InfiniteDuration());
  // The event that the stream waits for is recorded behind the last copy, so all copies must have
  // been queued. Only a save larger than the free staging memory waits here for more than the
  // queueing.
  HOLDFAST_RETURN_IF_ERROR(state_->WaitQueued(absl::InfiniteDuration()));
  return device->MakeStreamWait(stream);
}

absl::StatusOr<SaveReport> SaveHandle::WaitDurable(absl::Duration timeout) const {
  if (state_ == nullptr || !state_->guard.InCreator()) return NotHere();
  return state_->WaitDurable(timeout);
}

bool SaveHandle::IsDone() const {
  return state_ != nullptr && state_->guard.InCreator() && state_->IsDone();
}

absl::Status SaveHandle::Confirm(const absl::Status& capture) const {
  if (state_ == nullptr || !state_->guard.InCreator()) return NotHere();
  state_->Confirm(capture);
  return absl::OkStatus();
}

absl::Status SaveHandle::Cancel() const {
  if (state_ == nullptr || !state_->guard.InCreator()) return NotHere();
  state_->Cancel();
  return absl::OkStatus();
}

SaveProgress SaveHandle::progress() const {
  if (state_ == nullptr || !state_->guard.InCreator()) return {};
  return state_->Progress();
}

int SaveHandle::worker_pid() const {
  return state_ == nullptr || !state_->guard.InCreator() ? 0 : state_->WorkerPid();
}

uint64_t SaveHandle::epoch() const { return state_ == nullptr ? 0 : state_->epoch; }

}  // namespace holdfast
