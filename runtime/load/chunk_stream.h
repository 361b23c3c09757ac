// Reads ranges of files, many at once, and hands each to a small pool of threads as it arrives.
//
// The calling thread only submits and reaps, so that the next reads are always in flight;
// digesting, comparing and copying out happen in the pool. At most the buffer's slots are resident.
#ifndef HOLDFAST_RUNTIME_LOAD_CHUNK_STREAM_H_
#define HOLDFAST_RUNTIME_LOAD_CHUNK_STREAM_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "holdfast/pod.h"
#include "runtime/load/stream_buffer.h"

namespace holdfast::load {

/// A file to read. It is opened when its first range is due and closed after its last one, so
/// that the number of open files does not grow with the checkpoint.
struct StreamFile {
  int directory = -1;
  std::string name;
  bool follow_symlink = false;  ///< Files named by a manifest must be what they seem.
};

/// Bytes to read; they must not cross a multiple of kChunkBytes. Ranges of one file stand together.
struct StreamRange {
  uint32_t file = 0;
  uint32_t bytes = 0;
  uint64_t offset = 0;
  uint64_t tag = 0;  ///< The caller's own.
};

/// A range that was read, or could not be.
struct StreamBlock {
  StreamRange range;
  const char* data = nullptr;  ///< Of `range.offset`; valid during the call of the sink.
  uint32_t bytes_read = 0;     ///< Less than `range.bytes` where the file ended early.
  int error = 0;               ///< errno of opening or reading; then `bytes_read` is 0.
  bool failed_to_open = false;
};

/// What the sink wants next.
enum class StreamVerdict {
  kContinue,
  kStop,        ///< Read nothing more; what is in flight is waited for and dropped.
  kKeepBuffer,  ///< As kStop, and the buffer must stay mapped: a device may still read from it.
};

/// Called from several threads at once.
using StreamSink = std::function<StreamVerdict(const StreamBlock&)>;

struct StreamOptions {
  uint32_t threads = 0;  ///< That run the sink, the caller's included. 0: one per CPU, at most 4.
  EngineRung engine = EngineRung::kAuto;
  bool direct_io = true;
  /// No read ends for this long: give up. What is in flight then keeps its memory and its files.
  absl::Duration time_stalled_max = absl::Minutes(10);
  /// Called in the calling thread with the bytes that have arrived so far; may be empty.
  std::function<void(uint64_t bytes_done)> progress;
};

struct StreamReport {
  uint64_t bytes_read = 0;  ///< From the files, with what alignment added.
  EngineRung engine = EngineRung::kAuto;
  std::string engine_reason;
  DirectIo direct_io = DirectIo::kNo;  ///< The least that any file gave.
};

/// Reads all ranges through `buffer`. Errors of files go to the sink; the status is about the
/// mechanism itself: no engine, no thread, a stalled read.
absl::StatusOr<StreamReport> StreamChunks(absl::Span<const StreamFile> files,
                                          absl::Span<const StreamRange> ranges,
                                          const StreamOptions& options, StreamBuffer* buffer,
                                          const StreamSink& sink);

/// Cuts [begin, end) of a file at chunk borders and appends the ranges.
void AppendRanges(uint32_t file, uint64_t begin, uint64_t end, uint64_t tag,
                  std::vector<StreamRange>* ranges);

/// Threads for `wanted` (0 is one per CPU, at most 4).
uint32_t ThreadsFor(uint32_t wanted);

/// \error kInvalidArgument for options that cannot work, naming the one to change.
absl::Status CheckReadOptions(uint64_t buffer_bytes, uint32_t threads);

}  // namespace holdfast::load

#endif  // HOLDFAST_RUNTIME_LOAD_CHUNK_STREAM_H_
