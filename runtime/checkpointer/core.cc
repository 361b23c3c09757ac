#include "runtime/checkpointer/core.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/base/clock.h"
#include "runtime/base/keep_forever.h"
#include "runtime/base/planted_bugs.h"
#include "runtime/base/status.h"
#include "runtime/base/thread.h"
#include "runtime/layout/launcher.h"
#include "runtime/writer/worker_program.h"

namespace holdfast {
namespace {

/// Releases `pool` and the rest of each save when its last transfer has landed, on a thread of its
/// own: an owner that is closed does not wait for a disk.
void ReleaseOnceLanded(std::shared_ptr<staging::StagingPool> pool,
                       std::unique_ptr<writer::Supervisor> supervisor) {
  struct Unlanded {
    std::shared_ptr<staging::StagingPool> pool;
    std::unique_ptr<writer::Supervisor> supervisor;  // uses the pool, so goes first
  };
  auto unlanded = std::make_shared<Unlanded>(
      Unlanded{.pool = std::move(pool), .supervisor = std::move(supervisor)});
  base::Thread thread;
  const absl::Status started = base::Planted(base::Bug::kKeepUnlanded)
                                   ? absl::ResourceExhaustedError("planted")
                                   : thread.Start([unlanded] { unlanded->supervisor.reset(); });
  thread.Detach();
  if (!started.ok()) base::KeepForever(std::move(unlanded));
}

}  // namespace

absl::Status Checkpointer::Core::Start(CheckpointerOptions* given) {
  CheckpointerOptions& options = *given;
  if (layout::TraitsOf(options.launcher).program) {
    HOLDFAST_ASSIGN_OR_RETURN(options.worker_program,
                              writer::FindWorkerProgram(options.worker_program));
  }
  if (options.staging.threads == 0) options.staging.threads = base::DefaultThreads();
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

Checkpointer::Core::~Core() {
  // The stager first: it feeds the sealer. No save is in flight, so both threads are idle.
  stager.reset();
  sealer.reset();
  workers.reset();
  std::shared_ptr<staging::StagingPool> memory = std::move(pool);
  // With copies under way a device would wait for the copies, for ever if its stream hangs.
  bool registered = supervisor != nullptr && supervisor->HasUsers();
  {
    const base::MutexLock lock(&mutex_);
    for (auto& [device, registrant] : devices_) {
      if (memory != nullptr) memory->RemoveRegistrant(registrant.get());
      registered = registered || !registrant->Close();
    }
  }
  // A device may still write these pages. They stay mapped until the process ends.
  if (registered) base::KeepForever(memory);
  // A killed worker's transfers may still read the pages.
  if (supervisor != nullptr && supervisor->HasSaves())
    ReleaseOnceLanded(std::move(memory), std::move(supervisor));
  supervisor.reset();  // uses the memory
}

absl::Status Checkpointer::Core::Register(Device* device) {
  const base::MutexLock lock(&mutex_);
  std::unique_ptr<checkpointer::DeviceRegistrant>& registrant = devices_[device];
  if (registrant == nullptr) {
    registrant = std::make_unique<checkpointer::DeviceRegistrant>(device, &pool->arena());
    HOLDFAST_RETURN_IF_ERROR(pool->Register(registrant.get()));
  }
  return registrant->refusal();
}

std::string Checkpointer::Core::Holders() const {
  const StagingStats stats = pool->stats();
  if (stats.bytes_quarantined == 0) return "by saves in flight";
  std::string text =
      absl::StrCat(stats.bytes_held - stats.bytes_quarantined, " bytes by saves in flight, ",
                   stats.bytes_quarantined, " bytes quarantined");
  for (const EpochHolding& epoch : stats.epochs) {
    if (!epoch.quarantined.empty()) absl::StrAppend(&text, " (", epoch.quarantined, ")");
  }
  return text;
}

absl::Status Checkpointer::Core::Launch(const std::string& title, int directory, SaveState* save) {
  const base::MutexLock lock(&launch_mutex_);
  save->epoch = pool->OpenEpoch();
  HOLDFAST_RETURN_IF_ERROR(pool->Prepare());
  const absl::Time begin = base::Now();
  HOLDFAST_ASSIGN_OR_RETURN(save->link,
                            workers->Start(title, *save->table, directory, save->in_use.get()));
  save->MutableReport()->time_launching = absl::ToDoubleSeconds(base::Now() - begin);
  return absl::OkStatus();
}

}  // namespace holdfast
