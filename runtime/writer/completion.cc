#include "runtime/writer/completion.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>

#include "absl/strings/str_cat.h"

namespace holdfast::writer {
namespace {

constexpr int32_t kErrnoMax = 4095;  // the kernel's limit
constexpr uint32_t kWriteAttemptsMax = 2;

/// Reads a state once: the worker may change the state at any time.
template <typename Value>
uint32_t Load(const std::atomic<Value>& value) {
  return value.load(std::memory_order_relaxed);
}

template <typename Enum>
bool IsAbove(Enum value, Enum last) {
  return static_cast<uint64_t>(value) > static_cast<uint64_t>(last);
}

bool IsIndex(uint32_t index, uint32_t count) { return index == Failure::kNoIndex || index < count; }

template <size_t n>
bool IsTerminated(const char (&text)[n]) {
  return strnlen(text, n) < n;
}

/// The name of one entry of a directory, or empty.
bool IsEntryName(const char (&name)[kNameBytes]) {
  return IsTerminated(name) && strchr(name, '/') == nullptr && strcmp(name, ".") != 0 &&
         strcmp(name, "..") != 0;
}

/// A bool of another process, which may be no bool.
bool IsBool(const bool& value) {
  unsigned char byte = 0;
  std::memcpy(&byte, &value, sizeof(byte));
  return byte <= 1;
}

const char* WrongFailure(const layout::CompletionSlot& slot, const CompletionLimits& limits) {
  const Failure& failure = slot.failure;
  if (IsAbove(failure.code, FailureCode::kDataLoss)) return "a code that there is not";
  if (IsAbove(failure.operation, kLastOperation)) return "an operation that there is not";
  if (failure.error_number < 0 || failure.error_number > kErrnoMax) return "no errno";
  if (!IsIndex(failure.file, limits.file_count)) return "a file that there is not";
  if (!IsIndex(failure.tensor, limits.tensor_count)) return "a tensor that there is not";
  if (failure.ok() && failure.operation != Operation::kNone) return "a failure without a code";
  if (failure.operation != Operation::kWaitRanks) return nullptr;
  if (slot.rank_failure.rank >= limits.world_size) return "a rank that there is not";
  return IsTerminated(slot.rank_failure.text) ? nullptr : "a text without an end";
}

const char* WrongSlot(const layout::CompletionSlot& slot, const CompletionLimits& limits) {
  if (const char* const wrong = WrongFailure(slot, limits)) return wrong;
  const WorkerFigures& figures = slot.figures;
  if (figures.bytes_written > limits.bytes) return "more bytes than the save has";
  if (IsAbove(figures.engine, EngineRung::kPwrite)) return "an engine that there is not";
  if (IsAbove(figures.direct_io, DirectIo::kProven)) return "no kind of direct I/O";
  if (figures.write_attempts > kWriteAttemptsMax) return "more than two attempts";
  if (!IsBool(figures.space_reserved) || slot.left_files > 1) return "neither yes nor no";
  if (!IsTerminated(slot.reason)) return "a text without an end";
  if (!IsEntryName(slot.left_behind) || !IsEntryName(slot.foreign)) return "no name of an entry";
  return nullptr;
}

}  // namespace

const char* WrongState(const layout::Job& job) {
  if (Load(job.completion.state) > static_cast<uint32_t>(layout::CompletionState::kDone))
    return "left a result that is none";
  if (Load(job.staging_released) > 1 || Load(job.assertion_failed) > 1)
    return "left a flag that is neither set nor clear";
  if (Load(job.engine_used) > static_cast<uint32_t>(EngineRung::kPwrite))
    return "used an engine that there is not";
  if (Load(job.written) > static_cast<uint32_t>(layout::Written::kRewritten))
    return "uses its staging memory in no known way";
  if (Load(job.phase) > static_cast<uint32_t>(layout::Phase::kDone))
    return "is in a phase that there is not";
  return nullptr;
}

std::string ReadReason(const layout::CompletionSlot& slot) {
  std::string text(slot.reason, sizeof(slot.reason));
  text.resize(strnlen(text.data(), text.size()));
  for (char& byte : text) {
    if (byte < ' ' || byte > '~') byte = '?';
  }
  return text;
}

absl::StatusOr<std::optional<Completion>> ReadCompletion(const layout::Job& job,
                                                         const CompletionLimits& limits) {
  // acquire: pairs with the worker's release store; everything else in the slot is visible then.
  if (job.completion.state.load(std::memory_order_acquire) !=
      static_cast<uint32_t>(layout::CompletionState::kDone)) {
    return std::nullopt;
  }
  // Everything behind the state, which alone is atomic.
  layout::CompletionSlot slot;
  constexpr size_t kBegin = sizeof(slot.state);
  std::memcpy(reinterpret_cast<char*>(&slot) + kBegin,
              reinterpret_cast<const char*>(&job.completion) + kBegin, sizeof(slot) - kBegin);
  if (const char* const wrong = WrongSlot(slot, limits))
    return absl::InternalError(absl::StrCat("reported ", wrong));
  return Completion{.failure = slot.failure,
                    .figures = slot.figures,
                    .left_files = slot.left_files != 0,
                    .times = slot.times,
                    .reason = ReadReason(slot),
                    .rank_failure = slot.rank_failure,
                    .left_behind = slot.left_behind,
                    .foreign = slot.foreign,
                    .newer = slot.newer,
                    .newer_step = slot.newer_step};
}

}  // namespace holdfast::writer
