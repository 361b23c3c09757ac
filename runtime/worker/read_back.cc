#include "runtime/worker/read_back.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>

#include "runtime/layout/launcher.h"
#include "runtime/sys/assert.h"
#include "runtime/sys/own_gap.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"
#include "runtime/worker/accounting.h"
#include "runtime/worker/open_files.h"
#include "runtime/worker/proof.h"
#include "runtime/worker/write_loop.h"

namespace holdfast::worker {
namespace {

// Four chunks keep a disk busy while one chunk is digested, and take half of a worker's private
// memory bound.
constexpr uint32_t kBuffers = 4;
constexpr uint64_t kBufferBytes = uint64_t{kBuffers} * kChunkBytes;
constexpr int kWaitMs = 500;
constexpr uint32_t kNone = 0xffffffffu;

struct Reader {
  JobRun* run = nullptr;
  char* buffer = nullptr;
  uint32_t extent_in[kBuffers] = {kNone, kNone, kNone, kNone};
  uint64_t progress_ns = 0;
  sys::OwnGap gap;
};

bool SubmitReads(Reader* reader, int fd, uint32_t* next, uint32_t end) {
  JobRun* const run = reader->run;
  for (uint32_t i = 0; i < kBuffers && *next < end; ++i) {
    if (reader->extent_in[i] != kNone) continue;
    HOLDFAST_ASSERT(*next < run->job->extent_count);
    const layout::Extent& extent = layout::Extents(run->job)[*next];
    HOLDFAST_ASSERT(extent.bytes <= kChunkBytes);
    const int error = run->read_queue->Submit({
        .opcode = io::Opcode::kRead,
        .fd = fd,
        .buffer = reader->buffer + uint64_t{i} * kChunkBytes,
        .offset = extent.file_offset,
        .bytes = static_cast<uint32_t>(AlignUp(extent.bytes)),
        .tag = i,
    });
    if (error != 0) {
      return FailErrno(run, Operation::kRead, error, extent.file, extent.file_offset, extent.bytes);
    }
    reader->extent_in[i] = (*next)++;
  }
  return true;
}

bool TakeRead(Reader* reader, const io::Completion& completion) {
  JobRun* const run = reader->run;
  HOLDFAST_ASSERT(completion.tag < kBuffers);
  const uint32_t index = reader->extent_in[completion.tag];
  HOLDFAST_ASSERT(index < run->job->extent_count);
  reader->extent_in[completion.tag] = kNone;
  reader->progress_ns = sys::NowNs();
  const layout::Extent& extent = layout::Extents(run->job)[index];
  if (completion.error != 0) {
    return FailErrno(run, Operation::kRead, completion.error, extent.file,
                     extent.file_offset + completion.bytes, extent.bytes);
  }
  if (completion.bytes < extent.bytes) {
    // The file ends too early, though its length was set and fsynced.
    return FailErrno(run, Operation::kRead, EIO, extent.file, extent.file_offset + completion.bytes,
                     extent.bytes);
  }
  CountStep(run->job);
  return ProveExtent(run, index, reader->buffer + completion.tag * uint64_t{kChunkBytes});
}

bool ReadFile(Reader* reader, int fd, const layout::File& file) {
  JobRun* const run = reader->run;
  uint32_t next = file.extent_first;
  const uint32_t end = file.extent_first + file.extent_count;
  HOLDFAST_ASSERT(next <= end && end <= run->job->extent_count);
  HOLDFAST_ASSERT(run->read_queue->in_flight() == 0);
  reader->progress_ns = sys::NowNs();
  while (next < end || run->read_queue->in_flight() != 0) {
    if (MustStop(run, true)) return false;
    if (!SubmitReads(reader, fd, &next, end)) return false;
    io::Completion completions[kBuffers];
    uint32_t wakeups = 0;
    const int count = run->read_queue->Wait(completions, kBuffers, kWaitMs, &wakeups);
    if (count < 0) return FailErrno(run, Operation::kRead, -count);
    for (int i = 0; i < count; ++i) TakeRead(reader, completions[i]);
    if (!run->ok()) return false;
    if ((wakeups & (1u << kDoorbellWatch)) != 0) HearDoorbell(*run->attached);
    const uint64_t now = sys::NowNs();
    sys::OwnGap::Forgive(reader->gap.Round(now), now, &reader->progress_ns);
    if (now - reader->progress_ns > DeadlineNs(run->job->time_stalled_max_ns)) {
      run->read_queue->Describe(run->job->completion.reason, sizeof(run->job->completion.reason));
      return Fail(run, FailureCode::kDeadlineExceeded, Operation::kRead);
    }
  }
  return true;
}

bool ReadAll(Reader* reader) {
  JobRun* const run = reader->run;
  HOLDFAST_ASSERT(reader->buffer != nullptr && run->queue->in_flight() == 0);
  for (uint32_t i = 0; i < run->job->file_count; ++i) {
    if (!run->Writes(i)) continue;
    const layout::File& file = layout::Files(run->job)[i];
    char name[kNameBytes];
    TemporaryOf(*run, i, name);
    io::DirectOpen opened;
    // Buffered files are read from the page cache. Read-back then proves only the bytes copied
    // there; direct_io in the report shows this case.
    const bool want_direct = !run->Has(layout::kBuffered) && run->notes[i].buffered == 0;
    const int error =
        io::OpenDirect(run->directory, name, O_RDONLY | O_NOFOLLOW, 0, want_direct, &opened);
    if (error != 0) return FailErrno(run, Operation::kOpen, error, i);
    // Another save of this file into the same directory may have taken over the temporary name.
    const bool ok = CheckOurs(run, i, Operation::kRename) && ReadFile(reader, opened.fd, file);
    // The fd stays open while reads are under way, and the buffer stays mapped.
    if (!ok) Drain(run, run->read_queue);
    sys::CloseOwned(opened.fd);
    if (!ok) return false;
  }
  return true;
}

}  // namespace

bool ReadBackFiles(JobRun* run) {
  HOLDFAST_ASSERT(!run->staging_released && run->write.proven == run->job->extent_count);
  SetPhase(run, layout::Phase::kReadingBack);
  // Anonymous and private: counted as this worker's own, and unmapped below. A small file touches a
  // part of it.
  void* const memory = sys::Sys().mmap(nullptr, kBufferBytes, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return FailErrno(run, Operation::kMapBuffer, errno);
  // A worker may be a thread of the host: a child that is forked during a read would make the
  // pages copy-on-write, and the kernel could then write to the child's (open(2), NOTES).
  if (sys::Sys().madvise(memory, kBufferBytes, MADV_DONTFORK) != 0) {
    FailErrno(run, Operation::kMapBuffer, errno);
    sys::Sys().munmap(memory, kBufferBytes);
    return false;
  }
  Reader reader = {.run = run, .buffer = static_cast<char*>(memory)};
  io::QueueOptions options;
  // The engine that wrote, without registration: the registered region is the arena.
  options.rung =
      run->figures.engine == EngineRung::kPwrite ? EngineRung::kPwrite : EngineRung::kUring;
  options.depth = kBuffers;
  options.threads = layout::TraitsOf(run->job->launcher).forked() ? 0 : run->job->pwrite_threads;
  int error = run->read_queue->Open(options);
  if (error != 0 && options.rung == EngineRung::kUring && run->job->engine == EngineRung::kAuto) {
    // A second ring may exceed a limit on locked memory or fds. pwrite is slower but does not fail.
    options.rung = EngineRung::kPwrite;
    error = run->read_queue->Open(options);
  }
  bool ok = error == 0 || FailErrno(run, Operation::kSetUp, error);
  if (ok) {
    run->read_queue->Watch(kDoorbellWatch, run->attached->doorbell);
    ok = ReadAll(&reader);
    SamplePrivateBytes(run);
    if (run->io_stuck) return false;  // The kernel may still write to the buffer: it stays.
    run->read_queue->Close();
  }
  sys::Sys().munmap(memory, kBufferBytes);
  return ok;
}

}  // namespace holdfast::worker
