#include "runtime/writer/supervisor.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/base/clock.h"
#include "runtime/base/planted_bugs.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "runtime/layout/launcher.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"

namespace holdfast::writer {

namespace {

// The interval of deadline checks with saves in flight.
constexpr int kTickMs = 200;
constexpr int kIdleTickMs = 1000;
// A round allocates memory only beyond this number of saves in flight.
constexpr size_t kSavesUsual = 64;
// A worker gives up at its stall deadline; the supervisor kills at this multiple of the deadline.
constexpr double kKillFactor = 1.5;
// A killed process that is not gone after this time is stuck in the kernel (D state).
constexpr uint64_t kKillGraceNs = 10'000'000'000;
// The kernel takes down the ring of a killed process after its end. A save ends with its memory
// quarantined when the take-down lasts longer.
constexpr uint64_t kLandingGraceNs = 500'000'000;
// The interval at which waiters for saves check for a quarantine, which ends the wait.
constexpr absl::Duration kQuarantineStep = absl::Seconds(1);

// Describes the obstacle to replacing a checkpoint; empty where an errno describes it.
std::string InTheWay(const Completion& result) {
  if (!result.foreign.empty()) return absl::StrCat("entry ", result.foreign);
  if (result.newer == AttemptId()) return "";
  return absl::StrCat("step ", result.newer_step, ", attempt ", base::Hex(result.newer));
}

/// Returns true when the save's worker was a process and was killed as damaged. No value in the
/// table counts then. A thread shares the trainer's memory, damaged or not.
bool WasKilledAsDamaged(const SaveState& save) {
  return !save.worker_damage.ok() && layout::TraitsOf(save.link->launcher()).process;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Supervisor>> Supervisor::Start(staging::StagingPool* pool,
                                                              const SupervisorOptions& options) {
  std::unique_ptr<Supervisor> supervisor(new Supervisor(pool, options));
  supervisor->wake_ = base::UniqueFd(sys::EventFdOwned());
  if (!supervisor->wake_.valid())
    return base::ErrnoStatus("create", "eventfd for the supervision of workers", errno);
  HOLDFAST_RETURN_IF_ERROR(supervisor->thread_.Start([raw = supervisor.get()] { raw->Run(); }));
  return supervisor;
}

Supervisor::Supervisor(staging::StagingPool* pool, const SupervisorOptions& options)
    : pool_(pool), options_(options) {
  round_.reserve(kSavesUsual);
  polled_.reserve(1 + 3 * kSavesUsual);
}

Supervisor::~Supervisor() {
  {
    const base::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (wake_.valid()) Wake();
  thread_.Join();
}

void Supervisor::Watch(std::shared_ptr<SaveState> save) {
  save->progress_at_ns = sys::NowNs();
  {
    const base::MutexLock lock(&mutex_);
    saves_.push_back(std::move(save));
  }
  Wake();
}

void Supervisor::Wake() {
  const uint64_t one = 1;
  (void)!sys::Sys().write(wake_.get(), &one, sizeof(one));
}

absl::Status Supervisor::WaitIdle(const void* owner, absl::Time deadline) {
  const base::MutexLock lock(&mutex_);
  while (true) {
    const auto count = std::count_if(saves_.begin(), saves_.end(), [&](const auto& save) {
      return save->owner == owner && (!save->quarantined || save->ending);
    });
    if (count == 0) return absl::OkStatus();
    if (base::Now() >= deadline) {
      return base::TimeOut(absl::StrCat("wait for ",
                                        base::Counted(static_cast<uint64_t>(count), "save"),
                                        " in flight: not done yet"));
    }
    changed_.WaitUntil(&mutex_, std::min(deadline, base::Now() + kQuarantineStep));
  }
}

bool Supervisor::HasSaves() {
  const base::MutexLock lock(&mutex_);
  return !saves_.empty();
}

bool Supervisor::HasUsers() {
  const base::MutexLock lock(&mutex_);
  const auto used = [](const auto& save) {
    return save->users.load(std::memory_order_acquire) != 0;
  };
  return std::any_of(saves_.begin(), saves_.end(), used);
}

uint64_t Supervisor::in_flight() {
  const base::MutexLock lock(&mutex_);
  const auto goes_on = [](const auto& save) { return !save->IsDone(); };
  return static_cast<uint64_t>(std::count_if(saves_.begin(), saves_.end(), goes_on));
}

void Supervisor::Run() {
  while (true) {
    {
      const base::MutexLock lock(&mutex_);
      if (stopping_ && saves_.empty()) return;
      round_ = saves_;
    }
    // Only this thread hands saves over, so that the others stay its own during the round.
    std::erase_if(round_, [](const auto& save) { return save->ending.load(); });
    PollOnce();
    for (const auto& save : round_) Service(save);
    if (round_.empty()) TrimIfIdle();
    round_.clear();
  }
}

void Supervisor::PollOnce() {
  polled_.assign(1, {.fd = wake_.get(), .events = POLLIN, .revents = 0});
  for (const auto& save : round_) {
    polled_.push_back({.fd = save->link->doorbell_fd(), .events = POLLIN, .revents = 0});
    // poll(2) ignores negative fds (a thread has no pidfd). The pidfd of a dead worker and the
    // hang-up stay readable, so each is left out once seen.
    const bool gone = save->gone_at_ns != 0;
    const bool lands = gone && !save->retired && !save->link->HasHungUp();
    polled_.push_back({.fd = gone ? -1 : save->link->pidfd(), .events = POLLIN, .revents = 0});
    polled_.push_back({.fd = lands ? save->link->socket() : -1, .events = 0, .revents = 0});
  }
  const bool trims = options_.idle_trim != absl::InfiniteDuration();
  const int timeout_ms = !round_.empty() ? kTickMs : trims ? kIdleTickMs : -1;
  sys::Sys().poll(polled_.data(), polled_.size(), timeout_ms);
  uint64_t count = 0;
  if ((polled_[0].revents & POLLIN) != 0)
    (void)!sys::Sys().read(wake_.get(), &count, sizeof(count));
  for (size_t i = 0; i < round_.size(); ++i) {
    if ((polled_[1 + 3 * i].revents & POLLIN) != 0) round_[i]->link->DrainDoorbell();
  }
}

void Supervisor::Service(const std::shared_ptr<SaveState>& save) {
  ReleaseAcknowledged(save.get());
  // Order matters: a worker that is seen gone first has made every store.
  const bool gone = save->link->IsGone();
  ReadTable(save.get());
  if (gone && save->gone_at_ns == 0) save->gone_at_ns = sys::NowNs();
  RetireIfLanded(save.get(), gone);
  // A worker of one job is joined; a kept worker's job ends with its result. A damaged process was
  // killed.
  if (gone || (save->link->kept() && save->result.has_value() && !WasKilledAsDamaged(*save)))
    return End(save, gone);
  EndAsserted(save);
  if (IsQueued(*save)) {
    save->progress_at_ns = sys::NowNs();
  } else {
    CheckStalled(save);
  }
}

void Supervisor::ReadTable(SaveState* save) {
  if (const char* const wrong = WrongState(*save->table->job())) return CallDamaged(save, wrong);
  if (save->result.has_value()) return;
  absl::StatusOr<std::optional<Completion>> result = save->table->ReadResult();
  if (!result.ok()) return CallDamaged(save, result.status().message());
  save->result = *std::move(result);
  // acquire: pairs with the last seal.
  if (save->result.has_value() && save->result->failure.ok() &&
      save->extents_to_seal.load(std::memory_order_acquire) != 0)
    CallDamaged(save, "reported success before it had every byte");
}

void Supervisor::AbortStaging(SaveState* save, const absl::Status& why) {
  save->FailStaging(why);
  pool_->AbortEpoch(save->epoch);
}

void Supervisor::CallDamaged(SaveState* save, absl::string_view what) {
  if (!save->worker_damage.ok()) return;
  save->worker_damage = absl::InternalError(
      absl::StrCat("save ", save->path, ": its worker ", what, "; its memory is damaged"));
  AbortStaging(save, save->worker_damage);
  save->link->Kill();
}

bool Supervisor::HasLanded(const SaveState& save, bool gone) {
  if (base::Planted(base::Bug::kTrustThePidfd)) return gone;
  if (WasKilledAsDamaged(save))
    return gone && save.link->HasHungUp() && save.writes_end_with_process;
  const layout::Job& job = *save.table->job();
  // acquire: pairs with the worker's release; the worker's reads of the bytes precede their reuse.
  if (job.staging_released.load(std::memory_order_acquire) != 0) return true;
  if (!gone || !save.link->HasHungUp()) return false;
  const auto engine = static_cast<EngineRung>(job.engine_used.load(std::memory_order_relaxed));
  return engine != EngineRung::kPwrite || save.writes_end_with_process;
}

void Supervisor::RetireIfLanded(SaveState* save, bool gone) {
  if (save->retired || !HasLanded(*save, gone)) return;
  if (save->users.load(std::memory_order_acquire) != 0) {
    // The worker failed early (a full disk): no use in staging the rest.
    pool_->AbortEpoch(save->epoch);
    return;
  }
  pool_->Retire(save->epoch);
  save->retired = true;
}

// A kept worker runs one job after the other: waiting for earlier jobs is no stall.
bool Supervisor::IsQueued(const SaveState& save) const {
  const auto begun = [](const SaveState& state) {
    return state.table->job()->worker_pid.load(std::memory_order_relaxed) != 0;
  };
  if (!save.link->kept() || begun(save)) return false;
  return std::any_of(round_.begin(), round_.end(), [&](const std::shared_ptr<SaveState>& other) {
    // The worker of a save that is ending takes the next job.
    return !other->ending && other->link == save.link && !other->quarantined && begun(*other);
  });
}

void Supervisor::ReleaseAcknowledged(SaveState* save) {
  if (save->retired || !save->worker_damage.ok()) return;
  if (!layout::Streams(*save->table->job())) return;
  if (base::Planted(base::Bug::kReleaseAtSubmit)) return;
  uint32_t index = 0;
  while (save->acknowledged.Next(&index)) {
    if (index < save->leases.size() && pool_->Release(save->leases[index])) continue;
    // Nothing was freed.
    return CallDamaged(save,
                       absl::StrCat("acknowledged extent ", index, " of ", save->leases.size(),
                                    " twice or without having been given it"));
  }
}

// A thread whose assertion failed neither ends nor goes on: see sys::AssertionFailed. A process
// ends.
void Supervisor::EndAsserted(const std::shared_ptr<SaveState>& save) {
  const layout::Job& job = *save->table->job();
  if (save->quarantined || layout::TraitsOf(save->link->launcher()).process) return;
  // acquire: the text was written before.
  if (job.assertion_failed.load(std::memory_order_acquire) == 0) return;
  save->link->Kill();  // The worker gets no further job.
  const absl::Status why = absl::InternalError(
      absl::StrCat("save ", save->path, ": its worker found its own state wrong (",
                   ReadReason(job.completion), ")"));
  AbortStaging(save.get(), why);
  Quarantine(save, base::Annotate(why, "its staging memory is quarantined for good"));
}

uint64_t Supervisor::TimeWithoutProgress(SaveState* save) {
  const uint64_t now = sys::NowNs();
  sys::OwnGap::Forgive(save->gap.Round(now), now, &save->progress_at_ns);
  const uint64_t progress =
      layout::Progress(*save->table->job()) - save->users.load(std::memory_order_relaxed);
  if (progress != save->progress_seen) {
    save->progress_seen = progress;
    save->progress_at_ns = now;
  }
  return now - save->progress_at_ns;
}

void Supervisor::CheckStalled(const std::shared_ptr<SaveState>& save) {
  const JobParameters& job = save->table->parameters();
  const uint64_t waited = TimeWithoutProgress(save.get());
  const uint32_t phase = save->table->job()->phase.load(std::memory_order_relaxed);
  // Waiting for other ranks has a separate deadline.
  const bool waits_for_ranks = phase == static_cast<uint32_t>(layout::Phase::kWaitingForRanks);
  const uint64_t deadline = waits_for_ranks
                                ? std::max(job.time_stalled_max_ns, job.time_ranks_max_ns)
                                : job.time_stalled_max_ns;
  const auto allowed = static_cast<uint64_t>(static_cast<double>(deadline) * kKillFactor);
  // A limited rate is no stall: a chunk may take its time.
  const uint64_t rate = job.qos.bytes_per_second_max;
  const uint64_t paced = rate == 0 ? 0 : 2 * (uint64_t{kChunkBytes} * sys::kNsPerSecond / rate);
  if (waited < allowed + paced) return;
  if (!save->killed) {
    save->killed = true;
    save->link->Kill();
  }
  if (waited > allowed + paced + kKillGraceNs) {
    // The kernel may still read these pages for the disk.
    Quarantine(save, absl::DeadlineExceededError(absl::StrCat(
                         "save ", save->path, ": its worker makes no progress and cannot be ",
                         "stopped; its staging memory is quarantined until it ends")));
  }
}

// A time-out never frees memory. The save stays watched, and its memory is released when its
// transfers have provably landed.
void Supervisor::Quarantine(const std::shared_ptr<SaveState>& save, const absl::Status& why) {
  if (save->quarantined) return;
  // The device stager ends when every save was staged or has failed.
  if (save->users.load(std::memory_order_acquire) != 0) AbortStaging(save.get(), why);
  if (!save->retired) {
    pool_->Quarantine(save->epoch, std::string(why.message()));
    save->table->job()->quarantined.store(1, std::memory_order_relaxed);
  }
  save->ending = true;  // first: see WaitIdle
  save->quarantined = true;
  HandOver(save, [this, save, why] {
    if (save->on_given_up) save->on_given_up(save);
    save->Finish(why);
    if (save->tell_ranks) save->tell_ranks(why);
    const base::MutexLock lock(&mutex_);
    save->ending = false;
  });
}

void Supervisor::HandOver(const std::shared_ptr<SaveState>& save, std::function<void()> steps) {
  save->ending = true;
  endings_.Run([this, steps = std::move(steps)] {
    steps();
    {
      const base::MutexLock lock(&mutex_);
      changed_.NotifyAll();
    }
    Wake();
  });
}

void Supervisor::End(const std::shared_ptr<SaveState>& save, bool gone) {
  bool left_files = false;
  const absl::Status status = Outcome(save.get(), gone, &left_files);
  if (save->users.load(std::memory_order_acquire) != 0) {
    return StopStaging(save, status);
  }
  RetireIfLanded(save.get(), gone);  // The last user may have left since the first look.
  if (!save->retired) return AwaitLanding(save, status);
  pool_->ReturnControlBytes(save->table->bytes());
  HandOver(save, [this, save, status, left_files] {
    const absl::Status ended =
        save->on_finished ? save->on_finished(save, status, left_files) : status;
    save->in_use.Reset();
    save->trainer_lock.Reset();
    if (!save->quarantined) save->Finish(ended);
    save->ReleaseResources();
    const base::MutexLock lock(&mutex_);
    std::erase(saves_, save);
  });
}

// The caller, a sealer or a device still touches the leases of a save whose worker has ended.
void Supervisor::StopStaging(const std::shared_ptr<SaveState>& save, const absl::Status& outcome) {
  // The last sealer may be between its last publication and its leave: nothing to stop.
  if (outcome.ok()) return;
  if (!save->StagingFailed()) AbortStaging(save.get(), outcome);
  // A begun device copy cannot be cancelled. Without this, a hanging stream would hang every waiter
  // of the save.
  if (TimeWithoutProgress(save.get()) < save->table->parameters().time_stalled_max_ns) return;
  Quarantine(save, base::Annotate(outcome, absl::StrCat("copies into its staging memory do not ",
                                                        "end; it is quarantined until they do")));
}

void Supervisor::AwaitLanding(const std::shared_ptr<SaveState>& save, const absl::Status& outcome) {
  if (sys::NowNs() - save->gone_at_ns < kLandingGraceNs) return;
  const bool shown = save->writes_end_with_process || !save->link->HasHungUp();
  Quarantine(save,
             base::Annotate(outcome, shown ? "its staging memory is quarantined until the last of "
                                             "its writes has landed"
                                           : "its staging memory is quarantined for good: this "
                                             "file system does not show when a killed process's "
                                             "last write has landed"));
}

absl::Status Supervisor::Outcome(SaveState* save, bool gone, bool* left_files) {
  const std::string how = gone ? save->link->Reap() : std::string();
  const absl::Status staging = save->StagingStatus();
  *left_files = !save->result.has_value() || WasKilledAsDamaged(*save);
  if (!save->worker_damage.ok()) return save->worker_damage;
  if (!save->result.has_value()) return WhyUnreported(*save, how);
  const Completion& result = *save->result;
  const Failure& failure = result.failure;
  if (failure.ok()) return absl::OkStatus();
  *left_files = result.left_files;
  // The worker only obeyed: the reason is on this side.
  if (failure.operation == Operation::kWaitTrainer && !staging.ok()) return staging;
  if (failure.operation == Operation::kWaitRanks) {
    return absl::Status(
        static_cast<absl::StatusCode>(failure.code),
        absl::StrCat("save ", save->path, ": ", base::Describe(result.rank_failure)));
  }
  const absl::Status status = base::ToStatus(failure, save->Names());
  // The worker's own text: the defect of a malformed table, or the transfers in flight at a stall.
  const bool tells =
      failure.operation == Operation::kAttach || failure.code == FailureCode::kDeadlineExceeded;
  std::string more;
  if (tells && !result.reason.empty()) {
    more = result.reason;
  } else if (failure.operation == Operation::kReplace) {
    more = InTheWay(result);
  } else if (result.figures.write_attempts > 1) {
    more = "at the second attempt, after an fsync that failed";
  } else if (failure.operation == Operation::kSync && layout::Streams(*save->table->job())) {
    more = "no second attempt: the save streamed, its staging memory was reused";
  }
  if (more.empty()) return status;
  absl::Status told(status.code(), absl::StrCat(status.message(), " (", more, ")"));
  status.ForEachPayload(
      [&told](absl::string_view url, const absl::Cord& payload) { told.SetPayload(url, payload); });
  return told;
}

absl::Status Supervisor::WhyUnreported(const SaveState& save, const std::string& how) const {
  const std::string reason = ReadReason(save.table->job()->completion);
  const std::string told = reason.empty() ? "" : absl::StrCat(" (", reason, ")");
  if (save.killed) {
    return absl::DeadlineExceededError(
        absl::StrCat("save ", save.path, ": its worker made no progress for ",
                     absl::FormatDuration(options_.time_stalled_max), " and was killed", told));
  }
  if (save.link->given_up()) {
    return absl::AbortedError(
        absl::StrCat("save ", save.path, ": its worker was stopped, because of another save"));
  }
  return absl::AbortedError(absl::StrCat("save ", save.path, ": its worker ",
                                         how.empty() ? "is gone" : how,
                                         " before it reported a result", told));
}

void Supervisor::TrimIfIdle() {
  if (options_.idle_trim == absl::InfiniteDuration()) return;
  if (pool_->arena().resident() && pool_->IdleFor() >= options_.idle_trim) {
    // A save that begins meanwhile makes the trim fail harmlessly; the next tick tries again.
    (void)pool_->Trim();
  }
}

}  // namespace holdfast::writer
