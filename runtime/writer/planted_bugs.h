// The trainer side's planted bugs: there only in the archive that tests link to see themselves turn
// red.
#ifndef HOLDFAST_RUNTIME_WRITER_PLANTED_BUGS_H_
#define HOLDFAST_RUNTIME_WRITER_PLANTED_BUGS_H_

#ifdef HOLDFAST_PLANTED_BUGS
namespace holdfast::writer::testing {

/// Memory is given back as soon as the worker was told to write it, as a framework's allocator does
/// that knows nothing of the writer process.
extern bool release_at_submit;

/// The end of a worker's process counts as the end of its transfers.
extern bool trust_the_pidfd;

/// The call returns while other threads still copy the caller's tensors.
extern bool return_while_copying;

}  // namespace holdfast::writer::testing
#endif

#endif  // HOLDFAST_RUNTIME_WRITER_PLANTED_BUGS_H_
