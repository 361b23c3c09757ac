// Mistakes on purpose, for tests that prove that they can fail. Defined only in builds with
// HOLDFAST_PLANTED_BUGS, which no library that is installed has.
#ifndef HOLDFAST_RUNTIME_WORKER_PLANTED_BUGS_H_
#define HOLDFAST_RUNTIME_WORKER_PLANTED_BUGS_H_

namespace holdfast::worker::testing {
/// Releases an extent's bytes when its write is submitted, rather than after its completion and its
/// re-digest.
extern bool g_acknowledge_at_submit;
/// A transfer that was submitted is not counted as one of its file's.
extern bool g_forget_transfer;
/// A rank that fails does not say so on the board.
extern bool g_leave_ranks_silently;
/// Rank 0 does not look whether its directory was taken away.
extern bool g_never_look_at_place;
/// A rank without a sign of life is waited for on.
extern bool g_never_miss_a_rank;
/// A removal takes files that no manifest names.
extern bool g_remove_unnamed_files;
}  // namespace holdfast::worker::testing

#endif  // HOLDFAST_RUNTIME_WORKER_PLANTED_BUGS_H_
