// The names that directories of checkpoints carry while they are not checkpoints.
#ifndef HOLDFAST_RUNTIME_FORMAT_DIRECTORY_NAMES_H_
#define HOLDFAST_RUNTIME_FORMAT_DIRECTORY_NAMES_H_

#include <string>

#include "absl/strings/string_view.h"
#include "holdfast/pod.h"

namespace holdfast::format {

/// What a directory is, by its name alone: CHECKPOINT, or CHECKPOINT.KIND-<32 hex digits>. A name
/// of what is only to be removed begins with a dot, so that listings pass over it; names of earlier
/// versions do not.
enum class DirectoryKind {
  kFinal,    ///< Any other name: a checkpoint if it is complete.
  kPartial,  ///< Being written by the attempt in its name; between an exchange and the rename that
             ///< follows, what was replaced.
  kFenced,   ///< Taken away from an orphan worker; never promoted.
  kRetired,  ///< A checkpoint that was replaced, or that retention let go; never promoted.
};

struct DirectoryName {
  std::string checkpoint;  ///< The name without dot, kind and digits.
  DirectoryKind kind = DirectoryKind::kFinal;
  AttemptId attempt;  ///< The digits; none for kFinal.
};

/// Never fails: what does not end in a known kind and exactly 32 lower-case hex digits is kFinal.
DirectoryName ParseDirectoryName(absl::string_view name);

/// Whether a directory of this name is no checkpoint, however whole it looks: still being written,
/// or left so, fenced by a recovery, or let go by retention.
bool IsUncommittedName(absl::string_view name);

/// The inverse of ParseDirectoryName. A name that its dot would make too long has none.
std::string FormatDirectoryName(const DirectoryName& name);

/// The series that a checkpoint belongs to: its name with the last run of digits replaced, so that
/// "step-80" and "step-100" are of "step-{}". A name without digits is a series of its own.
std::string SeriesOf(absl::string_view checkpoint);

/// "step-7.partial-<attempt>"
std::string PartialName(absl::string_view checkpoint, const AttemptId& attempt);

}  // namespace holdfast::format

#endif  // HOLDFAST_RUNTIME_FORMAT_DIRECTORY_NAMES_H_
