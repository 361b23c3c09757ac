// ReadCompletion and WrongState: a damaged worker writes any bytes to its table.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "fuzz/expect.h"
#include "runtime/base/status.h"
#include "runtime/layout/job.h"
#include "runtime/writer/completion.h"

namespace {

constexpr holdfast::writer::CompletionLimits kLimits = {
    .file_count = 3, .tensor_count = 5, .world_size = 2, .bytes = 1 << 20};

void Check(const holdfast::layout::Job& job) {
  (void)holdfast::writer::WrongState(job);
  HOLDFAST_EXPECT(holdfast::writer::ReadReason(job.completion).size() <=
                  sizeof(job.completion.reason));
  const auto read = holdfast::writer::ReadCompletion(job, kLimits);
  if (!read.ok() || !read->has_value()) return;
  const holdfast::writer::Completion& result = **read;
  const holdfast::Failure& failure = result.failure;
  HOLDFAST_EXPECT(failure.file < kLimits.file_count || failure.file == failure.kNoIndex);
  HOLDFAST_EXPECT(failure.tensor < kLimits.tensor_count || failure.tensor == failure.kNoIndex);
  HOLDFAST_EXPECT(result.left_behind.find('/') == std::string::npos);
  HOLDFAST_EXPECT(result.foreign.find('/') == std::string::npos);
  HOLDFAST_EXPECT(result.figures.bytes_written <= kLimits.bytes);
  const absl::Status status = holdfast::base::ToStatus(
      failure, {.checkpoint = "c", .files = {"a", "b", "c"}, .tensors = {"1", "2", "3", "4", "5"}});
  HOLDFAST_EXPECT(status.ok() == failure.ok());
  HOLDFAST_EXPECT(!holdfast::base::Describe(result.rank_failure).empty());
}

}  // namespace

// The input covers the fields of a worker, from `phase` on.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  holdfast::layout::Job job;
  auto* const begin = reinterpret_cast<char*>(&job.phase);
  const auto room = static_cast<size_t>(reinterpret_cast<char*>(&job + 1) - begin);
  if (bytes != 0) std::memcpy(begin, data, std::min(bytes, room));
  Check(job);
  job.completion.state = static_cast<uint32_t>(holdfast::layout::CompletionState::kDone);
  Check(job);
  return 0;
}
