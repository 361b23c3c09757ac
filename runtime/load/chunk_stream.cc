#include "runtime/load/chunk_stream.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "io_uring/queue.h"
#include "runtime/base/keep_forever.h"
#include "runtime/base/status.h"
#include "runtime/base/thread.h"
#include "runtime/base/unique_fd.h"
#include "runtime/layout/job.h"
#include "runtime/load/sink_pool.h"
#include "runtime/sys/system.h"

namespace holdfast::load {
namespace {

constexpr int kWaitStepMs = 200;
constexpr uint64_t kProgressStepNs = 50'000'000;
// Registering the buffer costs 3 ms/GiB on huge pages and 20 on small ones. Registration pays once
// each slot is used several times.
constexpr uint64_t kUsesForRegistration = 4;
constexpr uint32_t kReadThreads = 4;  // of the pwrite rung, which reads with pread(2)

/// A range in flight: the requested bytes, aligned outwards.
struct Transfer {
  uint32_t range = 0;
  uint64_t offset = 0;
  uint32_t bytes = 0;
  bool direct = false;  // at submission; the file may have become buffered since
};

struct OpenedFile {
  base::UniqueFd fd;
  DirectIo direct = DirectIo::kNo;
  uint32_t in_flight = 0;
  bool all_submitted = false;
};

/// The objects that a read without an end may still access.
struct Quarantined {
  std::unique_ptr<io::Queue> queue;
  std::vector<OpenedFile> files;
};

class Stream {
 public:
  Stream(absl::Span<const StreamFile> files, absl::Span<const StreamRange> ranges,
         const StreamOptions& options, StreamBuffer* buffer, const StreamSink& sink)
      : files_(files),
        ranges_(ranges),
        options_(options),
        buffer_(buffer),
        queue_(std::make_unique<io::Queue>()),
        opened_(files.size()),
        transfers_(buffer->slots()),
        pool_(ThreadsFor(options.threads) - 1, buffer->slots(), sink) {}

  absl::StatusOr<StreamReport> Run() {
    if (const int error = OpenQueue(); error != 0) {
      return base::ErrnoStatus("open a queue for reading:", queue_->reason(), error);
    }
    absl::Status status;
    while (status.ok()) {
      SubmitAll();
      if (LookAtHeld()) continue;
      if (in_flight_ == 0 && Exhausted()) break;
      status = Reap();
    }
    if (pool_.free_event() >= 0) (void)queue_->Watch(0, -1);
    pool_.Finish();
    if (pool_.keep_buffer()) buffer_->Abandon();
    if (in_flight_ != 0) Quarantine();
    if (!status.ok()) return status;
    report_.engine = queue_->rung();
    report_.engine_reason = queue_->reason();
    if (!any_file_) report_.direct_io = DirectIo::kNo;
    queue_->Close();
    return report_;
  }

 private:
  int OpenQueue() {
    io::QueueOptions options;
    options.rung = options_.engine;
    options.depth = std::min(buffer_->slots(), io::kDepthMax);
    options.threads = std::min(options.depth, kReadThreads);
    options.region = buffer_->base();
    options.region_bytes = buffer_->bytes();
    options.may_register = ranges_.size() >= uint64_t{buffer_->slots()} * kUsesForRegistration;
    if (const int error = queue_->Open(options); error != 0) return error;
    return pool_.free_event() < 0 ? 0 : queue_->Watch(0, pool_.free_event());
  }

  bool Exhausted() const { return next_ == ranges_.size() || pool_.stopped(); }

  void SubmitAll() {
    uint32_t slot = 0;
    while (!Exhausted() && queue_->CanSubmit() && pool_.TakeSlot(&slot)) {
      const uint32_t index = next_++;
      if (!Start(slot, index)) {
        // After a failed open the file's other ranges are not tried.
        const uint32_t file = ranges_[index].file;
        while (next_ < ranges_.size() && ranges_[next_].file == file) ++next_;
      }
    }
  }

  /// Returns false when the range's file cannot be opened; the sink gets the error.
  bool Start(uint32_t slot, uint32_t index) {
    const StreamRange& range = ranges_[index];
    OpenedFile& file = opened_[range.file];
    if (!file.fd.valid()) {
      if (const int error = OpenFile(range.file); error != 0) {
        pool_.Push(slot, {.range = range, .error = error, .failed_to_open = true});
        return false;
      }
    }
    Transfer& transfer = transfers_[slot];
    transfer.range = index;
    transfer.offset = range.offset / kIoAlignment * kIoAlignment;
    transfer.bytes =
        static_cast<uint32_t>(AlignUp(range.offset + range.bytes - transfer.offset, kIoAlignment));
    ++file.in_flight;
    file.all_submitted =
        index + 1 == ranges_.size() || ranges_[index + 1].file != ranges_[index].file;
    Submit(slot);
    return true;
  }

  int OpenFile(uint32_t index) {
    const StreamFile& file = files_[index];
    io::DirectOpen opened;
    const int flags = O_RDONLY | (file.follow_symlink ? 0 : O_NOFOLLOW);
    const int error =
        io::OpenDirect(file.directory, file.name.c_str(), flags, 0, options_.direct_io, &opened);
    if (error != 0) return error;
    opened_[index].fd = base::UniqueFd(opened.fd);
    if (file.identity.has_value()) {
      const auto found = directory::IdentityOf(opened.fd, file.name);
      if (!found.ok() || *found != *file.identity) {
        opened_[index].fd.Reset();
        return ESTALE;
      }
    }
    NoteDirect(opened.direct);
    opened_[index].direct = opened.direct;
    return 0;
  }

  void NoteDirect(DirectIo direct) {
    report_.direct_io = any_file_ ? std::min(report_.direct_io, direct) : direct;
    any_file_ = true;
  }

  void Submit(uint32_t slot) {
    Transfer& transfer = transfers_[slot];
    const OpenedFile& file = opened_[ranges_[transfer.range].file];
    transfer.direct = file.direct != DirectIo::kNo;
    const int error = queue_->Submit({.opcode = io::Opcode::kRead,
                                      .fd = file.fd.get(),
                                      .buffer = buffer_->slot(slot),
                                      .offset = transfer.offset,
                                      .bytes = transfer.bytes,
                                      .tag = slot});
    if (error == 0) {
      ++in_flight_;
    } else {
      Deliver(slot, 0, error);
    }
  }

  absl::Status Reap() {
    io::Completion done[16];
    uint32_t wakeups = 0;
    const int count = queue_->Wait(done, 16, kWaitStepMs, &wakeups);
    if (count < 0) return base::ErrnoStatus("wait for reads:", queue_->reason(), -count);
    if (wakeups != 0) pool_.DrainFreeEvent();
    // With no read in flight only the sink is slow: no stall.
    if (count > 0 || in_flight_ == 0) stalled_since_ns_ = 0;
    if (count == 0) return wakeups != 0 || in_flight_ == 0 ? absl::OkStatus() : CheckStalled();
    for (int i = 0; i < count; ++i) {
      Complete(done[i]);
      // Without a pool the sink has just run: submit the next read before the next sink call.
      SubmitAll();
    }
    ReportProgress();
    return absl::OkStatus();
  }

  /// This thread processes one block of each batch. While the disk is slower than the sink, a batch
  /// has one block, and no other thread is woken. On virtual CPUs a wake-up costs more than the
  /// digest. While the disk is faster, the pool processes the rest of the batch.
  void Hold(uint32_t slot, const StreamBlock& block) {
    if (held_.has_value()) pool_.Push(held_->first, held_->second);
    held_.emplace(slot, block);
  }

  bool LookAtHeld() {
    if (!held_.has_value()) return false;
    const std::pair<uint32_t, StreamBlock> own = *std::exchange(held_, std::nullopt);
    pool_.LookHere(own.first, own.second);
    return true;
  }

  void Complete(const io::Completion& done) {
    const uint32_t slot = static_cast<uint32_t>(done.tag);
    OpenedFile& file = opened_[ranges_[transfers_[slot].range].file];
    --in_flight_;
    if (done.error == EINVAL && transfers_[slot].direct && MakeBuffered(&file)) {
      Submit(slot);
      return;
    }
    report_.bytes_read += done.bytes;
    Deliver(slot, done.bytes, done.error);
  }

  /// The file system accepted O_DIRECT at open and refuses the read (a stricter alignment): the
  /// file becomes buffered. Reads in flight on the same fd return the same bytes either way.
  bool MakeBuffered(OpenedFile* file) {
    if (file->direct == DirectIo::kNo) return true;
    if (io::SwitchOffDirect(file->fd.get()) != 0) return false;
    file->direct = DirectIo::kNo;
    NoteDirect(DirectIo::kNo);
    return true;
  }

  void Deliver(uint32_t slot, uint32_t bytes, int error) {
    const Transfer& transfer = transfers_[slot];
    const StreamRange& range = ranges_[transfer.range];
    OpenedFile& file = opened_[range.file];
    if (--file.in_flight == 0 && file.all_submitted) file.fd.Reset();
    const uint32_t before = static_cast<uint32_t>(range.offset - transfer.offset);
    StreamBlock block{.range = range, .data = buffer_->slot(slot) + before, .error = error};
    if (error == 0 && bytes > before) block.bytes_read = std::min(bytes - before, range.bytes);
    bytes_arrived_ += range.bytes;
    Hold(slot, block);
  }

  absl::Status CheckStalled() {
    const uint64_t now = sys::NowNs();
    if (stalled_since_ns_ == 0) stalled_since_ns_ = now;
    const absl::Duration stalled = absl::Nanoseconds(now - stalled_since_ns_);
    if (stalled < options_.time_stalled_max) return absl::OkStatus();
    char state[256];
    queue_->Describe(state, sizeof(state));
    return absl::DeadlineExceededError(absl::StrCat(
        "read: nothing arrived for ", absl::FormatDuration(stalled), " (", state, ")"));
  }

  /// Reads without an end may still land: their memory, files and queue are kept for good.
  void Quarantine() {
    buffer_->Abandon();
    auto kept = std::make_shared<Quarantined>();
    kept->queue = std::move(queue_);
    kept->files = std::move(opened_);
    base::KeepForever(std::move(kept));
  }

  void ReportProgress() {
    if (!options_.progress) return;
    const uint64_t now = sys::NowNs();
    if (now - progress_ns_ < kProgressStepNs && !Exhausted()) return;
    progress_ns_ = now;
    options_.progress(bytes_arrived_);
  }

  const absl::Span<const StreamFile> files_;
  const absl::Span<const StreamRange> ranges_;
  const StreamOptions& options_;
  StreamBuffer* const buffer_;
  std::unique_ptr<io::Queue> queue_;
  std::vector<OpenedFile> opened_;
  std::vector<Transfer> transfers_;
  SinkPool pool_;
  StreamReport report_;
  bool any_file_ = false;
  uint32_t next_ = 0;
  uint32_t in_flight_ = 0;
  std::optional<std::pair<uint32_t, StreamBlock>> held_;
  uint64_t bytes_arrived_ = 0;
  uint64_t stalled_since_ns_ = 0;
  uint64_t progress_ns_ = 0;
};

}  // namespace

absl::StatusOr<StreamReport> StreamChunks(absl::Span<const StreamFile> files,
                                          absl::Span<const StreamRange> ranges,
                                          const StreamOptions& options, StreamBuffer* buffer,
                                          const StreamSink& sink) {
  return Stream(files, ranges, options, buffer, sink).Run();
}

void AppendRanges(uint32_t file, uint64_t begin, uint64_t end, uint64_t tag,
                  std::vector<StreamRange>* ranges) {
  while (begin < end) {
    const uint64_t border = (begin / kChunkBytes + 1) * kChunkBytes;
    const uint64_t stop = std::min(border, end);
    ranges->push_back(
        {.file = file, .bytes = static_cast<uint32_t>(stop - begin), .offset = begin, .tag = tag});
    begin = stop;
  }
}

uint32_t ThreadsFor(uint32_t wanted) { return wanted != 0 ? wanted : base::DefaultThreads(); }

absl::Status CheckReadOptions(uint64_t buffer_bytes, uint32_t threads) {
  constexpr uint64_t kBufferBytesMin = uint64_t{2} * kChunkBytes;
  if (buffer_bytes < kBufferBytesMin) {
    return absl::InvalidArgumentError(
        absl::StrCat("buffer_bytes is ", buffer_bytes, "; it must be at least ", kBufferBytesMin,
                     ": one chunk is read while another is looked at"));
  }
  constexpr uint32_t kThreadsMax = 256;
  if (threads > kThreadsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("threads is ", threads, "; it must be at most ", kThreadsMax));
  }
  return absl::OkStatus();
}

}  // namespace holdfast::load
