// Mistakes on purpose, for tests that prove that they can fail. Defined only in builds with
// HOLDFAST_PLANTED_BUGS, which no library that is installed has.
#ifndef HOLDFAST_RUNTIME_WORKER_PLANTED_BUGS_H_
#define HOLDFAST_RUNTIME_WORKER_PLANTED_BUGS_H_

namespace holdfast::worker::testing {
/// Releases an extent's bytes when its write is submitted, rather than after its completion and its
/// re-digest.
extern bool g_acknowledge_at_submit;
}  // namespace holdfast::worker::testing

#endif  // HOLDFAST_RUNTIME_WORKER_PLANTED_BUGS_H_
