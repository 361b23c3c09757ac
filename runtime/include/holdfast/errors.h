// Data of a status beside code and message.
#ifndef HOLDFAST_ERRORS_H_
#define HOLDFAST_ERRORS_H_

#include "absl/status/status.h"

namespace holdfast {

/// Returns the errno of the failed system call, 0 where no system call failed. The payload
/// "holdfast/errno" holds the same number as decimal text.
int ErrnoOf(const absl::Status& status);

/// Returns true for the kDeadlineExceeded of a call whose own time-out has passed: the object of
/// the wait goes on. False for the error of an operation that had a deadline.
bool IsTimeOut(const absl::Status& status);

}  // namespace holdfast

#endif  // HOLDFAST_ERRORS_H_
