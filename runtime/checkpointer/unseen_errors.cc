#include "runtime/checkpointer/unseen_errors.h"

#include <cstddef>

namespace holdfast::checkpointer {
namespace {

// The first errors suffice, so the number is bounded.
constexpr size_t kErrorsMax = 16;

}  // namespace

void UnseenErrors::Keep(const std::shared_ptr<SaveState>& save) {
  const base::MutexLock lock(&mutex_);
  std::erase_if(failed_, [&](const auto& kept) { return kept == save || kept->ErrorWasSeen(); });
  if (failed_.size() < kErrorsMax) failed_.push_back(save);
}

absl::Status UnseenErrors::TakeFirst() {
  absl::Status first;
  const base::MutexLock lock(&mutex_);
  // A save that has not ended yet keeps its error for the next call.
  std::erase_if(failed_, [&first](const auto& save) {
    if (!save->IsDone()) return false;
    const absl::Status error = save->TakeUnseenError();
    if (first.ok()) first = error;
    return true;
  });
  return first;
}

}  // namespace holdfast::checkpointer
