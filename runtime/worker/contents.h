// What a directory holds: nothing, one checkpoint of Holdfast's, or entries of others. Decides what
// a save may take the place of and what a removal may remove.
#ifndef HOLDFAST_RUNTIME_WORKER_CONTENTS_H_
#define HOLDFAST_RUNTIME_WORKER_CONTENTS_H_

#include <cstddef>
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
  /// temporary file of these and no rank board; a directory before any other. Empty: there is none.
  char foreign[kNameBytes] = {};
  bool holds_directory = false;  ///< `foreign` is one.
};

/// The files that the manifests of a directory name. Memory is mapped as the manifests need.
class Inventory {
 public:
  Inventory() = default;
  ~Inventory();
  Inventory(const Inventory&) = delete;
  Inventory& operator=(const Inventory&) = delete;

  /// Reads all manifests, once; what they say goes to `contents`. Returns 0 or an errno.
  int Read(int directory, char* buffer, Contents* contents);

  /// Whether an entry of this name is Holdfast's: a manifest, a commit record, a rank board, a file
  /// that a manifest names, or a temporary file of these.
  bool Holds(const char* name) const;

 private:
  int Map(int directory, char* buffer, Contents* contents);
  int ReadOne(int directory, const char* name, Contents* contents);
  void AddNames(const char* at, const char* end);

  void* memory_ = nullptr;
  uint64_t memory_bytes_ = 0;
  uint64_t* keys_ = nullptr;
  uint64_t key_count_ = 0;
  uint64_t keys_max_ = 0;
  uint64_t count_ = 0;
  char* text_ = nullptr;
  uint64_t text_max_ = 0;
};

/// Reads the manifests of an open directory into a new inventory, and holds its entries against
/// them. No manifest is verified: a file that a damaged manifest does not name is foreign. `buffer`
/// has kDirectoryBufferBytes.
Contents LookInto(int directory, char* buffer, Inventory* inventory);
Contents LookInto(int directory, char* buffer);

/// "rank-*.manifest.json"
bool IsManifestName(const char* name);

/// A rank manifest, or the commit record, which speaks for them.
bool IsCommitFile(const char* name);

/// Whether a directory that is to be removed must be kept: it is `whole`, was committed, and holds
/// an entry of others. In a directory whose name says that its attempt never committed all files
/// are that attempt's.
bool MustKeep(const Contents& contents, const char* directory_name);

/// The length of the checkpoint's name in the name of a directory that holds what was committed and
/// lacks its retired name: it was exchanged for its successor, or retired by an earlier version. 0:
/// it is no such directory.
size_t CommittedBytes(const Contents& contents, const char* directory_name);

/// Whether a name is of the form ".CHECKPOINT.retired-<attempt>".
bool IsRetiredName(const char* directory_name);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_CONTENTS_H_
