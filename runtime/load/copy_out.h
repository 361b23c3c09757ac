// The sink of a load: proves the bytes of a read, then copies them to their targets.
#ifndef HOLDFAST_RUNTIME_LOAD_COPY_OUT_H_
#define HOLDFAST_RUNTIME_LOAD_COPY_OUT_H_

#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "holdfast/load.h"
#include "runtime/base/mutex.h"
#include "runtime/load/chunk_stream.h"
#include "runtime/load/tensor_reads.h"

namespace holdfast::load {

/// kAborted for a directory or file that another has replaced.
absl::Status ReplacedSince(absl::string_view path);

/// \threadsafety Sink() may be called from any thread.
class CopyOut {
 public:
  /// All views must outlive the object. `paths` are the files' names for messages.
  CopyOut(const ReadPlan& plan, bool verify, absl::Span<const TensorTarget> targets,
          const std::vector<std::string>& paths)
      : plan_(plan), verify_(verify), targets_(targets), paths_(paths) {}

  StreamVerdict Sink(const StreamBlock& block) ABSL_LOCKS_EXCLUDED(mutex_);

  /// The first error.
  absl::Status status() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Outcome {
    absl::Status status;
    bool copy_in_flight = false;
  };
  Outcome Look(const StreamBlock& block) const;
  absl::Status Prove(const StreamBlock& block, const TensorRead& read) const;
  Outcome Copy(const StreamBlock& block, const TensorRead& read) const;
  absl::Status ReadError(const StreamBlock& block) const;

  const ReadPlan& plan_;
  const bool verify_;
  const absl::Span<const TensorTarget> targets_;
  const std::vector<std::string>& paths_;
  mutable base::Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace holdfast::load

#endif  // HOLDFAST_RUNTIME_LOAD_COPY_OUT_H_
