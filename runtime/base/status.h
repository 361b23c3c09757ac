// Turns an errno or a worker's Failure into an absl::Status.
#ifndef HOLDFAST_RUNTIME_BASE_STATUS_H_
#define HOLDFAST_RUNTIME_BASE_STATUS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "holdfast/errors.h"
#include "holdfast/pod.h"
#include "runtime/layout/board.h"

namespace holdfast::base {

/// Payload with the errno as decimal text.
inline constexpr char kErrnoPayload[] = "holdfast/errno";

/// Payload of a time-out, empty.
inline constexpr char kTimeOutPayload[] = "holdfast/time-out";

/// Returns a kDeadlineExceeded for which IsTimeOut is true.
absl::Status TimeOut(absl::string_view message);

/// "OPERATION OBJECT: REASON" with the errno as payload: `ErrnoStatus("open", path, ENOENT)`.
absl::Status ErrnoStatus(absl::string_view operation, absl::string_view object, int error_number);

/// Returns the status code of an errno.
FailureCode CodeOf(int error_number);

using ::holdfast::ErrnoOf;

/// Names for the indices in a Failure.
struct FailureNames {
  std::string checkpoint;
  std::vector<std::string> files;
  std::vector<std::string> tensors;
};
absl::Status ToStatus(const Failure& failure, const FailureNames& names);

/// "rank 3 failed: ...": the failed rank of a save and the reason.
std::string Describe(const layout::RankFailure& failure);

/// Returns the 32 digits of a digest or an attempt, for messages.
std::string Hex(const Digest& digest);
std::string Hex(const AttemptId& attempt);

/// Prefixes a status's message with "OPERATION OBJECT: "; code and payloads stay.
absl::Status Annotate(const absl::Status& status, absl::string_view context);

}  // namespace holdfast::base

#define HOLDFAST_CONCAT_INNER(a, b) a##b
#define HOLDFAST_CONCAT(a, b) HOLDFAST_CONCAT_INNER(a, b)
#define HOLDFAST_RETURN_IF_ERROR(expression)           \
  do {                                                 \
    absl::Status holdfast_status = (expression);       \
    if (!holdfast_status.ok()) return holdfast_status; \
  } while (false)
#define HOLDFAST_ASSIGN_OR_RETURN(lhs, expression) \
  HOLDFAST_ASSIGN_OR_RETURN_INNER(HOLDFAST_CONCAT(holdfast_or_, __LINE__), lhs, expression)
#define HOLDFAST_ASSIGN_OR_RETURN_INNER(variable, lhs, expression) \
  auto variable = (expression);                                    \
  if (!variable.ok()) return std::move(variable).status();         \
  lhs = std::move(variable).value()

#endif  // HOLDFAST_RUNTIME_BASE_STATUS_H_
