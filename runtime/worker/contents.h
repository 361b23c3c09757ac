// What a directory holds: nothing, one checkpoint of Holdfast's, or entries of others. Decides what
// a save may take the place of and what a removal may remove.
#ifndef HOLDFAST_RUNTIME_WORKER_CONTENTS_H_
#define HOLDFAST_RUNTIME_WORKER_CONTENTS_H_

#include <cstdint>

#include "holdfast/pod.h"

namespace holdfast::worker {

struct Contents {
  int error_number = 0;            ///< Not 0: the directory could not be read; nothing is known.
  bool empty = true;               ///< It has no entry at all.
  char manifest[kNameBytes] = {};  ///< Of its lowest rank; empty: it has none.
  bool whole = false;              ///< The manifests of all ranks that its name tells of are there.
  AttemptId attempt;               ///< Of that manifest; zero if it does not tell.
  uint64_t step = 0;               ///< Of that manifest.
  /// An entry that is no rank manifest, no commit record, no file that a manifest names, no
  /// temporary file of these and no rank board. Empty: there is none.
  char foreign[kNameBytes] = {};
};

/// Reads the manifests of an open directory and holds its entries against them. No manifest is
/// verified: a file that a damaged manifest does not name is foreign. `buffer` has
/// kDirectoryBufferBytes; more memory is mapped as the manifests need and given back.
Contents LookInto(int directory, char* buffer);

/// "rank-*.manifest.json"
bool IsManifestName(const char* name);

/// A rank manifest, or the commit record, which speaks for them.
bool IsCommitFile(const char* name);

/// Whether a directory that is to be removed must be kept: it is `whole`, was committed, and holds
/// an entry of others. Without a manifest its files cannot be told from others': an attempt wrote
/// no manifest yet, or a removal, which looked first, removed it. In a directory whose name says
/// that its attempt never committed all files are that attempt's.
bool MustKeep(const Contents& contents, const char* directory_name);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_CONTENTS_H_
