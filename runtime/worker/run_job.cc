// Handles one kRun message: maps and checks the table, runs the job, publishes the result.
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <new>

#include "io_uring/text.h"
#include "runtime/layout/job.h"
#include "runtime/layout/launcher.h"
#include "runtime/sys/assert.h"
#include "runtime/sys/process.h"
#include "runtime/sys/system.h"
#include "runtime/worker/accounting.h"
#include "runtime/worker/jobs.h"
#include "runtime/worker/planted_bugs.h"
#include "runtime/worker/server.h"

namespace holdfast::worker {

#ifdef HOLDFAST_PLANTED_BUGS
namespace testing {
bool g_lock_ends_with_process = false;
}  // namespace testing
#endif

namespace {

// Descriptors that the queue holds while a transfer may be in flight.
constexpr uint32_t kHeldSocket = 0;
constexpr uint32_t kHeldLock = 1;

void CopyReason(layout::CompletionSlot* slot, const char* text) {
  io::Text(slot->reason, sizeof(slot->reason)).Add(text);
}

/// Writes the reason for the engine's rung, and the refused setting of the worker.
void ExplainRung(const Server& server, layout::CompletionSlot* slot) {
  io::Text text(slot->reason, sizeof(slot->reason));
  text.Add(server.queue.reason());
  if (server.priorities.refused == nullptr) return;
  text.Add("; refused: ").Add(server.priorities.refused).Add(": ");
  text.AddError(server.priorities.refused_error);
}

/// The job's result; the staged bytes were released before.
void Publish(layout::Job* job, const Attachment& attached) {
  // A result is written once.
  HOLDFAST_ASSERT(job->completion.state.load(std::memory_order_relaxed) ==
                  static_cast<uint32_t>(layout::CompletionState::kEmpty));
  job->phase.store(static_cast<uint32_t>(layout::Phase::kDone), std::memory_order_relaxed);
  // release: a reader of kDone with acquire sees all of the slot and of the file table.
  job->completion.state.store(static_cast<uint32_t>(layout::CompletionState::kDone),
                              std::memory_order_release);
  RingTrainer(attached);
}

/// Maps a read-only arena anew for a job that insists on registration, because registration pins
/// for writing. The new mapping stands beside the old: a failing MAP_FIXED may leave no mapping.
bool MakeWritable(Attachment* attached) {
  if (attached->writable || attached->arena == nullptr) return true;
  void* const memory = sys::Sys().mmap(nullptr, attached->arena_bytes, PROT_READ | PROT_WRITE,
                                       MAP_SHARED, attached->arena_fd, 0);
  if (memory == MAP_FAILED) return false;
  sys::Sys().munmap(attached->arena, attached->arena_bytes);
  attached->arena = static_cast<char*>(memory);
  attached->writable = true;
  KeepToThisProcess(*attached);
  return true;
}

void CloseQueue(Server* server) {
  HOLDFAST_ASSERT(!server->queue_open || server->queue.in_flight() == 0);
  if (server->queue_open) server->queue.Close();
  server->queue_open = false;
}

/// Opens the ring that this job requests, or keeps the last job's ring.
int OpenQueue(Server* server, const layout::Job& job) {
  HOLDFAST_ASSERT(!server->stuck);
  Attachment& attached = server->attached;
  if (job.engine == EngineRung::kUringFixed && !MakeWritable(&attached)) return errno;
  io::QueueOptions options;
  options.rung = job.engine;
  options.depth = job.queue_depth;
  // A forked child may not start threads: the pwrite rung then works in its caller.
  options.threads = layout::TraitsOf(job.launcher).forked() ? 0 : job.pwrite_threads;
  options.region = attached.arena;
  options.region_bytes = attached.arena_bytes;
  options.may_register = attached.writable;
  options.holds_fds = true;
  options.io_priority = server->priorities.io_priority;
  const io::QueueOptions& open = server->queue_options;
  if (server->queue_open) {
    const bool same = open.rung == options.rung && open.depth == options.depth &&
                      open.threads == options.threads && open.region == options.region &&
                      open.region_bytes == options.region_bytes &&
                      open.io_priority == options.io_priority;
    // The ring may have broken behind the last transfer of a successful save.
    if (same && !server->queue.broken()) return 0;
    CloseQueue(server);
  }
  int error = server->queue.Open(options);
  server->queue_open = error == 0;
  server->queue_options = options;
  // The trainer's end hangs up when this process and its rings are gone: see wire.h.
  if (error == 0) error = server->queue.Hold(kHeldSocket, server->options.socket);
  if (error != 0) CloseQueue(server);
  return error;
}

void SettleForJob(Server* server, const layout::Job& job) {
  ApplyPriorities(job.qos, &server->priorities);
  if (!layout::TraitsOf(server->options.launcher).process) return;
  sys::SetUmask(job.umask);
  char name[16] = "hf:";  // the kernel's limit for a thread's name
  char digits[20];
  size_t count = 0;
  uint64_t step = job.step;
  do {
    digits[count++] = static_cast<char>('0' + step % 10);
    step /= 10;
  } while (step != 0);
  HOLDFAST_ASSERT(count > 0 && count <= sizeof(digits));
  for (size_t at = 3; count > 0 && at + 1 < sizeof(name); ++at) name[at] = digits[--count];
  sys::SetThreadName(name);
}

void RunKind(Server* server, JobRun* run) {
  if (run->job->kind == layout::JobKind::kDelete) {
    RunDelete(run);
    return;
  }
  int error = OpenQueue(server, *run->job);
  // Until the last transfer has landed no recovery takes the directory for an abandoned one.
#ifdef HOLDFAST_PLANTED_BUGS
  const bool holds = !testing::g_lock_ends_with_process;
#else
  constexpr bool holds = true;
#endif
  if (error == 0 && holds) error = server->queue.Hold(kHeldLock, run->lock);
  if (error != 0) {
    FailErrno(run, Operation::kSetUp, error);
  } else {
    run->figures.engine = server->queue.rung();
    HOLDFAST_ASSERT(run->figures.engine != EngineRung::kAuto && server->queue.in_flight() == 0);
    run->job->engine_used.store(static_cast<uint32_t>(run->figures.engine),
                                std::memory_order_relaxed);
    if (run->job->extent_count != 0 && run->attached->arena == nullptr) {
      Fail(run, FailureCode::kFailedPrecondition, Operation::kAttach);
    }
  }
  RunSave(run);
}

void FillCompletion(const Server& server, const JobRun& run, uint64_t cpu_before) {
  layout::CompletionSlot& slot = run.job->completion;
  const bool save = run.job->kind == layout::JobKind::kSave;
  slot.failure = run.failure;
  slot.figures = run.figures;
  if (save) {
    slot.left_files = run.io_stuck ? 1 : 0;
    // After a time-out the reason lists the transfers in flight instead.
    if (slot.reason[0] == '\0') ExplainRung(server, &slot);
  }
  slot.times = run.times;
  slot.times.cpu = CpuNs(server.options.launcher) - cpu_before;
}

/// Runs a table that passed the checks. Returns 0 or an exit status.
int RunSound(Server* server, layout::Job* job, int parent, int lock) {
  const Launcher launcher = server->options.launcher;
  const layout::LauncherTraits traits = layout::TraitsOf(launcher);
  // A process of one save counts its start too.
  const uint64_t cpu_before = traits.kept ? CpuNs(launcher) : 0;
  JobRun* const run = new (&server->run) JobRun();
  run->times.started = sys::NowNs();
  run->server = server;
  run->job = job;
  run->attached = &server->attached;
  run->queue = &server->queue;
  run->read_queue = &server->read_queue;
  run->directory_buffer = server->directory_buffer;
  run->launcher = launcher;
  run->parent = parent;
  run->lock = lock;
  job->worker_pid.store(static_cast<uint32_t>(sys::Sys().getpid()), std::memory_order_relaxed);
  SettleForJob(server, *job);
  RunKind(server, run);
  FillCompletion(*server, *run, cpu_before);
  // A broken ring would fail every later job of a kept worker.
  const Operation failed = run->failure.operation;
  if (!run->io_stuck && (failed == Operation::kSetUp || failed == Operation::kWrite))
    CloseQueue(server);
  if (run->io_stuck) {
    server->stuck = true;
    // A kept worker must not take another job. The trainer waits for the last transfer either way.
    if (traits.process && traits.kept) return layout::kExitStuck;
  } else {
    ReleaseStaging(run);
    // A lock that outlives its save would look like a running save.
    if (server->queue_open) server->queue.Hold(kHeldLock, -1);
    HOLDFAST_ASSERT(job->staging_released.load(std::memory_order_relaxed) != 0);
  }
  Publish(job, server->attached);
  return 0;
}

}  // namespace

int RunJob(Server* server, Received* received) {
  if (received->fd_count != layout::kRunFds || server->attached.trainer < 0) {
    return layout::kExitAttach;
  }
  const int control = received->fds[0];
  const int parent = received->fds[1];
  const uint64_t bytes = received->message.bytes;
  struct stat status = {};
  if (sys::Sys().fstat(control, &status) != 0 || static_cast<uint64_t>(status.st_size) < bytes ||
      bytes < sizeof(layout::Job)) {
    return layout::kExitAttach;
  }
  void* const memory =
      sys::Sys().mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, control, 0);
  if (memory == MAP_FAILED) return layout::kExitAttach;
  sys::Sys().madvise(memory, bytes, MADV_DONTFORK);  // as for the arena: see attach.cc
  layout::Job* const job = static_cast<layout::Job*>(memory);
  sys::LastWords& words = server->last_words;
  int exit_status = 0;
  if (job->magic != layout::kJobMagic || job->layout_version != layout::kLayoutVersion) {
    exit_status = layout::kExitMismatch;
  } else if (const char* const wrong = layout::ValidateJob(job, bytes)) {
    job->completion.failure.code = FailureCode::kInvalidArgument;
    job->completion.failure.operation = Operation::kAttach;
    CopyReason(&job->completion, wrong);
    job->staging_released.store(1, std::memory_order_release);
    Publish(job, server->attached);
  } else {
    HOLDFAST_ASSERT(words.text == nullptr);
    words.bytes = sizeof(job->completion.reason);
    words.said = &job->assertion_failed;
    words.text = job->completion.reason;
    exit_status = RunSound(server, job, parent, received->fds[2]);
    words.text = nullptr;
  }
  sys::Sys().munmap(memory, bytes);
  return exit_status;
}

}  // namespace holdfast::worker
