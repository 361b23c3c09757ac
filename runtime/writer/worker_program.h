// Where the spawned helper program, holdfast-worker, is.
#ifndef HOLDFAST_RUNTIME_WRITER_WORKER_PROGRAM_H_
#define HOLDFAST_RUNTIME_WRITER_WORKER_PROGRAM_H_

#include <string>

#include "absl/status/statusor.h"

namespace holdfast::writer {

/// Returns the path of holdfast-worker, the first of these that exists:
///   1. `option` (CheckpointerOptions::worker_program), if it is not empty;
///   2. $HOLDFAST_WORKER, if it is set and not empty;
///   3. beside the running executable: a build tree, or a program that ships its own;
///   4. ../libexec/holdfast beside it: an installed program, also after a move of the installation;
///   5. where this library was built to be installed.
/// The user sets the first two: if one is set and is not an executable file, the call fails without
/// a look at further places.
/// \error kNotFound naming every path that was tried, with the reason of its refusal.
absl::StatusOr<std::string> FindWorkerProgram(const std::string& option);

}  // namespace holdfast::writer

#endif  // HOLDFAST_RUNTIME_WRITER_WORKER_PROGRAM_H_
