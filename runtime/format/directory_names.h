// The names of directories before a checkpoint's commit and after its retirement.
#ifndef HOLDFAST_RUNTIME_FORMAT_DIRECTORY_NAMES_H_
#define HOLDFAST_RUNTIME_FORMAT_DIRECTORY_NAMES_H_

#include <string>

#include "absl/strings/string_view.h"
#include "holdfast/pod.h"

namespace holdfast::format {

/// The kind of a directory by its name alone: CHECKPOINT, or CHECKPOINT.KIND-<32 hex digits>. The
/// name of a directory to be removed begins with a dot, so listings pass over it; names of earlier
/// versions lack the dot.
enum class DirectoryKind {
  kFinal,  ///< Any other name: a checkpoint if it is complete.
  /// Being written by the attempt in the name. Between an exchange and the following rename, the
  /// replaced directory.
  kPartial,
  kFenced,   ///< Taken from an orphan worker; never promoted.
  kRetired,  ///< A checkpoint that a save replaced or retention removed; never promoted.
};

struct DirectoryName {
  std::string checkpoint;  ///< The name without dot, kind and digits.
  DirectoryKind kind = DirectoryKind::kFinal;
  AttemptId attempt;  ///< From the digits; zero for kFinal.
};

/// Never fails: a name without a known kind and exactly 32 lower-case hex digits is kFinal.
DirectoryName ParseDirectoryName(absl::string_view name);

/// True for a directory that is no checkpoint by its name, however complete its files: partial,
/// fenced or retired.
bool IsUncommittedName(absl::string_view name);

/// The inverse of ParseDirectoryName. A name too long for the dot lacks the dot.
std::string FormatDirectoryName(const DirectoryName& name);

/// Returns the series of a checkpoint: its name with the last run of digits replaced. "step-80" and
/// "step-100" are of "step-{}". A name without digits is its own series.
std::string SeriesOf(absl::string_view checkpoint);

/// "step-7.partial-<attempt>"
std::string PartialName(absl::string_view checkpoint, const AttemptId& attempt);

}  // namespace holdfast::format

#endif  // HOLDFAST_RUNTIME_FORMAT_DIRECTORY_NAMES_H_
