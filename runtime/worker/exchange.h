// Putting a checkpoint in the place of another: the renames, and the lock that orders them. The
// worker does it at its commit; a recovery finishes what a crash ended.
#ifndef HOLDFAST_RUNTIME_WORKER_EXCHANGE_H_
#define HOLDFAST_RUNTIME_WORKER_EXCHANGE_H_

#include "holdfast/pod.h"

namespace holdfast::worker {

/// A lock on a checkpoint's lowest manifest is the right to replace it, so that no other save comes
/// between a look and its rename. False: another save has it now. Where the file system has no
/// locks, the look alone decides. `*lock` is the caller's to close, if it is not negative.
bool LockManifest(int directory, const char* name, int* lock);

/// Gives `target` to `partial`, both below `parent`. The checkpoint of attempt `replaced` that
/// stands there is retired: `*old` is its new name. Returns 0 or an errno; then `target` is as it
/// was. Durable with the next fsync of `parent`.
int Exchange(int parent, const char* partial, const char* target, const AttemptId& replaced,
             char (&old)[kNameBytes]);

/// Renames what stands at `*name`, to be removed, to ".CHECKPOINT.retired-<attempt>", so that no
/// listing shows it. Where that fails it keeps its name.
void Hide(int parent, const char* checkpoint, const AttemptId& attempt, char (&name)[kNameBytes]);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_EXCHANGE_H_
