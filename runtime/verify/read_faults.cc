#include "runtime/verify/read_faults.h"

#include "absl/strings/str_cat.h"
#include "runtime/base/status.h"
#include "runtime/load/stream_buffer.h"

namespace holdfast::verify {

absl::Status StreamAll(absl::Span<const load::StreamFile> files,
                       absl::Span<const load::StreamRange> ranges, const VerifyOptions& options,
                       const load::StreamSink& sink, VerifyReport* report) {
  if (ranges.empty()) return absl::OkStatus();
  HOLDFAST_ASSIGN_OR_RETURN(load::StreamBuffer buffer, load::StreamBuffer::Create(load::SlotsFor(
                                                           options.buffer_bytes, ranges.size())));
  uint64_t total = 0;
  for (const load::StreamRange& range : ranges) total += range.bytes;
  load::StreamOptions stream;
  stream.threads = options.threads;
  stream.engine = options.engine;
  stream.direct_io = options.direct_io;
  if (options.progress) {
    stream.progress = [&options, total](uint64_t done) { options.progress(done, total); };
  }
  const auto streamed = load::StreamChunks(files, ranges, stream, &buffer, sink);
  if (!streamed.ok()) return streamed.status();
  report->engine = streamed->engine;
  report->direct_io = streamed->direct_io;
  if (options.progress) options.progress(total, total);
  return absl::OkStatus();
}

bool AddReadFault(const load::StreamBlock& block, const std::string& file, FaultLog* log) {
  const uint64_t end = block.range.offset + block.range.bytes;
  Fault fault{.file = file, .begin = block.range.offset, .end = end, .reason = "read"};
  if (block.error != 0) {
    if (block.failed_to_open) fault.begin = fault.end = 0;
    fault.expected = "readable bytes";
    fault.found = std::string(
        base::ErrnoStatus(block.failed_to_open ? "open" : "read", file, block.error).message());
    log->Add(Verdict::kUnreadable, std::move(fault));
    return true;
  }
  if (block.bytes_read == block.range.bytes) return false;
  // The file had its full size at the start: another process is truncating it.
  fault.begin += block.bytes_read;
  fault.expected = absl::StrCat(fault.end - fault.begin, " bytes");
  fault.found = "the file's end";
  log->Add(Verdict::kCorrupt, std::move(fault));
  return true;
}

}  // namespace holdfast::verify
