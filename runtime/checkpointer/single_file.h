// The trainer's side of a save of one file (SaveRequest::single_file).
#ifndef HOLDFAST_RUNTIME_CHECKPOINTER_SINGLE_FILE_H_
#define HOLDFAST_RUNTIME_CHECKPOINTER_SINGLE_FILE_H_

#include <string>

#include "absl/status/status.h"
#include "holdfast/checkpointer.h"
#include "runtime/writer/save_state.h"

namespace holdfast::checkpointer {

/// True when files are committed one by one into a directory that stays.
inline bool IntoDirectory(const SaveRequest& request) {
  return request.files_only || request.single_file;
}

/// Checks the request for one file.
/// \error kInvalidArgument with the reason.
absl::Status ValidateSingleFile(const SaveRequest& request, const CheckpointerOptions& options);

/// Makes and locks the temporary file.
/// \error as directory::BeginSingleFile.
absl::Status BeginFile(const SaveRequest& request, const AttemptId& attempt, SaveState* save);

/// Returns the name of the file before its commit.
std::string TemporaryName(const SaveRequest& request, const AttemptId& attempt);

/// Removes the companions of a failed save, unless the save has committed. The worker has ended.
void RemoveUncommittedFile(const SaveState& save, const AttemptId& attempt);

/// Returns the outcome after the end of a worker without a result: OK for a committed save,
/// otherwise `outcome`.
absl::Status OutcomeOfFile(const SaveState& save, const absl::Status& outcome);

}  // namespace holdfast::checkpointer

#endif  // HOLDFAST_RUNTIME_CHECKPOINTER_SINGLE_FILE_H_
