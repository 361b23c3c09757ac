// The front door: one object that puts staging, writing and housekeeping together.
#include "holdfast/checkpointer.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>
#include <map>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/base/clock.h"
#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"
#include "runtime/checkpointer/abandon.h"
#include "runtime/checkpointer/device_registrant.h"
#include "runtime/checkpointer/directory_access.h"
#include "runtime/checkpointer/directory_lock.h"
#include "runtime/checkpointer/housekeeper.h"
#include "runtime/checkpointer/inspect.h"
#include "runtime/checkpointer/options.h"
#include "runtime/format/directory_names.h"
#include "runtime/format/manifest.h"
#include "runtime/staging/staging_pool.h"
#include "runtime/sys/system.h"
#include "runtime/writer/save_state.h"
#include "runtime/writer/sealer.h"
#include "runtime/writer/stager.h"
#include "runtime/writer/supervisor.h"
#include "runtime/writer/worker_program.h"
#include "runtime/writer/worker_source.h"

namespace holdfast {
namespace {

// Errors of saves that nobody waited for, until a Flush asks: enough to tell the first, bounded all
// the same.
constexpr size_t kUnseenErrorsMax = 16;
// A worker that has failed is gone within milliseconds; a call that failed with it waits this long
// for its reason.
constexpr absl::Duration kTimeToEnd = absl::Seconds(10);

absl::Status OtherProcess() {
  return absl::FailedPreconditionError(
      "use of a Checkpointer in a process that did not create it (a fork of it): create one here");
}

uint64_t Nanoseconds(absl::Duration time) {
  return time == absl::InfiniteDuration() ? UINT64_MAX / 4
                                          : static_cast<uint64_t>(absl::ToInt64Nanoseconds(time));
}

// The path from the root, for messages and reports. Whether it exists is found out by opening it.
std::string Absolute(const std::string& directory) {
  std::filesystem::path path(directory);
  if (path.is_relative()) {
    char here[PATH_MAX];
    const ssize_t length = sys::Sys().readlinkat(AT_FDCWD, "/proc/self/cwd", here, sizeof(here));
    if (length > 0 && length < static_cast<ssize_t>(sizeof(here))) {
      path = std::filesystem::path(std::string(here, static_cast<size_t>(length))) / path;
    }
  }
  return path.lexically_normal().string();
}

}  // namespace

AttemptId NewAttemptId() {
  std::random_device random;
  const auto draw = [&random] { return (uint64_t{random()} << 32) | random(); };
  return {.high = draw(), .low = draw()};
}

/// What all front doors to one staging arena share: the memory, the workers and the threads behind
/// them.
class Checkpointer::Core {
 public:
  ~Core();

  /// `given` with what was found out (worker program, threads).
  absl::Status Start(CheckpointerOptions* given);
  absl::Status Register(Device* device);
  /// Opens the save's epoch and hands its job to a worker. In one step: a kept worker that had the
  /// job of a younger save before that of an older one would wait for memory that only the older
  /// one is given.
  absl::Status Launch(const std::string& title, int directory, SaveState* save)
      ABSL_LOCKS_EXCLUDED(launch_mutex_);

  std::unique_ptr<staging::StagingPool> pool;
  std::unique_ptr<writer::WorkerSource> workers;
  std::unique_ptr<writer::Sealer> sealer;
  std::unique_ptr<writer::Supervisor> supervisor;
  std::unique_ptr<writer::Stager> stager;

 private:
  base::Mutex launch_mutex_;
  base::Mutex mutex_;
  std::map<Device*, std::unique_ptr<checkpointer::DeviceRegistrant>> devices_
      ABSL_GUARDED_BY(mutex_);
};

class Checkpointer::Impl {
 public:
  explicit Impl(const CheckpointerOptions& given) : options(given) {}
  ~Impl();

  /// With a core of its own, or another's.
  absl::Status Start(std::shared_ptr<Core> shared);
  absl::StatusOr<SaveHandle> SaveAsync(const SaveRequest& request);
  absl::Status Flush(absl::Duration timeout);

  CheckpointerOptions options;
  base::ForkGuard guard;
  base::UniqueFd directory;
  std::shared_ptr<Core> core;
  std::unique_ptr<checkpointer::Housekeeper> housekeeper;

 private:
  /// Lets a save that outlived its front door (its worker could not be stopped) find that it is
  /// gone.
  struct Door {
    base::Mutex mutex;
    Impl* impl ABSL_GUARDED_BY(mutex) = nullptr;
  };

  absl::StatusOr<std::shared_ptr<SaveState>> Plan(const SaveRequest& request, AttemptId* attempt);
  absl::Status Admit(const SaveState& save) const;
  absl::Status OpenDirectories(const SaveRequest& request, const AttemptId& attempt,
                               SaveState* save);
  absl::Status Launch(const SaveRequest& request, const AttemptId& attempt, SaveState* save);
  static absl::Status WhyStopped(const absl::Status& staged, SaveState* save);
  void TakeBack(SaveState* save, bool files_only);
  void TellOtherRanks(const SaveRequest& request, const AttemptId& attempt) const;
  bool RemoveEmptyPartial(const SaveState& save) const;
  void OnFinished(const std::shared_ptr<SaveState>& save, const absl::Status& status,
                  bool left_files);
  bool IsBetweenTwoRenames(const SaveState& save) const;
  void KeepError(const std::shared_ptr<SaveState>& save) ABSL_LOCKS_EXCLUDED(mutex_);

  std::shared_ptr<Door> door_ = std::make_shared<Door>();
  base::Mutex mutex_;
  std::vector<std::shared_ptr<SaveState>> failed_ ABSL_GUARDED_BY(mutex_);
};

absl::Status Checkpointer::Core::Start(CheckpointerOptions* given) {
  CheckpointerOptions& options = *given;
  const bool spawns =
      options.launcher == Launcher::kSpawn || options.launcher == Launcher::kPersistent;
  if (spawns) {
    HOLDFAST_ASSIGN_OR_RETURN(options.worker_program,
                              writer::FindWorkerProgram(options.worker_program));
  }
  const uint32_t cpus = std::max(1u, std::thread::hardware_concurrency());
  if (options.staging.threads == 0) options.staging.threads = std::min(4u, cpus);
  HOLDFAST_ASSIGN_OR_RETURN(pool, staging::StagingPool::Create(options.staging));
  workers =
      std::make_unique<writer::WorkerSource>(pool.get(), options.launcher, options.worker_program);
  HOLDFAST_RETURN_IF_ERROR(workers->WarmUp());
  sealer = std::make_unique<writer::Sealer>(pool.get(), options.staging.threads, options.on_sealed);
  HOLDFAST_RETURN_IF_ERROR(sealer->Start());
  HOLDFAST_ASSIGN_OR_RETURN(
      supervisor,
      writer::Supervisor::Start(pool.get(), {.time_stalled_max = options.time_stalled_max,
                                             .idle_trim = options.staging.idle_trim}));
  stager = std::make_unique<writer::Stager>(
      pool.get(), sealer.get(),
      writer::StagerOptions{.fused_copy = options.fused_copy,
                            .second_look = options.second_look,
                            .time_memory_max = options.time_memory_max});
  return stager->Start();
}

absl::Status Checkpointer::Impl::Start(std::shared_ptr<Core> shared) {
  HOLDFAST_RETURN_IF_ERROR(ValidateOptions(options));
  options.directory = Absolute(options.directory);
  // By fd from here on: the trainer may change its working directory.
  directory = base::UniqueFd(sys::Sys().openat(AT_FDCWD, options.directory.c_str(),
                                               O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0));
  if (!directory.valid())
    return base::ErrnoStatus("open checkpoint directory", options.directory, errno);
  if (shared == nullptr) {
    shared = std::make_shared<Core>();
    HOLDFAST_RETURN_IF_ERROR(shared->Start(&options));
  }
  core = std::move(shared);
  {
    const base::MutexLock lock(&door_->mutex);
    door_->impl = this;
  }
  housekeeper =
      std::make_unique<checkpointer::Housekeeper>(options, directory.get(), core->workers.get());
  return housekeeper->Start();
}

Checkpointer::Impl::~Impl() {
  if (core == nullptr) return;
  // Its own saves call back; each ends by its own deadlines.
  (void)core->supervisor->WaitIdle(this, absl::InfiniteFuture());
  const base::MutexLock lock(&door_->mutex);
  door_->impl = nullptr;
}

Checkpointer::Core::~Core() {
  bool all_ended = supervisor == nullptr || supervisor->Stop();
  // The stager first: it feeds the sealer; both only while saves are in flight, so they have
  // nothing left to do.
  stager.reset();
  sealer.reset();
  supervisor.reset();
  workers.reset();
  {
    const base::MutexLock lock(&mutex_);
    for (auto& [device, registrant] : devices_) {
      if (pool != nullptr) pool->RemoveRegistrant(registrant.get());
      // With copies under way a device would wait for them, for ever if its stream hangs.
      all_ended = all_ended && registrant->Close();
    }
  }
  // Pages that a stuck worker or a device may still write must never become somebody else's: they
  // stay until the process ends.
  if (!all_ended) (void)pool.release();
}

absl::StatusOr<std::shared_ptr<SaveState>> Checkpointer::Impl::Plan(const SaveRequest& request,
                                                                    AttemptId* attempt) {
  HOLDFAST_RETURN_IF_ERROR(checkpointer::ValidateName(request.name));
  *attempt = request.attempt;
  if (*attempt == AttemptId()) {
    if (options.world_size > 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "save ", request.name,
          ": with more than one rank all must be given the same attempt id (see NewAttemptId)"));
    }
    *attempt = NewAttemptId();
  }
  auto save = std::make_shared<SaveState>();
  if (request.plan != nullptr) {
    HOLDFAST_RETURN_IF_ERROR(ValidatePlan(*request.plan));
    save->plan = *request.plan;
  } else {
    HOLDFAST_ASSIGN_OR_RETURN(
        save->plan, PlanSafetensors(format::ModelFileName(options.rank, options.world_size),
                                    request.tensors, {.metadata = {}, .attempt = *attempt}));
  }
  save->checksums = writer::Checksums::For(save->plan);
  save->checkpoint = request.name;
  save->path = absl::StrCat(options.directory, "/", request.name);
  save->step = request.step;
  save->wake_supervisor = [raw = core->supervisor.get()] { raw->Wake(); };
  save->owner = this;
  save->on_finished = [door = door_](const std::shared_ptr<SaveState>& ended,
                                     const absl::Status& status, bool left_files) {
    const base::MutexLock lock(&door->mutex);
    if (door->impl != nullptr) door->impl->OnFinished(ended, status, left_files);
  };
  save->on_given_up = [door = door_](const std::shared_ptr<SaveState>& given_up) {
    const base::MutexLock lock(&door->mutex);
    if (door->impl != nullptr) door->impl->KeepError(given_up);
  };
  for (const PlannedFile& file : save->plan.files) {
    save->bytes_total += file.bytes;
    save->bytes_to_lease += layout::AlignUp(file.bytes);
    for (const Segment& segment : file.segments) {
      if (segment.device != nullptr && !segment.device->is_host())
        HOLDFAST_RETURN_IF_ERROR(core->Register(segment.device));
    }
  }
  return save;
}

absl::Status Checkpointer::Impl::Admit(const SaveState& save) const {
  if (options.when_full == WhenFull::kWait || !core->pool->WouldWait(save.bytes_to_lease))
    return absl::OkStatus();
  if (options.when_full == WhenFull::kSkip) {
    return absl::UnavailableError(absl::StrCat("save ", save.checkpoint,
                                               ": skipped, because the staging memory is held ",
                                               "by saves in flight"));
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      "save ", save.checkpoint, ": the staging memory of ", core->pool->arena().bytes(),
      " bytes is held by saves in flight; raise arena_bytes, or wait for them"));
}

absl::Status Checkpointer::Impl::OpenDirectories(const SaveRequest& request,
                                                 const AttemptId& attempt, SaveState* save) {
  struct stat existing {};
  const bool exists = sys::Sys().fstatat(directory.get(), request.name.c_str(), &existing,
                                         AT_SYMLINK_NOFOLLOW) == 0;
  if (request.files_only) {
    save->in_use = base::UniqueFd(sys::Sys().openat(directory.get(), request.name.c_str(),
                                                    O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0));
    if (!save->in_use.valid()) return base::ErrnoStatus("open directory", save->path, errno);
    return absl::OkStatus();
  }
  if (exists && !request.replace) {
    return absl::AlreadyExistsError(
        "it exists already; choose another name, remove it, or ask to replace it");
  }
  if (exists && !S_ISDIR(existing.st_mode)) {
    return absl::FailedPreconditionError("it is a file, not a checkpoint");
  }
  save->partial = format::PartialName(request.name, attempt);
  HOLDFAST_ASSIGN_OR_RETURN(checkpointer::PartialDirectory partial,
                            checkpointer::MakePartialDirectory(directory.get(), save->partial));
  save->in_use = std::move(partial.in_use);
  save->trainer_lock = std::move(partial.trainer);
  return absl::OkStatus();
}

absl::Status Checkpointer::Impl::Launch(const SaveRequest& request, const AttemptId& attempt,
                                        SaveState* save) {
  writer::JobParameters job;
  job.flags = layout::kWriteManifest;
  if (request.replace) job.flags |= layout::kReplaceExisting;
  if (request.files_only) job.flags |= layout::kFilesOnly;
  if (options.read_back) job.flags |= layout::kReadBack;
  if (options.trainer_death == TrainerDeath::kFinish) job.flags |= layout::kFinishWithoutTrainer;
  if (!options.direct_io) job.flags |= layout::kBuffered;
  if (options.launcher == Launcher::kFork) job.flags |= layout::kForkedChild;
  job.launcher = options.launcher;
  job.engine = options.engine;
  job.queue_depth = options.queue_depth;
  job.pwrite_threads = options.pwrite_threads;
  job.streams = save->bytes_to_lease > core->pool->arena().bytes();
  job.attempt = attempt;
  job.rank = options.rank;
  job.world_size = options.world_size;
  job.step = request.step;
  job.arena_bytes = core->pool->arena().bytes();
  job.target = request.name;
  job.partial = save->partial;
  job.qos = options.qos;
  job.time_stalled_max_ns = Nanoseconds(options.time_stalled_max);
  job.time_ranks_max_ns = Nanoseconds(options.time_ranks_max);

  const format::ManifestTemplate manifest =
      format::BuildManifest({.checkpoint = request.name,
                             .attempt = attempt,
                             .rank = options.rank,
                             .world_size = options.world_size,
                             .step = request.step,
                             .launcher = options.launcher,
                             .pages = core->pool->arena().pages(),
                             .read_back = options.read_back},
                            save->plan);
  HOLDFAST_RETURN_IF_ERROR(
      core->pool->TakeControlBytes(writer::ControlBytes(save->plan, manifest)));
  absl::StatusOr<std::unique_ptr<writer::JobTable>> table =
      writer::JobTable::ForSave(job, save->plan, manifest);
  if (!table.ok()) {
    core->pool->ReturnControlBytes(writer::ControlBytes(save->plan, manifest));
    return table.status();
  }
  save->table = *std::move(table);
  const layout::Job& laid_out = *save->table->job();
  save->leases.resize(laid_out.extent_count);
  save->extents_to_lease.store(laid_out.extent_count, std::memory_order_relaxed);
  save->extents_to_seal.store(laid_out.extent_count, std::memory_order_relaxed);
  save->published.Reset(layout::At<layout::SharedU32>(save->table->job(), laid_out.published),
                        laid_out.extent_count);
  save->acknowledged =
      layout::LogReader(layout::At<layout::SharedU32>(save->table->job(), laid_out.acknowledged),
                        laid_out.extent_count);

  HOLDFAST_RETURN_IF_ERROR(
      core->Launch(absl::StrCat(request.name, " rank ", options.rank, " of ", options.world_size),
                   directory.get(), save));
  SaveReport* report = save->MutableReport();
  report->path = save->path;
  report->epoch = save->epoch;
  report->step = request.step;
  report->attempt = attempt;
  report->bytes = save->bytes_total;
  report->files = laid_out.file_count;
  report->tensors = laid_out.tensor_count;
  report->launcher = options.launcher;
  report->pages = core->pool->arena().pages();
  return absl::OkStatus();
}

void Checkpointer::Impl::TakeBack(SaveState* save, bool files_only) {
  if (save->epoch != 0) core->pool->Retire(save->epoch);
  if (save->table != nullptr) core->pool->ReturnControlBytes(save->table->bytes());
  save->in_use.Reset();
  save->trainer_lock.Reset();
  if (!files_only) (void)RemoveEmptyPartial(*save);
}

bool Checkpointer::Impl::RemoveEmptyPartial(const SaveState& save) const {
  // Of several ranks one must not take away the directory that another has locked and not yet
  // written to; Recover does, once all are gone.
  return !save.partial.empty() && options.world_size == 1 &&
         sys::Sys().unlinkat(directory.get(), save.partial.c_str(), AT_REMOVEDIR) == 0;
}

absl::StatusOr<SaveHandle> Checkpointer::Impl::SaveAsync(const SaveRequest& request) {
  const uint64_t entered_ns = sys::NowNs();
  AttemptId attempt;
  HOLDFAST_ASSIGN_OR_RETURN(std::shared_ptr<SaveState> save, Plan(request, &attempt));
  save->entered_ns = entered_ns;
  if (const absl::Status admitted = Admit(*save); !admitted.ok()) {
    TellOtherRanks(request, attempt);
    return admitted;
  }
  const absl::Status opened = OpenDirectories(request, attempt, save.get());
  if (!opened.ok()) {
    (void)RemoveEmptyPartial(*save);  // made, but not opened or locked: no fd was left
    // What stands under the name already is in every rank's way.
    if (!save->partial.empty()) TellOtherRanks(request, attempt);
    return base::Annotate(opened, absl::StrCat("save ", save->path));
  }
  const absl::Status launched = Launch(request, attempt, save.get());
  if (!launched.ok()) {
    TakeBack(save.get(), request.files_only);
    TellOtherRanks(request, attempt);
    return base::Annotate(launched, absl::StrCat("save ", save->path));
  }
  save->AddUser();  // this thread, until everything in host memory was copied
  core->supervisor->Watch(save);
  const absl::Status staged = core->stager->Stage(save);
  if (!staged.ok()) save->MarkErrorReturned();
  save->MutableReport()->time_in_call =
      absl::ToDoubleSeconds(absl::Nanoseconds(sys::NowNs() - entered_ns));
  save->DropUser();
  if (!staged.ok()) return WhyStopped(staged, save.get());
  return SaveHandle(std::move(save));
}

// A framework's directory has an owner who does it.
void Checkpointer::Impl::TellOtherRanks(const SaveRequest& request,
                                        const AttemptId& attempt) const {
  if (options.world_size < 2 || request.files_only) return;
  (void)checkpointer::LeaveAbortedMark(directory.get(), format::PartialName(request.name, attempt));
}

absl::Status Checkpointer::Impl::WhyStopped(const absl::Status& staged, SaveState* save) {
  // Staging that was stopped from outside knows no more than that: the worker has failed (a full
  // disk, a kill), and its end, which is near, tells why.
  if (!absl::IsAborted(staged)) return staged;
  const absl::Status ended = save->WaitDurable(kTimeToEnd).status();
  return save->IsDone() && !ended.ok() ? ended : staged;
}

void Checkpointer::Impl::OnFinished(const std::shared_ptr<SaveState>& save,
                                    const absl::Status& status, bool left_files) {
  if (status.ok()) {
    const std::string replaced = save->LeftBehind();
    if (format::ParseDirectoryName(replaced).kind == format::DirectoryKind::kPartial)
      housekeeper->Remove(replaced);
    housekeeper->ApplyRetention(save->checkpoint);
    return;
  }
  // What a worker left that did not even begin goes without another one, which may be no better.
  const bool removed = RemoveEmptyPartial(*save);
  // A rank of many must not remove what the others wrote; Recover does, once all are gone.
  if (!removed && left_files && !save->partial.empty() && options.world_size == 1 &&
      !IsBetweenTwoRenames(*save))
    housekeeper->Remove(save->partial);
  KeepError(save);
}

// Where directories cannot be exchanged, a worker that was killed while it replaced one leaves the
// name free and its own directory complete: a recovery promotes it.
bool Checkpointer::Impl::IsBetweenTwoRenames(const SaveState& save) const {
  struct stat existing {};
  if ((save.table->job()->flags & layout::kReplaceExisting) == 0 ||
      sys::Sys().fstatat(directory.get(), save.checkpoint.c_str(), &existing,
                         AT_SYMLINK_NOFOLLOW) == 0) {
    return false;
  }
  const auto partial = checkpointer::OpenDirectory(directory.get(), save.partial);
  return partial.ok() &&
         checkpointer::Inspect(partial->get()).state == checkpointer::Inspection::State::kComplete;
}

void Checkpointer::Impl::KeepError(const std::shared_ptr<SaveState>& save) {
  const base::MutexLock lock(&mutex_);
  std::erase_if(failed_, [&](const auto& kept) { return kept == save || kept->ErrorWasSeen(); });
  if (failed_.size() < kUnseenErrorsMax) failed_.push_back(save);
}

absl::Status Checkpointer::Core::Launch(const std::string& title, int directory, SaveState* save) {
  const base::MutexLock lock(&launch_mutex_);
  save->epoch = pool->OpenEpoch();
  save->table->job()->epoch = save->epoch;
  HOLDFAST_RETURN_IF_ERROR(pool->Prepare());
  const absl::Time begin = base::Now();
  HOLDFAST_ASSIGN_OR_RETURN(
      save->link, workers->Start(title, save->table->fd(), save->table->bytes(), directory,
                                 save->in_use.get()));
  save->MutableReport()->time_launching = absl::ToDoubleSeconds(base::Now() - begin);
  return absl::OkStatus();
}

absl::Status Checkpointer::Core::Register(Device* device) {
  const base::MutexLock lock(&mutex_);
  if (devices_.contains(device)) return absl::OkStatus();
  auto registrant = std::make_unique<checkpointer::DeviceRegistrant>(device, &pool->arena());
  HOLDFAST_RETURN_IF_ERROR(pool->Register(registrant.get()));
  devices_[device] = std::move(registrant);
  return absl::OkStatus();
}

absl::Status Checkpointer::Impl::Flush(absl::Duration timeout) {
  const absl::Time deadline = base::Now() + timeout;
  HOLDFAST_RETURN_IF_ERROR(core->supervisor->WaitIdle(this, deadline));
  absl::Status first = housekeeper->WaitIdle(deadline);
  std::vector<std::shared_ptr<SaveState>> failed;
  {
    const base::MutexLock lock(&mutex_);
    failed.swap(failed_);
  }
  for (auto save = failed.rbegin(); save != failed.rend(); ++save) {
    const absl::Status error = (*save)->TakeUnseenError();
    if (!error.ok()) first = error;
  }
  return first;
}

Checkpointer::Checkpointer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Checkpointer::~Checkpointer() {
  // In a forked child the threads, the worker and the memory are the parent's: touch nothing.
  if (impl_ != nullptr && !impl_->guard.InCreator()) (void)impl_.release();
}

absl::StatusOr<std::unique_ptr<Checkpointer>> Checkpointer::Create(
    const CheckpointerOptions& options) {
  auto impl = std::make_unique<Impl>(options);
  HOLDFAST_RETURN_IF_ERROR(impl->Start(nullptr));
  return std::unique_ptr<Checkpointer>(new Checkpointer(std::move(impl)));
}

absl::StatusOr<std::unique_ptr<Checkpointer>> Checkpointer::CreateBeside(
    const CheckpointerOptions& options) const {
  if (!impl_->guard.InCreator()) return OtherProcess();
  CheckpointerOptions mine = options;
  const CheckpointerOptions& core = impl_->options;
  mine.staging = core.staging;
  mine.launcher = core.launcher;
  mine.worker_program = core.worker_program;
  mine.fused_copy = core.fused_copy;
  mine.second_look = core.second_look;
  mine.time_memory_max = core.time_memory_max;
  mine.time_stalled_max = core.time_stalled_max;
  mine.on_sealed = core.on_sealed;
  auto impl = std::make_unique<Impl>(mine);
  HOLDFAST_RETURN_IF_ERROR(impl->Start(impl_->core));
  return std::unique_ptr<Checkpointer>(new Checkpointer(std::move(impl)));
}

absl::StatusOr<SaveHandle> Checkpointer::SaveAsync(const SaveRequest& request) {
  return impl_->guard.InCreator() ? impl_->SaveAsync(request) : OtherProcess();
}

absl::Status Checkpointer::Flush(absl::Duration timeout) {
  return impl_->guard.InCreator() ? impl_->Flush(timeout) : OtherProcess();
}

absl::Status Checkpointer::Trim() {
  return impl_->guard.InCreator() ? impl_->core->pool->Trim() : OtherProcess();
}

absl::Status Checkpointer::RegisterDevice(Device* device) {
  if (!impl_->guard.InCreator()) return OtherProcess();
  return device == nullptr || device->is_host() ? absl::OkStatus() : impl_->core->Register(device);
}

StagingStats Checkpointer::staging() const {
  return impl_->guard.InCreator() ? impl_->core->pool->stats() : StagingStats();
}

const CheckpointerOptions& Checkpointer::options() const { return impl_->options; }

}  // namespace holdfast
