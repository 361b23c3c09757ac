// The trainer side's planted bugs. Only the archive for tests has them, so that tests see
// themselves fail.
#ifndef HOLDFAST_RUNTIME_WRITER_PLANTED_BUGS_H_
#define HOLDFAST_RUNTIME_WRITER_PLANTED_BUGS_H_

#ifdef HOLDFAST_PLANTED_BUGS
namespace holdfast::writer::testing {

/// Releases memory when the worker was asked to write it, as a framework's allocator does without
/// regard to the writer process.
extern bool release_at_submit;

/// Takes the end of a worker's process for the end of its transfers.
extern bool trust_the_pidfd;

/// Returns from the call while other threads still copy the caller's tensors.
extern bool return_while_copying;

}  // namespace holdfast::writer::testing
#endif

#endif  // HOLDFAST_RUNTIME_WRITER_PLANTED_BUGS_H_
