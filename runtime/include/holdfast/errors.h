// What a status of this library carries beside its code and message.
#ifndef HOLDFAST_ERRORS_H_
#define HOLDFAST_ERRORS_H_

#include "absl/status/status.h"

namespace holdfast {

/// The errno of the system call that failed, 0 when none did. It is the status's payload
/// "holdfast/errno", as decimal text.
int ErrnoOf(const absl::Status& status);

}  // namespace holdfast

#endif  // HOLDFAST_ERRORS_H_
