// The front door: combines staging, writing and housekeeping in one object.
#include "holdfast/checkpointer.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/base/clock.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "runtime/base/unique_fd.h"
#include "runtime/checkpointer/core.h"
#include "runtime/checkpointer/last_structure.h"
#include "runtime/checkpointer/lineage.h"
#include "runtime/checkpointer/options.h"
#include "runtime/checkpointer/rank_presence.h"
#include "runtime/checkpointer/save_sources.h"
#include "runtime/checkpointer/single_file.h"
#include "runtime/checkpointer/unreported.h"
#include "runtime/checkpointer/unseen_errors.h"
#include "runtime/directory/completeness.h"
#include "runtime/directory/entries.h"
#include "runtime/directory/file_system.h"
#include "runtime/directory/locks.h"
#include "runtime/directory/replacement.h"
#include "runtime/directory/single_files.h"
#include "runtime/format/directory_names.h"
#include "runtime/format/packed_plan.h"
#include "runtime/format/safetensors.h"
#include "runtime/recovery/housekeeper.h"
#include "runtime/staging/staging_pool.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/process.h"
#include "runtime/sys/system.h"
#include "runtime/writer/save_state.h"
#include "runtime/writer/stager.h"
#include "runtime/writer/supervisor.h"

namespace holdfast {
namespace {

using checkpointer::IntoDirectory;

// A failed worker ends within milliseconds. A call that failed with the worker waits up to this
// time for the worker's error.
constexpr absl::Duration kTimeToEnd = absl::Seconds(10);

absl::Status OtherProcess() {
  return absl::FailedPreconditionError(
      "use of a Checkpointer in a process that did not create it (a fork of it): create one here");
}

uint64_t Nanoseconds(absl::Duration time) {
  return time == absl::InfiniteDuration() ? UINT64_MAX / 4
                                          : static_cast<uint64_t>(absl::ToInt64Nanoseconds(time));
}

/// The nonzero attempts of a list, except a save's own.
std::vector<AttemptId> Others(std::vector<AttemptId> attempts, const AttemptId& own) {
  std::erase_if(attempts,
                [&own](const AttemptId& each) { return each == AttemptId{} || each == own; });
  return attempts;
}

}  // namespace

AttemptId NewAttemptId() { return {.high = sys::RandomBits(), .low = sys::RandomBits()}; }

class Checkpointer::Impl {
 public:
  /// Without a directory: saves are refused.
  explicit Impl(const CheckpointerOptions& given) : options(given) {}
  ~Impl();

  /// `shared`: null for a core of its own.
  static absl::StatusOr<std::unique_ptr<Checkpointer>> Make(const CheckpointerOptions& options,
                                                            std::shared_ptr<Core> shared);
  absl::StatusOr<SaveHandle> SaveAsync(const SaveRequest& request);
  absl::Status Flush(absl::Duration timeout);

  CheckpointerOptions options;
  base::ForkGuard guard;
  std::shared_ptr<Core> core;
  std::unique_ptr<recovery::Housekeeper> housekeeper;

 private:
  absl::Status Start(std::shared_ptr<Core> shared);
  /// Shows a save whether its front door still exists. A save with an unstoppable worker outlives
  /// its door. The door waits for ending saves, which do not wait for each other.
  struct Door {
    base::Mutex mutex;
    base::Condition left;
    Impl* impl ABSL_GUARDED_BY(mutex) = nullptr;
    uint32_t inside ABSL_GUARDED_BY(mutex) = 0;
  };
  class Visit {
   public:
    explicit Visit(Door* door) : door_(door) {
      const base::MutexLock lock(&door_->mutex);
      impl_ = door_->impl;
      ++door_->inside;
    }
    ~Visit() {
      const base::MutexLock lock(&door_->mutex);
      --door_->inside;
      door_->left.NotifyAll();
    }
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;
    Impl* impl() const { return impl_; }  ///< Null: the door has gone.

   private:
    Door* door_;
    Impl* impl_;
  };

  absl::StatusOr<std::shared_ptr<const base::UniqueFd>> OpenParent() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<std::shared_ptr<SaveState>> Plan(const SaveRequest& request, AttemptId* attempt,
                                                  writer::Sources* sources);
  absl::Status Admit(const SaveState& save) const;
  using Presence = std::shared_ptr<checkpointer::RankPresence>;  // null with one rank
  absl::Status OpenDirectories(const SaveRequest& request, const AttemptId& attempt,
                               SaveState* save);
  absl::Status Launch(const SaveRequest& request, const AttemptId& attempt, writer::Sources sources,
                      SaveState* save);
  static absl::Status WhyStopped(const absl::Status& staged, SaveState* save);
  void TakeBack(SaveState* save, const AttemptId& attempt, bool files_only);
  RankInSave Rank(const SaveRequest& request, const AttemptId& attempt) const;
  void Attach(const Presence& presence, SaveState* save);
  bool RemoveEmptyPartial(const SaveState& save) const;
  absl::Status OnFinished(const std::shared_ptr<SaveState>& save, const Presence& presence,
                          const absl::Status& outcome, bool left_files);
  /// Removes, in the background, the checkpoint that a committed save has replaced.
  void RemoveReplaced(const SaveState& save, bool reported);

  std::shared_ptr<Door> door_ = std::make_shared<Door>();
  checkpointer::Lineage lineage_;
  checkpointer::LastStructure last_structure_;
  checkpointer::UnseenErrors unseen_errors_;
  base::Mutex mutex_;
  std::shared_ptr<const base::UniqueFd> parent_ ABSL_GUARDED_BY(mutex_);
};

absl::StatusOr<std::unique_ptr<Checkpointer>> Checkpointer::Impl::Make(
    const CheckpointerOptions& options, std::shared_ptr<Core> shared) {
  auto impl = std::make_unique<Impl>(options);
  HOLDFAST_RETURN_IF_ERROR(impl->Start(std::move(shared)));
  return std::unique_ptr<Checkpointer>(new Checkpointer(std::move(impl)));
}

absl::Status Checkpointer::Impl::Start(std::shared_ptr<Core> shared) {
  if (!options.directory.empty()) {
    options.directory = directory::AbsolutePath(options.directory);
    HOLDFAST_ASSIGN_OR_RETURN(const std::shared_ptr<const base::UniqueFd> parent, OpenParent());
    if (options.rank == 0) lineage_.Begin(parent->get());
  }
  if (shared == nullptr) {
    shared = std::make_shared<Core>();
    HOLDFAST_RETURN_IF_ERROR(shared->Start(&options));
  }
  core = std::move(shared);
  {
    const base::MutexLock lock(&door_->mutex);
    door_->impl = this;
  }
  housekeeper = std::make_unique<recovery::Housekeeper>(options, core->workers.get());
  return absl::OkStatus();
}

/// Returns the directory that the path leads to now. Since the last save the directory may have
/// been renamed and made anew, or mounted over. Saves in flight keep their directory.
absl::StatusOr<std::shared_ptr<const base::UniqueFd>> Checkpointer::Impl::OpenParent() {
  if (options.directory.empty()) {
    return absl::FailedPreconditionError(
        "this Checkpointer has memory alone: save by one that CreateBeside made of it");
  }
  std::shared_ptr<const base::UniqueFd> parent;
  {
    const base::MutexLock lock(&mutex_);
    parent = parent_;
  }
  // Outside the lock: the file system may hang. "/.": follows a symbolic link to its directory.
  if (parent != nullptr &&
      directory::NameRefersTo(AT_FDCWD, absl::StrCat(options.directory, "/."), parent->get())) {
    return parent;
  }
  base::UniqueFd opened(
      sys::OpenOwned(AT_FDCWD, options.directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0));
  if (!opened.valid())
    return base::ErrnoStatus("open checkpoint directory", options.directory, errno);
  parent = std::make_shared<const base::UniqueFd>(std::move(opened));
  const base::MutexLock lock(&mutex_);
  parent_ = parent;
  return parent;
}

Checkpointer::Impl::~Impl() {
  if (core == nullptr) return;
  // The callbacks of the door's saves use this object. Each save ends by its own deadlines.
  (void)core->supervisor->WaitIdle(this, absl::InfiniteFuture());
  const base::MutexLock lock(&door_->mutex);
  door_->impl = nullptr;
  while (door_->inside != 0) door_->left.WaitUntil(&door_->mutex, base::Now() + absl::Hours(1));
}

absl::StatusOr<std::shared_ptr<SaveState>> Checkpointer::Impl::Plan(const SaveRequest& request,
                                                                    AttemptId* attempt,
                                                                    writer::Sources* sources) {
  HOLDFAST_RETURN_IF_ERROR(checkpointer::ValidateName(request.name));
  if (request.single_file)
    HOLDFAST_RETURN_IF_ERROR(checkpointer::ValidateSingleFile(request, options));
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
    HOLDFAST_ASSIGN_OR_RETURN(*sources, checkpointer::TakePlan(*request.plan, save.get()));
    if (IntoDirectory(request) && save->plan->has_replicas()) {
      return absl::InvalidArgumentError(
          absl::StrCat("save ", request.name,
                       ": a replicated file in a framework's directory, where no rank compares the "
                       "other ranks' bytes; plan the file as this rank's own"));
    }
  } else {
    HOLDFAST_ASSIGN_OR_RETURN(
        const std::shared_ptr<const format::SafetensorsStructure> structure,
        last_structure_.Of(format::ModelFileName(options.rank, options.world_size),
                           request.tensors));
    *sources = checkpointer::TakeStructure(structure, request.tensors, *attempt, save.get());
  }
  save->checkpoint = request.name;
  save->path = absl::StrCat(options.directory, "/", request.name);
  save->single_file = request.single_file;
  save->step = request.step;
  save->needs_confirmation = request.confirm;
  save->wake_supervisor = [raw = core->supervisor.get()] { raw->Wake(); };
  save->owner = this;
  for (const format::PackedFile& file : save->plan->files) {
    save->bytes_total += file.bytes;
    save->bytes_to_lease += AlignUp(file.bytes);
  }
  if (request.confirm && save->bytes_total == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "save ", request.name,
        ": it has no bytes, and `confirm` holds back the last of them; save it without `confirm`"));
  }
  for (const auto& [device, stream] : save->streams) (void)core->Register(device);
  return save;
}

absl::Status Checkpointer::Impl::Admit(const SaveState& save) const {
  if (options.when_full == WhenFull::kWait || !core->pool->WouldWait(save.bytes_to_lease))
    return absl::OkStatus();
  if (options.when_full == WhenFull::kSkip) {
    return absl::UnavailableError(absl::StrCat("save ", save.checkpoint,
                                               ": skipped, because the staging memory is held ",
                                               core->Holders()));
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      "save ", save.checkpoint, ": the staging memory of ", core->pool->arena().bytes(),
      " bytes is held ", core->Holders(), "; raise arena_bytes, or wait for them"));
}

absl::Status Checkpointer::Impl::OpenDirectories(const SaveRequest& request,
                                                 const AttemptId& attempt, SaveState* save) {
  HOLDFAST_ASSIGN_OR_RETURN(const directory::FileSystem file_system,
                            directory::IdentifyFileSystem(save->parent->get()));
  save->writes_end_with_process = file_system.writes_end_with_process;
  save->stable_inodes = file_system.stable_inodes;
  if (request.single_file) return checkpointer::BeginFile(request, attempt, save);
  if (request.files_only) {
    HOLDFAST_ASSIGN_OR_RETURN(directory::PartialDirectory opened,
                              directory::OpenFrameworkDirectory(save->parent->get(), request.name));
    save->in_use = std::move(opened.in_use);
    save->trainer_lock = std::move(opened.trainer);
    return absl::OkStatus();
  }
  HOLDFAST_RETURN_IF_ERROR(
      directory::CheckTarget(save->parent->get(), request.name,
                             {.replace = request.replace, .decides = options.rank == 0}));
  save->partial = format::PartialName(request.name, attempt);
  HOLDFAST_ASSIGN_OR_RETURN(directory::PartialDirectory partial,
                            directory::MakePartialDirectory(save->parent->get(), save->partial));
  save->in_use = std::move(partial.in_use);
  save->trainer_lock = std::move(partial.trainer);
  return absl::OkStatus();
}

absl::Status Checkpointer::Impl::Launch(const SaveRequest& request, const AttemptId& attempt,
                                        writer::Sources sources, SaveState* save) {
  writer::JobParameters job;
  job.flags = layout::kWriteManifest;
  if (request.replace) job.flags |= layout::kReplaceExisting;
  if (IntoDirectory(request)) job.flags |= layout::kFilesOnly;
  if (request.single_file) job.flags |= layout::kSingleFile;
  if (options.read_back) job.flags |= layout::kReadBack;
  if (options.trainer_death == TrainerDeath::kFinish) job.flags |= layout::kFinishWithoutTrainer;
  if (!options.direct_io) job.flags |= layout::kBuffered;
  if (save->stable_inodes) job.flags |= layout::kStableInodes;
  writer::CopyWorkerOptions(options, &job);
  job.streams = save->bytes_to_lease > core->pool->arena().bytes();
  job.attempt = attempt;
  job.step = request.step;
  job.target = request.single_file ? "." : request.name;
  job.partial = request.single_file ? checkpointer::TemporaryName(request, attempt) : save->partial;
  if (request.replace && !IntoDirectory(request) && options.rank == 0) {
    HOLDFAST_ASSIGN_OR_RETURN(job.older,
                              directory::OlderAttempts(save->parent->get(), request.name));
  }
  if (request.single_file) {
    HOLDFAST_ASSIGN_OR_RETURN(job.older,
                              directory::OlderSaves(save->parent->get(), request.name, attempt));
  }
  job.time_stalled_max_ns = Nanoseconds(options.time_stalled_max);
  job.time_ranks_max_ns = Nanoseconds(options.time_ranks_max);
  job.time_liveness_max_ns = Nanoseconds(options.time_liveness_max);

  writer::SaveContents contents = {
      .plan = save->plan,
      .sources = std::move(sources),
      .manifest = {.checkpoint = request.name,
                   .attempt = attempt,
                   .rank = options.rank,
                   .world_size = options.world_size,
                   .step = request.step,
                   .saved_at_ns = lineage_.SavedAtNs(base::WallNs(), request.saved_after_ns),
                   .replaces = Others(job.older, attempt),
                   .launcher = options.launcher,
                   .pages = core->pool->arena().pages(),
                   .read_back = options.read_back,
                   .recorded = !request.single_file},
      .commit = {}};
  // In a framework's directory the framework's own last file commits.
  if (options.rank == 0 && !IntoDirectory(request))
    contents.commit = lineage_.Record(request.parent, &contents.manifest);
  HOLDFAST_ASSIGN_OR_RETURN(const auto bytes, writer::ControlBytes(contents, job.older.size()));
  HOLDFAST_RETURN_IF_ERROR(core->pool->TakeControlBytes(bytes));
  absl::StatusOr<std::unique_ptr<writer::JobTable>> table =
      writer::JobTable::ForSave(job, contents);
  if (!table.ok()) {
    core->pool->ReturnControlBytes(bytes);
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
                   save->parent->get(), save));
  SaveReport* report = save->MutableReport();
  for (const auto& [device, stream] : save->streams) {
    // With the pages in place. Copies into unregistered memory are right, and slow.
    const absl::Status registered = core->Register(device);
    if (!registered.ok()) report->unregistered = std::string(registered.message());
  }
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

void Checkpointer::Impl::TakeBack(SaveState* save, const AttemptId& attempt, bool files_only) {
  if (save->epoch != 0) core->pool->Retire(save->epoch);
  if (save->table != nullptr) core->pool->ReturnControlBytes(save->table->bytes());
  save->in_use.Reset();
  save->trainer_lock.Reset();
  if (save->single_file) checkpointer::RemoveUncommittedFile(*save, attempt);
  if (!files_only) (void)RemoveEmptyPartial(*save);
}

bool Checkpointer::Impl::RemoveEmptyPartial(const SaveState& save) const {
  // A rank must not remove a directory that another rank has locked but not yet written to. Recover
  // removes the directory once all ranks have ended.
  return !save.partial.empty() && options.world_size == 1 &&
         sys::Sys().unlinkat(save.parent->get(), save.partial.c_str(), AT_REMOVEDIR) == 0;
}

absl::StatusOr<SaveHandle> Checkpointer::Impl::SaveAsync(const SaveRequest& request) {
  const uint64_t entered_ns = sys::NowNs();
  AttemptId attempt;
  Presence presence;
  auto parent = OpenParent();
  if (!parent.ok()) {
    return base::Annotate(parent.status(),
                          absl::StrCat("save ", options.directory, "/", request.name));
  }
  const auto refuse = [&](const absl::Status& why) {
    return checkpointer::RefuseSave((*parent)->get(), presence, Rank(request, attempt), why);
  };
  writer::Sources sources;
  absl::StatusOr<std::shared_ptr<SaveState>> planned = Plan(request, &attempt, &sources);
  if (!planned.ok()) return refuse(planned.status());
  std::shared_ptr<SaveState> save = *std::move(planned);
  save->entered_ns = entered_ns;
  save->parent = *parent;
  if (const absl::Status admitted = Admit(*save); !admitted.ok()) return refuse(admitted);
  if (const auto opened = OpenDirectories(request, attempt, save.get()); !opened.ok()) {
    (void)RemoveEmptyPartial(*save);  // made, but not opened or locked: no fd was left
    return refuse(base::Annotate(opened, absl::StrCat("save ", save->path)));
  }
  if (const RankInSave rank = Rank(request, attempt); rank.world_size > 1) {
    // After the locks: a directory that a recovery takes away has no board to join.
    auto joined = checkpointer::RankPresence::Join(
        save->parent->get(), rank, [this, directory = save->parent, partial = save->partial] {
          housekeeper->RemoveOnceUnused(directory, partial);
        });
    if (!joined.ok()) {
      const absl::Status why = base::Annotate(joined.status(), absl::StrCat("save ", save->path));
      return checkpointer::AllRanksKnow(why) ? why : refuse(why);
    }
    presence = *std::move(joined);
  }
  Attach(presence, save.get());
  const absl::Status launched = Launch(request, attempt, std::move(sources), save.get());
  if (!launched.ok()) {
    lineage_.Ended(attempt, /*committed=*/false);
    TakeBack(save.get(), attempt, IntoDirectory(request));
    return refuse(base::Annotate(launched, absl::StrCat("save ", save->path)));
  }
  save->AddUser();  // the calling thread, until the host memory is copied
  core->supervisor->Watch(save);
  const absl::Status staged = core->stager->Stage(save);
  if (!staged.ok()) save->MarkErrorReturned();
  save->MutableReport()->time_in_call =
      absl::ToDoubleSeconds(absl::Nanoseconds(sys::NowNs() - entered_ns));
  save->DropUser();
  if (!staged.ok()) return WhyStopped(staged, save.get());
  return SaveHandle(std::move(save));
}

RankInSave Checkpointer::Impl::Rank(const SaveRequest& request, const AttemptId& attempt) const {
  return {.directory = options.directory,
          .name = request.name,
          .attempt = attempt,
          .rank = options.rank,
          // In a framework's directory the framework commits.
          .world_size = IntoDirectory(request) ? 1 : options.world_size,
          .time_liveness_max = options.time_liveness_max};
}

void Checkpointer::Impl::Attach(const Presence& presence, SaveState* save) {
  save->on_finished = [door = door_, presence](const std::shared_ptr<SaveState>& ended,
                                               const absl::Status& outcome, bool left_files) {
    const Visit visit(door.get());
    if (visit.impl() != nullptr)
      return visit.impl()->OnFinished(ended, presence, outcome, left_files);
    if (presence != nullptr) presence->Leave();
    return outcome;
  };
  save->on_given_up = [door = door_](const std::shared_ptr<SaveState>& given_up) {
    const Visit visit(door.get());
    if (visit.impl() == nullptr) return;
    visit.impl()->lineage_.Ended(given_up->table->parameters().attempt, false);
    visit.impl()->unseen_errors_.Keep(given_up);
  };
  if (presence == nullptr) return;
  save->tell_ranks = [presence](const absl::Status& why) { presence->GiveUp(why); };
}

absl::Status Checkpointer::Impl::WhyStopped(const absl::Status& staged, SaveState* save) {
  // Staging stopped from outside lacks the cause: the worker has failed (a full disk, a kill). The
  // worker's end, which is near, gives the cause.
  if (!absl::IsAborted(staged)) return staged;
  const absl::Status ended = save->WaitDurable(kTimeToEnd).status();
  return ended.ok() || IsTimeOut(ended) ? staged : ended;
}

absl::Status Checkpointer::Impl::OnFinished(const std::shared_ptr<SaveState>& save,
                                            const Presence& presence, const absl::Status& outcome,
                                            bool left_files) {
  // What a damaged worker has committed is not called durable.
  const bool reported = save->result.has_value() || !save->worker_damage.ok();
  const AttemptId& attempt = save->table->parameters().attempt;
  const absl::Status status = presence == nullptr
                                  ? checkpointer::Unreported(*save, outcome, reported)
                                  : presence->Conclude(save->parent->get(), outcome, reported);
  lineage_.Ended(attempt, status.ok());
  if (status.ok()) {
    RemoveReplaced(*save, reported);
    housekeeper->ApplyRetention(save->parent, save->checkpoint, save->entered_ns);
    return status;
  }
  if (save->single_file) checkpointer::RemoveUncommittedFile(*save, attempt);
  // A worker that never began left an empty directory.
  const bool removed = RemoveEmptyPartial(*save);
  // A rank must not remove other ranks' files. Of several ranks, the last to fail does: see Join.
  if (!removed && left_files && !save->partial.empty() && options.world_size == 1 &&
      !checkpointer::IsBetweenTwoRenames(*save))
    housekeeper->Remove(save->parent, save->partial,
                        {std::move(save->in_use), std::move(save->trainer_lock)});
  unseen_errors_.Keep(save);
  return status;
}

void Checkpointer::Impl::RemoveReplaced(const SaveState& save, bool reported) {
  for (const std::string& name : checkpointer::ReplacedNames(save, reported)) {
    const format::DirectoryName parsed = format::ParseDirectoryName(name);
    if (parsed.kind != format::DirectoryKind::kFinal && parsed.checkpoint == save.checkpoint)
      housekeeper->Remove(save.parent, name);
  }
}

absl::Status Checkpointer::Impl::Flush(absl::Duration timeout) {
  const absl::Time deadline = base::Now() + timeout;
  HOLDFAST_RETURN_IF_ERROR(core->supervisor->WaitIdle(this, deadline));
  const absl::Status cleaned = housekeeper->WaitIdle(deadline);
  const absl::Status first = unseen_errors_.TakeFirst();
  return first.ok() ? cleaned : first;
}

Checkpointer::Checkpointer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Checkpointer::~Checkpointer() {
  // In a forked child the threads, the worker and the memory belong to the parent.
  if (impl_ != nullptr && !impl_->guard.InCreator()) (void)impl_.release();
}

absl::StatusOr<std::unique_ptr<Checkpointer>> Checkpointer::Create(
    const CheckpointerOptions& options) {
  HOLDFAST_RETURN_IF_ERROR(ValidateOptions(options));
  return Impl::Make(options, nullptr);
}

absl::StatusOr<std::unique_ptr<Checkpointer>> Checkpointer::CreateMemory(
    const CheckpointerOptions& options) {
  CheckpointerOptions mine = options;
  mine.directory = "/";  // as the check wants one
  HOLDFAST_RETURN_IF_ERROR(ValidateOptions(mine));
  mine.directory.clear();
  return Impl::Make(mine, nullptr);
}

absl::StatusOr<std::unique_ptr<Checkpointer>> Checkpointer::CreateBeside(
    const CheckpointerOptions& options) const {
  if (!impl_->guard.InCreator()) return OtherProcess();
  const CheckpointerOptions mine = checkpointer::WithShared(options, impl_->options);
  HOLDFAST_RETURN_IF_ERROR(ValidateOptions(mine));
  return Impl::Make(mine, impl_->core);
}

absl::StatusOr<SaveHandle> Checkpointer::SaveAsync(const SaveRequest& request) {
  return impl_->guard.InCreator() ? impl_->SaveAsync(request) : OtherProcess();
}

absl::Status Checkpointer::Flush(absl::Duration timeout) {
  return impl_->guard.InCreator() ? impl_->Flush(timeout) : OtherProcess();
}

absl::Status Checkpointer::Trim() {
  if (!impl_->guard.InCreator()) return OtherProcess();
  // A kept worker waiting for other ranks holds no lease but a registration, which the worker
  // cannot drop before the save's end.
  if (const uint64_t saves = impl_->core->supervisor->in_flight(); saves != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "trim staging memory: ", base::Counted(saves, "save"), " in flight; flush first"));
  }
  return impl_->core->pool->Trim();
}

absl::Status Checkpointer::RegisterDevice(Device* device) {
  if (!impl_->guard.InCreator()) return OtherProcess();
  return device == nullptr || device->is_host() ? absl::OkStatus() : impl_->core->Register(device);
}

StagingStats Checkpointer::staging() const {
  if (!impl_->guard.InCreator()) return {};
  StagingStats stats = impl_->core->pool->stats();
  stats.saves_in_flight = impl_->core->supervisor->in_flight();
  return stats;
}

const CheckpointerOptions& Checkpointer::options() const { return impl_->options; }

}  // namespace holdfast
