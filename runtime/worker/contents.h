// The contents of a directory: nothing, a checkpoint of Holdfast, or foreign entries. Decides about
// replacement of a directory and removal of its entries.
#ifndef HOLDFAST_RUNTIME_WORKER_CONTENTS_H_
#define HOLDFAST_RUNTIME_WORKER_CONTENTS_H_

#include <cstddef>
#include <cstdint>

#include "holdfast/pod.h"

namespace holdfast::worker {

struct Contents {
  int error_number = 0;            ///< Not 0: the directory could not be read; nothing is known.
  bool empty = true;               ///< The directory has no entry.
  char manifest[kNameBytes] = {};  ///< Of the lowest rank; empty: no manifest.
  bool whole = false;              ///< The manifests of all ranks of the name are present.
  AttemptId attempt;               ///< Of `manifest`; zero if absent there.
  uint64_t step = 0;               ///< Of `manifest`.
  /// Any entry except rank manifests, commit record, files of a manifest, temporary files of these,
  /// and rank board. A directory is preferred to other entries. Empty: no foreign entry.
  char foreign[kNameBytes] = {};
  bool holds_directory = false;  ///< `foreign` is a directory.
};

/// The files that the manifests of a directory name. Memory is mapped as the manifests need.
class Inventory {
 public:
  Inventory() = default;
  ~Inventory();
  Inventory(const Inventory&) = delete;
  Inventory& operator=(const Inventory&) = delete;

  /// Reads all manifests, once, and fills `contents`. Returns 0 or an errno.
  int Read(int directory, char* buffer, Contents* contents);

  /// Returns true when an entry of this name is Holdfast's: a manifest, a commit record, a rank
  /// board, a file of a manifest, or a temporary file of these.
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

/// Reads the manifests of an open directory into a new inventory and compares the entries with
/// them. Verifies no manifest: a file that a damaged manifest does not name is foreign. `buffer`
/// has kDirectoryBufferBytes.
Contents LookInto(int directory, char* buffer, Inventory* inventory);
Contents LookInto(int directory, char* buffer);

/// Returns true for a name that Holdfast gives to a rank manifest in its own directories, spelled
/// exactly so: "rank-RRRRR-of-WWWWW.manifest.json". Any other spelling is a foreign file.
bool IsManifestName(const char* name);

/// Returns true for a rank manifest or the commit record.
bool IsCommitFile(const char* name);

/// The temporary name of the commit record.
inline constexpr char kMarkName[] = "holdfast.commit.json.tmp";

/// Returns true for the entries that mark a directory as a save's from its first file to its last:
/// the commit record's temporary file (made empty by rank 0's worker) and the rank board. A
/// recovery removes no directory with files and without a mark, a record or a manifest.
bool IsMark(const char* name);

/// Returns true for a mark, a rank manifest or the commit record, or a temporary file of these.
bool IsProof(const char* name);

/// Returns true when the directory holds at most marks. `buffer` has kDirectoryBufferBytes.
bool HoldsOnlyMarks(int directory, char* buffer);

/// Returns true when a removal must keep the directory: the directory is `whole`, was committed,
/// and holds a foreign entry. A directory named as never committed holds only files of its attempt.
bool MustKeep(const Contents& contents, const char* directory_name);

/// Returns the length of the checkpoint's name within `name`, for a committed directory without its
/// retired name: exchanged for a successor, or retired by an earlier version. Returns 0 for other
/// directories.
size_t CommittedBytes(const Contents& contents, const char* directory_name);

/// Between CHECKPOINT and <attempt> in the name of a retired checkpoint.
constexpr char kRetired[] = ".retired-";

/// Whether a name is of the form ".CHECKPOINT.retired-<attempt>".
bool IsRetiredName(const char* directory_name);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_CONTENTS_H_
