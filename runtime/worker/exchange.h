// The replacement of a checkpoint: the renames, and the lock that orders them. The worker replaces
// at the commit; a recovery finishes an interrupted replacement.
#ifndef HOLDFAST_RUNTIME_WORKER_EXCHANGE_H_
#define HOLDFAST_RUNTIME_WORKER_EXCHANGE_H_

#include "holdfast/pod.h"

namespace holdfast::worker {

/// Locks a checkpoint's lowest manifest. The lock is the right to replace the checkpoint: no other
/// save can come between a look and its rename. Returns false when another save holds the lock. On
/// a file system without locks the look alone decides. The caller closes `*lock` unless it is
/// negative.
bool LockManifest(int directory, const char* name, int* lock);

/// Renames `partial` to `target`, both below `parent`. Retires the checkpoint of attempt `replaced`
/// that stood at `target`; `*old` is its new name. Returns 0, or an errno with `target` unchanged.
/// Durable with the next fsync of `parent`.
int Exchange(int parent, const char* partial, const char* target, const AttemptId& replaced,
             char (&old)[kNameBytes]);

/// Renames the entry at `*name` before its removal to ".CHECKPOINT.retired-<attempt>", so that no
/// listing shows the entry. On failure the entry keeps its name.
void Hide(int parent, const char* checkpoint, const AttemptId& attempt, char (&name)[kNameBytes]);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_EXCHANGE_H_
