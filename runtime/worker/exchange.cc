#include "runtime/worker/exchange.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>

#include <cerrno>
#include <cstring>

#include "runtime/digest/digest.h"
#include "runtime/sys/assert.h"
#include "runtime/sys/errno_code.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/retry.h"
#include "runtime/sys/system.h"
#include "runtime/worker/contents.h"

namespace holdfast::worker {
namespace {

constexpr size_t kRetiredBytes = sizeof(kRetired) - 1;

int Rename(int parent, const char* from, const char* to, unsigned flags) {
  return sys::Sys().renameat2(parent, from, parent, to, flags) == 0 ? 0 : errno;
}

void CopyName(const char* name, char (&out)[kNameBytes]) {
  memset(out, 0, sizeof(out));
  memcpy(out, name, strnlen(name, sizeof(out) - 1));
}

/// Forms the name for an old checkpoint where directories cannot be exchanged: a partial directory
/// of no attempt. A recovery keeps such a directory until its successor stands.
void AsideName(const char* partial, char (&out)[kNameBytes]) {
  CopyName(partial, out);
  HOLDFAST_ASSERT(out[0] != '\0');
  char* const last = out + strlen(out) - 1;
  *last = *last == '0' ? '1' : '0';
}

}  // namespace

bool LockManifest(int directory, const char* name, int* lock) {
  HOLDFAST_ASSERT(directory >= 0 && strchr(name, '/') == nullptr);
  *lock = sys::OpenOwned(directory, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC, 0);
  if (*lock < 0) return true;
  return sys::Uninterrupted([&] { return sys::Sys().flock(*lock, LOCK_EX | LOCK_NB); }) == 0 ||
         errno != EWOULDBLOCK;
}

int Exchange(int parent, const char* partial, const char* target, const AttemptId& replaced,
             char (&old)[kNameBytes]) {
  HOLDFAST_ASSERT(parent >= 0 && strcmp(partial, target) != 0);
  CopyName(partial, old);
  // At every moment one complete checkpoint stands under the name.
  int error = Rename(parent, partial, target, RENAME_EXCHANGE);
  if (sys::LacksRenameFlag(error)) {
    AsideName(partial, old);
    error = Rename(parent, target, old, 0);
    if (error != 0) return error;
    // A crash here leaves the name empty and the new checkpoint complete: a recovery promotes it.
    error = Rename(parent, partial, target, 0);
    if (error != 0) Rename(parent, old, target, 0);
  }
  // After the rename: a recovery removes retired directories without a look at the name.
  if (error == 0) Hide(parent, target, replaced, old);
  return error;
}

void Hide(int parent, const char* checkpoint, const AttemptId& attempt, char (&name)[kNameBytes]) {
  const size_t length = strnlen(checkpoint, kNameBytes);
  HOLDFAST_ASSERT(length > 0 && strcmp(checkpoint, name) != 0);
  if (1 + length + kRetiredBytes + digest::kHexDigits >= kNameBytes) return;
  char hidden[kNameBytes] = ".";
  char* at = hidden + 1;
  memcpy(at, checkpoint, length);
  memcpy(at += length, kRetired, kRetiredBytes);
  digest::ToHex(attempt, at + kRetiredBytes);
  // A plain rename refuses the name of a directory that is not empty.
  if (Rename(parent, name, hidden, 0) == 0) memcpy(name, hidden, sizeof(hidden));
}

}  // namespace holdfast::worker
