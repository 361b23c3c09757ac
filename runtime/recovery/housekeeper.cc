#include "runtime/recovery/housekeeper.h"

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "holdfast/recovery.h"
#include "runtime/base/clock.h"
#include "runtime/base/status.h"
#include "runtime/directory/completeness.h"
#include "runtime/directory/entries.h"
#include "runtime/directory/listing.h"
#include "runtime/directory/removal.h"
#include "runtime/format/directory_names.h"
#include "runtime/layout/launcher.h"
#include "runtime/sys/system.h"
#include "runtime/writer/job_table.h"

namespace holdfast::recovery {

namespace {

// Deleting yields to all other work on the machine.
constexpr int kDeleteNice = 10;
constexpr int kPollMs = 100;
constexpr absl::Duration kInUsePoll = absl::Milliseconds(100);
// The workers of other ranks remove their own files first: 0.25 s/GiB.
constexpr absl::Duration kInUseMax = absl::Minutes(10);
// A save holds its checkpoint from the rename until the name is durable.
constexpr absl::Duration kHeldMax = absl::Seconds(10);

absl::StatusOr<std::optional<writer::Completion>> ReadResult(const writer::JobTable& table,
                                                             const std::string& object) {
  auto result = table.ReadResult();
  if (!result.ok())
    return base::Annotate(result.status(), absl::StrCat("remove ", object, ": its worker"));
  return result;
}

}  // namespace

Housekeeper::Housekeeper(const CheckpointerOptions& options, writer::WorkerSource* workers)
    : options_(options), workers_(workers) {}

Housekeeper::~Housekeeper() {
  {
    const base::MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.Join();
}

void Housekeeper::ApplyRetention(const Parent& parent, const std::string& name,
                                 uint64_t called_ns) {
  if (options_.retention.keep_last == 0 || options_.rank != 0) return;
  std::string latest;
  {
    const base::MutexLock lock(&mutex_);
    Durable& of_series = latest_[format::SeriesOf(name)];
    if (of_series.called_ns <= called_ns) of_series = {.called_ns = called_ns, .name = name};
    latest = of_series.name;
  }
  Queue({.kind = Kind::kRetention,
         .parent = parent,
         .name = std::move(latest),
         .locks = {},
         .until = base::Now() + kHeldMax});
}

void Housekeeper::Remove(const Parent& parent, const std::string& name,
                         directory::PartialDirectory locks) {
  Queue({.kind = Kind::kRemove, .parent = parent, .name = name, .locks = std::move(locks)});
}

void Housekeeper::RemoveOnceUnused(const Parent& parent, const std::string& name) {
  Queue({.kind = Kind::kRemoveOnceUnused,
         .parent = parent,
         .name = name,
         .locks = {},
         .until = base::Now() + kInUseMax});
}

void Housekeeper::Queue(Task task) {
  const base::MutexLock lock(&mutex_);
  if (!started_) {
    const absl::Status started = thread_.Start([this] { Run(); });
    first_error_.Update(started);
    if (!started.ok()) return;
    started_ = true;
  }
  tasks_.push_back(std::move(task));
  changed_.NotifyAll();
}

absl::Status Housekeeper::WaitIdle(absl::Time deadline) {
  const base::MutexLock lock(&mutex_);
  while (!IsIdle()) {
    if (!changed_.WaitUntil(&mutex_, deadline) && !IsIdle()) {
      return base::TimeOut("wait for background deletion: not done yet");
    }
  }
  return std::exchange(first_error_, absl::OkStatus());
}

bool Housekeeper::IsIdle() const {
  return !busy_ && tasks_.empty() &&
         std::none_of(waiting_.begin(), waiting_.end(),
                      [](const Task& task) { return task.kind == Kind::kRetention; });
}

void Housekeeper::Run() {
  while (true) {
    Task task;
    {
      const base::MutexLock lock(&mutex_);
      while (tasks_.empty() && waiting_.empty() && !stopping_)
        changed_.WaitUntil(&mutex_, base::Now() + absl::Hours(1));
      if (tasks_.empty() && !stopping_) changed_.WaitUntil(&mutex_, base::Now() + kInUsePoll);
      std::deque<Task>& next = tasks_.empty() ? waiting_ : tasks_;
      if (next.empty()) return;
      task = std::move(next.front());
      next.pop_front();
      busy_ = true;
    }
    absl::Status status = Do(&task);
    const base::MutexLock lock(&mutex_);
    busy_ = false;
    if (task.held && !stopping_ && base::Now() < task.until) {
      waiting_.push_back(std::move(task));
      status = absl::OkStatus();
    }
    if (first_error_.ok()) first_error_ = status;
    changed_.NotifyAll();
  }
}

absl::Status Housekeeper::Do(Task* task) {
  const int parent = task->parent->get();
  task->held = false;
  if (task->kind == Kind::kRetention) return Retire(parent, task->name, &task->held);
  if (task->kind == Kind::kRemoveOnceUnused) {
    auto locks = directory::LockUnused(parent, task->name);
    // Gone, or no lock is a proof here: a recovery decides.
    if (absl::IsNotFound(locks.status()) || absl::IsFailedPrecondition(locks.status())) {
      return absl::OkStatus();
    }
    task->held = absl::IsUnavailable(locks.status());
    if (task->held) return absl::OkStatus();
    HOLDFAST_RETURN_IF_ERROR(locks.status());
    const int directory = locks->in_use.get();
    // Only a recovery decides on a complete or a damaged directory.
    if (!directory::IsOfASave(directory) ||
        directory::InspectUncommitted(directory).state != Verdict::kIncomplete) {
      return absl::OkStatus();
    }
    task->locks = *std::move(locks);
  }
  // The rename of a replaced checkpoint or a failed save may not be durable yet. Power loss must
  // not give the name back to a directory that is removed here.
  HOLDFAST_RETURN_IF_ERROR(directory::SyncDirectory(parent, options_.directory));
  return Delete(parent, {task->name}, task->locks.in_use.get());
}

absl::Status Housekeeper::Retire(int parent, const std::string& saved, bool* held) {
  HOLDFAST_ASSIGN_OR_RETURN(
      const directory::Listing listing,
      directory::ListComplete(parent, options_.directory, directory::Proof::kRecord));
  const std::vector<CheckpointInfo>& complete = listing.complete;
  std::vector<directory::RetiredCheckpoint> retired;
  std::vector<std::string> names;
  absl::Status first;
  absl::Status in_use;
  absl::Status damaged;
  const auto is_whole = [&](const CheckpointInfo& info) {
    const auto checkpoint = directory::OpenDirectory(parent, info.name);
    const absl::Status why =
        checkpoint.ok() ? directory::Inspect(checkpoint->get()).reason : checkpoint.status();
    damaged.Update(base::Annotate(why, absl::StrCat(options_.directory, "/", info.name,
                                                    ": it counts for none of keep_last")));
    return why.ok();
  };
  for (const std::string& name : SelectForRemoval(complete, options_.retention, saved, is_whole)) {
    for (const CheckpointInfo& info : complete) {
      if (info.name != name) continue;
      absl::StatusOr<directory::RetiredCheckpoint> gone = directory::RetireCheckpoint(parent, info);
      if (!gone.ok()) {  // The remaining checkpoints are deleted all the same.
        (absl::IsAborted(gone.status()) ? in_use : first)
            .Update(base::Annotate(gone.status(), options_.directory));
        continue;
      }
      names.push_back(gone->name);
      retired.push_back(*std::move(gone));
    }
  }
  if (!names.empty()) first.Update(Delete(parent, names, /*lock=*/-1));
  *held = first.ok() && !in_use.ok();
  first.Update(in_use);
  first.Update(damaged);
  return first;
}

absl::Status Housekeeper::Delete(int parent, const std::vector<std::string>& names, int lock) {
  writer::JobParameters parameters;
  parameters.kind = layout::JobKind::kDelete;
  parameters.launcher = layout::BackgroundLauncher(options_.launcher);
  parameters.qos.nice = kDeleteNice;
  parameters.time_stalled_max_ns =
      static_cast<uint64_t>(absl::ToInt64Nanoseconds(options_.time_stalled_max));
  HOLDFAST_ASSIGN_OR_RETURN(const std::unique_ptr<writer::JobTable> table,
                            writer::JobTable::ForDelete(parameters, names));
  std::string object = absl::StrCat(options_.directory, "/", names.front());
  HOLDFAST_ASSIGN_OR_RETURN(
      const std::shared_ptr<writer::WorkerLink> link,
      workers_->StartBackground(absl::StrCat("delete ", names.front()), *table, parent, lock));
  // The bound is on the time without progress, not on the total time: a directory may have any
  // size.
  uint64_t seen = 0;
  uint64_t seen_at = sys::NowNs();
  std::optional<writer::Completion> result;
  while (!link->IsGone() && !(link->kept() && result.has_value())) {
    pollfd entries[2] = {{.fd = link->pidfd(), .events = POLLIN, .revents = 0},
                         {.fd = link->doorbell_fd(), .events = POLLIN, .revents = 0}};
    sys::Sys().poll(entries, 2, kPollMs);
    link->DrainDoorbell();
    HOLDFAST_ASSIGN_OR_RETURN(result, ReadResult(*table, object));
    const uint64_t progress = layout::Progress(*table->job());
    if (progress != seen) {
      seen = progress;
      seen_at = sys::NowNs();
    } else if (sys::NowNs() - seen_at > parameters.time_stalled_max_ns) {
      writer::WorkerLink::Abandon(link);
      return absl::DeadlineExceededError(
          absl::StrCat("remove ", object, ": no progress; Recover removes the rest"));
    }
  }
  // What a worker has written before its end is seen only now.
  HOLDFAST_ASSIGN_OR_RETURN(result, ReadResult(*table, object));
  if (!result.has_value()) {
    return absl::AbortedError(absl::StrCat("remove ", object, ": the worker ", link->Reap(),
                                           "; Recover removes the rest"));
  }
  if (result->failure.file < names.size())
    object = absl::StrCat(options_.directory, "/", names[result->failure.file]);
  base::FailureNames failure_names;
  failure_names.checkpoint = object;
  if (!result->foreign.empty()) absl::StrAppend(&failure_names.checkpoint, "/", result->foreign);
  return base::ToStatus(result->failure, failure_names);
}

}  // namespace holdfast::recovery
