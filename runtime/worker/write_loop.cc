#include "runtime/worker/write_loop.h"

#include <bit>
#include <cerrno>

#include "runtime/layout/launcher.h"
#include "runtime/sys/assert.h"
#include "runtime/sys/system.h"
#include "runtime/worker/open_files.h"
#include "runtime/worker/planted_bugs.h"
#include "runtime/worker/proof.h"

namespace holdfast::worker {

#ifdef HOLDFAST_PLANTED_BUGS
namespace testing {
bool g_acknowledge_at_submit = false;
bool g_forget_transfer = false;
bool g_never_redigest = false;
bool g_ignore_byte_rate = false;
}  // namespace testing
#endif

namespace {

// Bounds the delay of flags in shared memory when a doorbell is lost.
constexpr int kWaitMsMax = 500;
// The minimum interval of doorbells for progress alone.
constexpr uint64_t kProgressRingNs = 50 * sys::kNsPerMs;
// Waits have a resolution of 1 ms, so the rate limiter lets a write start 1 ms early.
constexpr uint64_t kRateSlackNs = sys::kNsPerMs;

void Acknowledge(JobRun* run, uint32_t extent) {
  HOLDFAST_ASSERT(extent < run->job->extent_count);
  // A second attempt gives nothing back, and an entry of the log is written once.
  if (run->figures.write_attempts == 1) run->write.acknowledged.Append(extent);
  const uint64_t now = sys::NowNs();
  // A streaming save needs every doorbell; in other saves a doorbell only shows progress.
  if (layout::Streams(*run->job) || now - run->write.rang_ns >= kProgressRingNs) {
    run->write.rang_ns = now;
    RingTrainer(*run->attached);
  }
}

/// Takes the next published extent, if the log holds a valid one.
bool TakeNext(JobRun* run) {
  WriteState& write = run->write;
  if (write.has_next) return true;
  uint32_t index = 0;
  if (!write.published.Next(&index)) return false;
  const layout::Job& job = *run->job;
  HOLDFAST_ASSERT(write.published.taken() <= job.extent_count);
  if (index >= job.extent_count) {
    return Fail(run, FailureCode::kInternal, Operation::kWaitTrainer);
  }
  const layout::Extent& extent = layout::Extents(run->job)[index];
  HOLDFAST_ASSERT(extent.file < job.file_count && extent.bytes <= kChunkBytes);
  const uint64_t bit = uint64_t{1} << (index % 64);
  const uint64_t io_bytes = AlignUp(extent.bytes);
  // The only fields of an extent that are written after the table's check.
  if ((write.taken_bits[index / 64] & bit) != 0 || extent.arena_offset % kIoAlignment != 0 ||
      extent.arena_offset > run->attached->arena_bytes ||
      io_bytes > run->attached->arena_bytes - extent.arena_offset) {
    return Fail(run, FailureCode::kInternal, Operation::kWaitTrainer, extent.file);
  }
  write.taken_bits[index / 64] |= bit;
  write.next_extent = index;
  write.has_next = true;
  write.progress_ns = sys::NowNs();
  if (write.published.taken() == job.extent_count) run->all_sealed = true;
  return true;
}

/// The byte-rate limit: how long until the next write may start, in ns.
uint64_t MustWaitNs(const JobRun& run, uint64_t now) {
  if (run.job->qos.bytes_per_second_max == 0) return 0;
#ifdef HOLDFAST_PLANTED_BUGS
  if (testing::g_ignore_byte_rate) return 0;
#endif
  const uint64_t allowed = run.write.allowed_ns;
  return allowed > now + kRateSlackNs ? allowed - now : 0;
}

void ChargeRate(JobRun* run, uint64_t bytes) {
  const uint64_t rate = run->job->qos.bytes_per_second_max;
  if (rate == 0) return;
  WriteState& write = run->write;
  const uint64_t now = sys::NowNs();
  if (write.allowed_ns < now) write.allowed_ns = now;
  // At most kChunkBytes * 1e9: no overflow.
  write.allowed_ns += bytes * sys::kNsPerSecond / rate;
}

/// Counts an extent whose bytes are final, and queues the bytes for the digest.
void QueueForDigest(JobRun* run, uint32_t index) {
  WriteState& write = run->write;
  const layout::Extent& extent = layout::Extents(run->job)[index];
  HOLDFAST_ASSERT(extent.file < run->job->file_count);
  HOLDFAST_ASSERT(run->notes[extent.file].extents_left > 0);
  --run->notes[extent.file].extents_left;
  run->job->bytes_completed.fetch_add(extent.bytes, std::memory_order_relaxed);
  HOLDFAST_ASSERT(write.undigested_count < kUndigestedMax);
  write.undigested[(write.undigested_first + write.undigested_count) % kUndigestedMax] = index;
  ++write.undigested_count;
}

/// Submits the write of an extent to an open file. Returns 0 or an errno of the queue.
int SubmitWrite(JobRun* run, uint32_t tag, uint32_t index, uint16_t slot) {
  const layout::Extent& extent = layout::Extents(run->job)[index];
  OpenFile& open = run->open[slot];
  HOLDFAST_ASSERT(tag < io::kDepthMax && open.fd >= 0 && open.file == extent.file);
  // The padding behind the file's last byte is written too (the trainer zeroed it) and cut off
  // before the fsync.
  const int error = run->queue->Submit({
      .opcode = io::Opcode::kWrite,
      .fd = open.fd,
      .buffer = run->attached->arena + extent.arena_offset,
      .offset = extent.file_offset,
      .bytes = static_cast<uint32_t>(AlignUp(extent.bytes)),
      .tag = tag,
  });
  if (error != 0) return error;
  const bool direct = open.direct != DirectIo::kNo;
  run->write.in_flight[tag] = {.extent = index, .slot = slot, .direct = direct};
  run->write.in_flight_used |= uint64_t{1} << tag;
  ++open.in_flight;
  return 0;
}

/// Submits sealed extents until the queue is full or nothing is there. False on failure.
bool Fill(JobRun* run) {
  WriteState& write = run->write;
  const layout::Extent* const extents = layout::Extents(run->job);
  while (run->queue->CanSubmit() && ~write.in_flight_used != 0 &&
         write.undigested_count + run->queue->in_flight() < kUndigestedMax && TakeNext(run)) {
    const uint32_t index = write.next_extent;
    HOLDFAST_ASSERT(write.has_next && index < run->job->extent_count);
    const layout::Extent& extent = extents[index];
    if (!run->Writes(extent.file)) {
      write.has_next = false;
      QueueForDigest(run, index);
      continue;
    }
    if (MustWaitNs(*run, sys::NowNs()) != 0) break;
    uint16_t slot = 0;
    const Acquired acquired = AcquireFile(run, extent.file, &slot);
    if (acquired == Acquired::kBusy) break;
    if (acquired == Acquired::kFailed) return false;

    HOLDFAST_ASSERT(slot < kOpenFilesMax && run->open[slot].fd >= 0);
    HOLDFAST_ASSERT(run->open[slot].file == extent.file && run->notes[extent.file].slot == slot);
    HOLDFAST_ASSERT(run->notes[extent.file].extents_left > 0);

    const uint32_t tag = static_cast<uint32_t>(std::countr_one(write.in_flight_used));
    const int error = SubmitWrite(run, tag, index, slot);
    if (error == EAGAIN) break;
    if (error != 0) {
      return FailErrno(run, Operation::kWrite, error, extent.file, extent.file_offset,
                       extent.bytes);
    }
    if (run->times.first_submit == 0) run->times.first_submit = sys::NowNs();
#ifdef HOLDFAST_PLANTED_BUGS
    if (testing::g_forget_transfer) --run->open[slot].in_flight;
#endif
    write.has_next = false;
    ChargeRate(run, extent.bytes);
#ifdef HOLDFAST_PLANTED_BUGS
    if (testing::g_acknowledge_at_submit) Acknowledge(run, index);
#endif
  }
  return run->ok();
}

/// Makes the file buffered after a refused direct write. Returns false if that fails.
bool MakeBuffered(JobRun* run, OpenFile* open) {
  HOLDFAST_ASSERT(open->fd >= 0 && open->file < run->job->file_count);
  if (open->direct == DirectIo::kNo) return true;  // by an earlier completion
  if (io::SwitchOffDirect(open->fd) != 0) return false;
  open->direct = run->figures.direct_io = DirectIo::kNo;
  run->notes[open->file].buffered = 1;
  return true;
}

/// Counts one completion and queues its bytes for the digest.
bool TakeCompletion(JobRun* run, const io::Completion& completion) {
  WriteState& write = run->write;
  if (completion.tag >= io::kDepthMax ||
      (write.in_flight_used & (uint64_t{1} << completion.tag)) == 0) {
    return Fail(run, FailureCode::kInternal, Operation::kWrite);
  }
  const InFlight done = write.in_flight[completion.tag];
  write.in_flight_used &= ~(uint64_t{1} << completion.tag);
  HOLDFAST_ASSERT(done.extent < run->job->extent_count);
  const layout::Extent& extent = layout::Extents(run->job)[done.extent];
  HOLDFAST_ASSERT(done.slot < kOpenFilesMax && run->open[done.slot].file == extent.file);
  HOLDFAST_ASSERT(run->open[done.slot].in_flight > 0);
  --run->open[done.slot].in_flight;
  write.progress_ns = sys::NowNs();
  int error = completion.error;
  if (error == EINVAL && done.direct && MakeBuffered(run, &run->open[done.slot])) {
    error = SubmitWrite(run, static_cast<uint32_t>(completion.tag), done.extent, done.slot);
    if (error == 0) return true;
  }
  if (error != 0) {
    return FailErrno(run, Operation::kWrite, error, extent.file,
                     extent.file_offset + completion.bytes, extent.bytes);
  }
  if (completion.bytes != AlignUp(extent.bytes)) {
    return FailErrno(run, Operation::kWrite, EIO, extent.file,
                     extent.file_offset + completion.bytes, extent.bytes);
  }
  run->times.last_complete = write.progress_ns;
  run->figures.bytes_written += extent.bytes;
  QueueForDigest(run, done.extent);
  return true;
}

/// Digests the oldest written extent again. The trainer may reuse the bytes only afterwards. Before
/// the completion the disk may still read them; before the digest a change since the seal would go
/// unnoticed.
bool ProveNext(JobRun* run) {
  WriteState& write = run->write;
  HOLDFAST_ASSERT(write.undigested_count > 0);
  const uint32_t index = write.undigested[write.undigested_first];
  write.undigested_first = (write.undigested_first + 1) % kUndigestedMax;
  --write.undigested_count;
  HOLDFAST_ASSERT(index < run->job->extent_count && run->attached->arena != nullptr);
  const char* const bytes = run->attached->arena + layout::Extents(run->job)[index].arena_offset;
#ifdef HOLDFAST_PLANTED_BUGS
  const bool proven = testing::g_never_redigest || ProveExtent(run, index, bytes);
#else
  const bool proven = ProveExtent(run, index, bytes);
#endif
  if (!proven) return false;
  ++write.proven;
  HOLDFAST_ASSERT(write.proven <= run->job->extent_count);
#ifdef HOLDFAST_PLANTED_BUGS
  if (testing::g_acknowledge_at_submit) return true;
#endif
  Acknowledge(run, index);
  return true;
}

/// Describes the transfers in flight in the report's reason, after a time-out.
void DescribeStall(JobRun* run) {
  char(&reason)[sizeof(layout::CompletionSlot::reason)] = run->job->completion.reason;
  run->queue->Describe(reason, sizeof(reason));
}

bool Stalled(JobRun* run) {
  const uint64_t limit = DeadlineNs(run->job->time_stalled_max_ns);
  const uint64_t now = sys::NowNs();
  sys::OwnGap::Forgive(run->write.gap.Round(now), now, &run->write.progress_ns);
  // A limited rate is no stall: the clock starts when the next write may.
  if (MustWaitNs(*run, now) != 0) run->write.progress_ns = now;
  // Waiting for memory of earlier saves is no stall: the trainer waits by a separate deadline.
  const uint32_t waits = run->job->memory_waits.load(std::memory_order_relaxed);
  if (waits != run->write.memory_waits && run->queue->in_flight() == 0) {
    run->write.memory_waits = waits;
    run->write.progress_ns = now;
    CountStep(run->job);
  }
  if (now - run->write.progress_ns < limit) return false;
  DescribeStall(run);
  const bool disk = run->queue->in_flight() != 0;
  Fail(run, FailureCode::kDeadlineExceeded, disk ? Operation::kWrite : Operation::kWaitTrainer);
  return true;
}

int WaitMs(const JobRun& run) {
  if (run.write.undigested_count != 0) return 0;
  uint64_t ns = kWaitMsMax * sys::kNsPerMs;
  const uint64_t now = sys::NowNs();
  const uint64_t limit = DeadlineNs(run.job->time_stalled_max_ns);
  if (limit < ns) ns = limit;
  const uint64_t rate = run.write.has_next ? MustWaitNs(run, now) : 0;
  if (rate != 0 && rate < ns) ns = rate;
  return static_cast<int>((ns + sys::kNsPerMs - 1) / sys::kNsPerMs);
}

bool Loop(JobRun* run) {
  WriteState& write = run->write;
  const uint32_t extent_count = run->job->extent_count;
  while (write.proven < extent_count) {
    if (MustStop(run, false)) return false;
    // The next writes start before the last ones are digested, so that the disk never waits for the
    // digest.
    if (!Fill(run)) return false;

    io::Completion completions[io::kDepthMax];
    uint32_t wakeups = 0;
    const int count = run->queue->Wait(completions, io::kDepthMax, WaitMs(*run), &wakeups);
    if (count < 0) return FailErrno(run, Operation::kWrite, -count);
    for (int i = 0; i < count; ++i) TakeCompletion(run, completions[i]);
    if (!run->ok()) return false;
    if ((wakeups & (1u << kDoorbellWatch)) != 0) HearDoorbell(*run->attached);
    if ((wakeups & (1u << kTrainerWatch)) != 0) {
      NoteTrainerDeath(run);
      run->queue->Watch(kTrainerWatch, -1);  // The fd stays readable for good.
    }
    // Completions made room: refill before the digest takes its half millisecond.
    if (count > 0 && !Fill(run)) return false;
    if (write.undigested_count != 0) {
      if (!ProveNext(run)) return false;
    } else if (Stalled(run)) {
      return false;
    }
  }
  // Every extent is written and proven, and no transfer is in flight.
  HOLDFAST_ASSERT(write.in_flight_used == 0 && write.undigested_count == 0);
  HOLDFAST_ASSERT(!write.has_next && run->queue->in_flight() == 0);
  return true;
}

}  // namespace

void PrepareWriteState(JobRun* run) {
  HOLDFAST_ASSERT(run->queue->in_flight() == 0);
  layout::Job* const job = run->job;
  uint64_t* const taken_bits = run->write.taken_bits;
  for (uint32_t i = 0; i < job->extent_count; i += 64) taken_bits[i / 64] = 0;
  // Not assignable, for the atomic inside: made in place.
  WriteState& write = *new (&run->write) WriteState();
  write.taken_bits = taken_bits;
  // From the log's first entry: an extent that was published stays published.
  write.published =
      layout::LogReader(layout::At<layout::SharedU32>(job, job->published), job->extent_count);
  write.acknowledged.Reset(layout::At<layout::SharedU32>(job, job->acknowledged),
                           job->extent_count);
  run->figures.bytes_written = 0;
  job->bytes_completed.store(0, std::memory_order_relaxed);
  for (uint32_t i = 0; i < job->file_count; ++i) {
    run->notes[i] = FileNote{.extents_left = layout::Files(job)[i].extent_count,
                             .synced = static_cast<uint8_t>(run->Writes(i) ? 0 : 1)};
  }
  run->all_sealed = run->all_sealed || job->extent_count == 0;
  run->write.progress_ns = sys::NowNs();
}

bool WriteExtents(JobRun* run) {
  SetPhase(run, layout::Phase::kWriting);
  int error = run->queue->Watch(kDoorbellWatch, run->attached->doorbell);
  if (error == 0) error = run->queue->Watch(kTrainerWatch, run->attached->trainer);
  const bool ok = error == 0 ? Loop(run) : FailErrno(run, Operation::kSetUp, error);
  if (!ok) Drain(run, run->queue);
  // Between jobs, and while a kept worker sleeps, the queue ignores the doorbell.
  run->queue->Watch(kDoorbellWatch, -1);
  run->queue->Watch(kTrainerWatch, -1);
  return ok;
}

void Drain(JobRun* run, io::Queue* queue) {
  const uint64_t end = sys::NowNs() + DeadlineNs(run->job->time_stalled_max_ns) / 4;
  while (queue->in_flight() != 0) {
    io::Completion completions[io::kDepthMax];
    uint32_t wakeups = 0;
    queue->Watch(kDoorbellWatch, -1);
    queue->Watch(kTrainerWatch, -1);
    const int count = queue->Wait(completions, io::kDepthMax, kWaitMsMax, &wakeups);
    if (!layout::TraitsOf(run->launcher).process) {
      // A broken engine yields no completions: closing the engine waits for the kernel. If the
      // close fails too, the thread must never report its end.
      if (count < 0 && !queue->Close()) {
        while (true) SleepUntilRung(run, kWaitMsMax);
      }
    } else if (count < 0 || sys::NowNs() > end) {
      run->io_stuck = true;
      return;
    }
  }
}

}  // namespace holdfast::worker
