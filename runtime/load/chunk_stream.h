// Reads ranges of files, many at once, and passes each range to a small pool of threads on arrival.
//
// The calling thread only submits and reaps, so the next reads are always in flight. The pool
// digests, compares and copies out. At most the buffer's slots are resident.
#ifndef HOLDFAST_RUNTIME_LOAD_CHUNK_STREAM_H_
#define HOLDFAST_RUNTIME_LOAD_CHUNK_STREAM_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "holdfast/pod.h"
#include "runtime/directory/entries.h"
#include "runtime/load/stream_buffer.h"

namespace holdfast::load {

/// A file to read. The stream opens the file for its first range and closes it after the last. So
/// the number of open files does not grow with the checkpoint.
struct StreamFile {
  int directory = -1;
  std::string name;
  bool follow_symlink = false;  ///< False for files that a manifest names: a link is a fault.
  /// Of the file that the ranges are of, if known. Opening another file fails with ESTALE.
  std::optional<directory::Identity> identity;
};

/// A range to read; it crosses no multiple of kChunkBytes. Ranges of one file are adjacent.
struct StreamRange {
  uint32_t file = 0;
  uint32_t bytes = 0;
  uint64_t offset = 0;
  uint64_t tag = 0;  ///< For the caller's use.
};

/// A range after its read, successful or failed.
struct StreamBlock {
  StreamRange range;
  const char* data = nullptr;  ///< At `range.offset`; valid during the call of the sink.
  uint32_t bytes_read = 0;     ///< Less than `range.bytes` where the file ended early.
  int error = 0;               ///< errno of opening or reading; then `bytes_read` is 0.
  bool failed_to_open = false;
};

/// The sink's verdict on further reading.
enum class StreamVerdict {
  kContinue,
  kStop,  ///< Starts no further read; reads in flight are waited for and dropped.
  /// As kStop, and the buffer must stay mapped: a device may still read from the buffer.
  kKeepBuffer,
};

/// Called from several threads at once.
using StreamSink = std::function<StreamVerdict(const StreamBlock&)>;

struct StreamOptions {
  /// Threads that run the sink, the caller's included. 0: one per CPU, at most 4.
  uint32_t threads = 0;
  EngineRung engine = EngineRung::kAuto;
  bool direct_io = true;
  /// Longest time without the end of a read; then the stream fails. Reads in flight keep their
  /// memory and files.
  absl::Duration time_stalled_max = absl::Minutes(10);
  /// Called in the calling thread with the bytes read so far; may be empty.
  std::function<void(uint64_t bytes_done)> progress;
};

struct StreamReport {
  uint64_t bytes_read = 0;  ///< From the files, alignment included.
  EngineRung engine = EngineRung::kAuto;
  std::string engine_reason;
  DirectIo direct_io = DirectIo::kNo;  ///< The lowest value of any file.
};

/// Reads all ranges through `buffer`. Errors of files go to the sink. The status is about the
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

/// Checks the options of a read. \error kInvalidArgument, naming the option to change.
absl::Status CheckReadOptions(uint64_t buffer_bytes, uint32_t threads);

}  // namespace holdfast::load

#endif  // HOLDFAST_RUNTIME_LOAD_CHUNK_STREAM_H_
