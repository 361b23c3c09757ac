#include "runtime/worker/job_run.h"

#include <poll.h>
#include <sys/stat.h>

#include <cerrno>

#include "runtime/sys/assert.h"
#include "runtime/sys/errno_code.h"
#include "runtime/sys/system.h"
#include "runtime/worker/ranks.h"
#include "runtime/worker/server.h"

namespace holdfast::worker {
namespace {

/// Returns false when the directory has been removed.
bool IsInPlace(int directory) {
  struct stat found = {};
  return directory >= 0 && sys::Sys().fstat(directory, &found) == 0 && found.st_nlink > 0;
}

}  // namespace

bool Fail(JobRun* run, const Failure& failure) {
  HOLDFAST_ASSERT(!failure.ok());
  if (run->failure.ok()) run->failure = failure;
  return false;
}

bool Fail(JobRun* run, FailureCode code, Operation operation, uint32_t file) {
  HOLDFAST_ASSERT(file == Failure::kNoIndex || file < run->job->file_count);
  Failure failure;
  failure.code = code;
  failure.operation = operation;
  failure.file = file;
  return Fail(run, failure);
}

bool FailErrno(JobRun* run, Operation operation, int error_number, uint32_t file, uint64_t offset,
               uint64_t bytes) {
  HOLDFAST_ASSERT(file == Failure::kNoIndex || file < run->job->file_count);
  const bool gone = error_number == ENOENT || error_number == ESTALE;
  if (gone && run->Has(layout::kSingleFile) && IsInPlace(run->directory)) {
    // A companion is gone, or another file has the name: a later save has committed, or a recovery
    // took this save for a dead one.
    return Fail(run, FailureCode::kAborted, Operation::kRename, file);
  }
  Failure failure;
  failure.code = sys::CodeOfErrno(error_number);
  if (failure.code == FailureCode::kOk) failure.code = FailureCode::kInternal;
  failure.operation = operation;
  failure.error_number = error_number;
  failure.file = file;
  failure.offset = offset;
  failure.bytes = bytes;
  return Fail(run, failure);
}

void SetPhase(JobRun* run, layout::Phase phase) {
  HOLDFAST_ASSERT(phase != layout::Phase::kQueued && phase != layout::Phase::kDone);
  run->job->phase.store(static_cast<uint32_t>(phase), std::memory_order_relaxed);
}

void CountStep(layout::Job* job) { job->steps.fetch_add(1, std::memory_order_relaxed); }

void RingTrainer(const Attachment& attached) {
  if (attached.trainer_doorbell < 0) return;
  const uint64_t one = 1;
  // The only error is a full counter, and the trainer is awake in that case.
  (void)!sys::Sys().write(attached.trainer_doorbell, &one, sizeof(one));
}

void HearDoorbell(const Attachment& attached) {
  uint64_t rings = 0;
  (void)!sys::Sys().read(attached.doorbell, &rings, sizeof(rings));
}

void NoteTrainerDeath(JobRun* run) {
  if (run->trainer_died) return;
  run->trainer_died = true;
  // An orphan that waits for other ranks must not hold memory that the next trainer needs.
  if (run->staging_released) DropArenaOfTheDead(run->server);
  if (run->all_sealed) return;
  // The trainer's last stores are in the shared memory: extents published before its death count.
  const layout::SharedU32* const log = layout::At<layout::SharedU32>(run->job, run->job->published);
  HOLDFAST_ASSERT(run->write.published.taken() <= run->job->extent_count);
  for (uint32_t i = run->write.published.taken(); i < run->job->extent_count; ++i) {
    if (log[i].load(std::memory_order_acquire) == layout::kEmptyEntry) return;
  }
  run->all_sealed = true;
}

bool TrainerIsDead(JobRun* run) {
  if (!run->trainer_died) {
    pollfd trainer = {.fd = run->attached->trainer, .events = POLLIN, .revents = 0};
    if (sys::Sys().poll(&trainer, 1, 0) > 0) NoteTrainerDeath(run);
  }
  return run->trainer_died;
}

bool MustStop(JobRun* run, bool look) {
  const layout::Job& job = *run->job;
  if (job.cancel.load(std::memory_order_relaxed) != 0) {
    Fail(run, FailureCode::kCancelled, Operation::kCancel);
    return true;
  }
  // acquire: the trainer's reason, in staging_error, was written before.
  if (job.trainer_failed.load(std::memory_order_acquire) != 0) {
    Fail(run, FailureCode::kAborted, Operation::kWaitTrainer);
    return true;
  }
  if (look) (void)TrainerIsDead(run);
  if (run->trainer_died && !(run->all_sealed && run->Has(layout::kFinishWithoutTrainer))) {
    Fail(run, FailureCode::kAborted, Operation::kWaitTrainer);
    return true;
  }
  return RanksHaveFailed(run);
}

void SleepUntilRung(JobRun* run, int timeout_ms) {
  HOLDFAST_ASSERT(timeout_ms >= 0);
  pollfd fds[2] = {{.fd = run->attached->doorbell, .events = POLLIN, .revents = 0},
                   {.fd = run->attached->trainer, .events = POLLIN, .revents = 0}};
  // A dead trainer's fd stays readable: watching it further would make this a busy loop.
  const nfds_t count = run->trainer_died ? 1 : 2;
  if (sys::Sys().poll(fds, count, timeout_ms) <= 0) return;
  if ((fds[0].revents & POLLIN) != 0) HearDoorbell(*run->attached);
  if (count == 2 && fds[1].revents != 0) NoteTrainerDeath(run);
}

void TemporaryName(const char* name, char (&out)[kNameBytes]) {
  constexpr char kSuffix[] = ".tmp";
  uint32_t length = 0;
  while (name[length] != '\0' && length + sizeof(kSuffix) < kNameBytes) {
    out[length] = name[length];
    ++length;
  }
  HOLDFAST_ASSERT(length > 0 && length + sizeof(kSuffix) <= kNameBytes);
  for (uint32_t i = 0; i < sizeof(kSuffix); ++i) out[length + i] = kSuffix[i];
}

void TemporaryOf(const JobRun& run, uint32_t file, char (&out)[kNameBytes]) {
  HOLDFAST_ASSERT(file < run.job->file_count);
  if (!run.Has(layout::kSingleFile)) return TemporaryName(layout::Files(run.job)[file].name, out);
  for (uint32_t i = 0; i < kNameBytes; ++i) out[i] = run.job->partial[i];
}

}  // namespace holdfast::worker
