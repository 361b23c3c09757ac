#include "tools/trainer/life.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <new>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "holdfast/checkpointer.h"
#include "holdfast/load.h"
#include "holdfast/ranks.h"
#include "holdfast/recovery.h"
#include "tools/trainer/dead_files.h"
#include "tools/trainer/late_device.h"
#include "tools/trainer/state.h"

namespace holdfast::trainer {
namespace {

namespace fs = std::filesystem;

constexpr char kReleased = '\xee';

class Life {
 public:
  Life(const Task& task, Teller* teller)
      : task_(task),
        teller_(teller),
        dead_files_(task, teller),
        events_(teller, task.hung_seconds, [this](uint64_t number) { Hold(number); }) {
    if (task.device.has_value()) device_ = std::make_unique<LateDevice>(*task.device);
  }

  void Run() {
    auto pool = ReadPool(task_.pool);
    if (!pool.ok()) return Crashed(pool.status());
    pool_ = *std::move(pool);
    if (!task_.dead.empty()) return LookAtDeadFiles();
    MakeDirectory();
    if (!Open(0)) return;
    for (const Action& action : task_.actions) {
      if (action.what == "save") Save(action);
      if (action.what == "wait") Wait();
      if (action.what == "load") Load(action);
      if (action.what == "move") Move(action);
      if (action.what == "recover") RecoverBeside();
    }
    Wait();
    events_.Join();
    Settle();
    checkpointer_.reset();
    dead_files_.Look(pool_);
    teller_->Tell("end");
  }

 private:
  absl::Duration Longest() const { return absl::Seconds(task_.outcome_seconds_max); }

  void Crashed(const absl::Status& error) { teller_->TellFailure("crashed", 0, error); }

  /// The directory, which a save expects, durably: also where another rank has just made it.
  void MakeDirectory() const {
    const fs::path directory(task_.options.directory);
    mkdir(directory.c_str(), 0777);
    const int parent = open(directory.parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    fsync(parent);
    close(parent);
  }

  void LookAtDeadFiles() {
    for (const DeadFile& file : task_.dead) {
      if (const auto looked = dead_files_.LookAt(file, pool_); !looked.ok()) Crashed(looked);
    }
  }

  void Hold(uint64_t number) {
    dead_files_.Hold(number);
    if (task_.spoil) dead_files_.Spoil();
  }

  bool Open(uint64_t rate) {
    checkpointer_.reset();
    CheckpointerOptions options = task_.options;
    options.qos.bytes_per_second_max = rate;
    options.on_sealed = [this](const SealedExtent& extent) { events_.Sealed(extent); };
    options.staging.on_released = [sealed = events_.sealed()](void* memory, uint64_t bytes) {
      sealed->Release(memory, bytes);
      std::memset(memory, kReleased, bytes);
    };
    auto made = Checkpointer::Create(options);
    if (!made.ok()) {
      Crashed(made.status());
      return false;
    }
    checkpointer_ = *std::move(made);
    rate_ = rate;
    return true;
  }

  void Save(const Action& action) {
    if (checkpointer_ == nullptr) return;
    const bool changes = action.event && absl::StartsWith(action.event->kind, "change-");
    const bool loses = action.event && action.event->kind == "lose-copy" && device_ != nullptr;
    // A change hits the extent that is sealed next, and a loss the copy that is started next. Those
    // of an earlier save come before.
    if (changes || loses || action.rate != rate_) Wait();
    if (action.rate != rate_ && !Open(action.rate)) return;
    State state(task_.states.at(action.number), pool_, action.number, task_.options.rank,
                device_.get());
    SavePlan plan;
    SaveRequest request{.name = action.name, .step = action.step, .replace = task_.replace};
    request.attempt = action.attempt;
    request.parent = parent_;
    if (action.files > 1) {
      auto planned =
          state.Plan(action.files, task_.options.rank, task_.options.world_size, request.attempt);
      if (!planned.ok()) return Crashed(planned.status());
      plan = *std::move(planned);
      request.plan = &plan;
    } else {
      request.tensors = state.tensors();
    }
    absl::StatusOr<SaveHandle> save =  // before the call, which may have no memory for it
        absl::ResourceExhaustedError(absl::StrCat("save ", action.name, ": no memory"));
    teller_->Tell("call", {{"n", action.number}});
    if (action.event.has_value()) events_.BeginCall(action.number, *action.event);
    if (loses)
      device_->LoseNext([this, action] { events_.Fired(action.number, *action.event, "call"); });
    bool has_thrown = false;
    try {
      save = checkpointer_->SaveAsync(request);
    } catch (const std::bad_alloc&) {  // of the limit
      has_thrown = true;
    }
    if (save.ok()) events_.Watch(action.number, action.event, *save);
    events_.EndCall();
    // A call without a descriptor cannot withdraw its rank either.
    if (!save.ok() && (has_thrown || (action.event && action.event->kind == "limit-files")))
      AbandonSaveOf(action, save.status());
    if (save.ok() && device_ != nullptr) AwaitCopies(action, *save);
    if (action.mutate) state.Mutate();
    // The memory of tensors is freed behind every copy, also of a save that has failed.
    if (device_ != nullptr) (void)device_->MakeStreamWait(nullptr);
    const bool skipped =
        absl::IsUnavailable(save.status()) && task_.options.when_full == WhenFull::kSkip;
    if (!save.ok()) EndEvents();
    if (!save.ok() && !skipped)
      return teller_->TellFailure("refused", action.number, save.status());
    teller_->Tell("called", {{"n", action.number}, {"skipped", skipped}});
    if (skipped) return;
    parent_ = {};
    outcomes_.emplace_back(
        [this, number = action.number, save = *save] { WithMemory([&] { Await(number, save); }); });
    // What is restored lies in memory that the next save may take.
    if (changes || loses || (action.event && action.event->kind == "limit-size")) {
      Wait();
      EndEvents();
    }
  }

  void EndEvents() {
    if (device_ != nullptr) device_->LoseNext(nullptr);
    events_.EndSave();
  }

  /// Waits as a training does before it changes its tensors: by itself, or on a stream.
  void AwaitCopies(const Action& action, const SaveHandle& save) {
    if (action.number % 2 == 0) {
      (void)save.WaitStaged(Longest());
    } else {
      (void)save.WaitStagedOn(device_.get(), nullptr);
    }
  }

  /// The other ranks would wait for a rank that no SaveAsync has withdrawn.
  void AbandonSaveOf(const Action& action, const absl::Status& why) {
    const CheckpointerOptions& options = task_.options;
    if (options.world_size == 1) return;
    (void)AbandonSave({.directory = options.directory,
                       .name = action.name,
                       .attempt = action.attempt,
                       .rank = options.rank,
                       .world_size = options.world_size,
                       .time_liveness_max = options.time_liveness_max},
                      why);
  }

  void Await(uint64_t number, const SaveHandle& save) {
    const auto report = save.WaitDurable(Longest());
    if (report.ok()) {
      teller_->Tell("durable",
                    {{"n", number}, {"path", report->path}, {"engine", WordOf(report->engine)}});
    } else if (!save.IsDone()) {
      teller_->Tell(
          "hang",
          {{"what", absl::StrCat("a save has not ended after ", task_.outcome_seconds_max, " s")}});
    } else {
      teller_->TellFailure("failed", number, report.status());
    }
  }

  void Wait() {
    for (std::thread& outcome : outcomes_) outcome.join();
    outcomes_.clear();
    if (checkpointer_ != nullptr) (void)checkpointer_->Flush(Longest());
  }

  /// A rollback: an older checkpoint is loaded, and the run goes on from it.
  void Load(const Action& action) {
    const auto complete = ListCheckpoints(task_.options.directory);
    if (!complete.ok()) {
      if (!absl::IsNotFound(complete.status()))
        teller_->TellFailure("unreadable", 0, complete.status());
      return;
    }
    if (complete->empty()) return;
    const CheckpointInfo& chosen =
        (*complete)[complete->size() - 1 - std::min<size_t>(action.back, complete->size() - 1)];
    const absl::Status status = Compare(chosen);
    if (!status.ok() && IsThere(chosen))
      teller_->TellFailure("unreadable", 0, status, {{"path", chosen.path}});
  }

  /// The other trainer may have removed or replaced it.
  bool IsThere(const CheckpointInfo& chosen) const {
    const auto complete = ListCheckpoints(task_.options.directory);
    return !complete.ok() || std::any_of(complete->begin(), complete->end(), [&](const auto& each) {
      return each.name == chosen.name && each.attempt == chosen.attempt;
    });
  }

  absl::Status Compare(const CheckpointInfo& chosen) {
    auto reader = CheckpointReader::Open(chosen.path, task_.options.rank);
    if (!reader.ok()) return reader.status();
    uint64_t id[2] = {};
    const TensorTarget target{.name = State::kId, .data = id, .bytes = sizeof(id)};
    if (const auto read = (*reader)->Load({target}, LoadOptions()); !read.ok())
      return read.status();
    std::string different = "no save has its number";
    if (const auto found = task_.states.find(id[0]); found != task_.states.end()) {
      auto compared = State(found->second, pool_, id[0], task_.options.rank).Compare(**reader);
      if (!compared.ok()) return compared.status();
      different = *std::move(compared);
    }
    parent_ = chosen.attempt;
    teller_->Tell("loaded", {{"n", id[0]}, {"path", chosen.path}, {"different", different}});
    return absl::OkStatus();
  }

  void Move(const Action& action) {
    if (!action.beside) Wait();
    std::error_code error;
    if (!fs::is_directory(task_.options.directory, error)) return;
    std::string to;
    do {
      to = absl::StrCat(task_.options.directory, ".moved-", moves_++);
    } while (fs::exists(to));
    teller_->Tell("moving", {{"to", to}});  // before: this process may be killed behind the rename
    fs::rename(task_.options.directory, to, error);
    MakeDirectory();
  }

  void RecoverBeside() {
    RecoveryOptions options;
    options.wait_for_orphans = absl::Milliseconds(200);
    if (const auto report = Recover(task_.options.directory, options); !report.ok())
      teller_->TellFailure("unreadable", 0, report.status());
  }

  /// Tells what staging memory is held once every save has ended.
  void Settle() {
    if (checkpointer_ == nullptr) return;
    const absl::Time end = absl::Now() + absl::Seconds(task_.settle_seconds_max);
    StagingStats now = checkpointer_->staging();
    while ((now.bytes_held > 0 || now.saves_in_flight > 0) && absl::Now() < end) {
      absl::SleepFor(absl::Milliseconds(2));
      now = checkpointer_->staging();
    }
    if (now.bytes_held == 0 && now.saves_in_flight == 0) return;
    teller_->Tell("leak", {{"more",
                            {{"bytes of staging memory", now.bytes_held},
                             {"saves in flight", now.saves_in_flight}}}});
  }

  const Task& task_;
  Teller* const teller_;
  DeadFiles dead_files_;
  Events events_;
  std::vector<uint64_t> pool_;
  std::unique_ptr<LateDevice> device_;  // outlives the Checkpointer
  std::unique_ptr<Checkpointer> checkpointer_;
  uint64_t rate_ = 0;
  AttemptId parent_;
  std::vector<std::thread> outcomes_;
  uint32_t moves_ = 0;
};

}  // namespace

void Live(const Task& task, Teller* teller) {
  teller->SetWho(task.options.rank, task.job);
  Life(task, teller).Run();
}

}  // namespace holdfast::trainer
