// Deliberate bugs, for tests of the tests. Defined only in builds with HOLDFAST_PLANTED_BUGS, never
// in an installed library.
#ifndef HOLDFAST_RUNTIME_WORKER_PLANTED_BUGS_H_
#define HOLDFAST_RUNTIME_WORKER_PLANTED_BUGS_H_

namespace holdfast::worker::testing {
/// Releases an extent's bytes when the write is submitted, instead of after its completion and
/// re-digest.
extern bool g_acknowledge_at_submit;
/// Written extents are not digested again.
extern bool g_never_redigest;
/// Leaves a submitted transfer out of its file's count.
extern bool g_forget_transfer;
/// The ring does not hold the save's lock.
extern bool g_lock_ends_with_process;
/// A failing rank does not publish its failure on the board.
extern bool g_leave_ranks_silently;
/// Rank 0 does not check that its directory is still in place.
extern bool g_never_look_at_place;
/// A rank without a sign of life is waited for on.
extern bool g_never_miss_a_rank;
/// Rank 0 commits without a comparison of the other ranks' replicated files with its own.
extern bool g_never_compare_replicas;
/// A removal takes files that no manifest names.
extern bool g_remove_unnamed_files;
/// A removal relies on an exchange of names that is not durable.
extern bool g_remove_before_parent_sync;
/// The limit of the byte rate counts as none.
extern bool g_ignore_byte_rate;
/// The final name is reported, and the old checkpoint given up, before the name is durable.
extern bool g_retire_before_fsync;
/// Rank 0 commits before the names of the other ranks' manifests are durable.
extern bool g_commit_before_manifests;
/// A single file takes the final name before the manifest of the file does.
extern bool g_name_manifest_late;
}  // namespace holdfast::worker::testing

#endif  // HOLDFAST_RUNTIME_WORKER_PLANTED_BUGS_H_
