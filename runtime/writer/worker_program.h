// Where the spawned helper program, holdfast-worker, is.
#ifndef HOLDFAST_RUNTIME_WRITER_WORKER_PROGRAM_H_
#define HOLDFAST_RUNTIME_WRITER_WORKER_PROGRAM_H_

#include <string>

#include "absl/status/statusor.h"

namespace holdfast::writer {

/// The path of holdfast-worker. The first of these that is there:
///   1. `option` (CheckpointerOptions::worker_program), if it is not empty;
///   2. $HOLDFAST_WORKER, if it is set and not empty;
///   3. beside the running executable: a build tree, or a program that ships its own;
///   4. ../libexec/holdfast beside it: an installed program, wherever the installation was moved;
///   5. where this library was built to be installed.
/// The first two are somebody's wish: if one is given and is not an executable file, that is the
/// error, and no other place is tried.
/// \error kNotFound naming every path that was tried and why it is not it.
absl::StatusOr<std::string> FindWorkerProgram(const std::string& option);

}  // namespace holdfast::writer

#endif  // HOLDFAST_RUNTIME_WRITER_WORKER_PROGRAM_H_
