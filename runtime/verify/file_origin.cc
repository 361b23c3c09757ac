#include "runtime/verify/file_origin.h"

#include <sys/stat.h>

#include <cerrno>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "runtime/base/status.h"
#include "runtime/directory/entries.h"
#include "runtime/load/safetensors_file.h"
#include "runtime/sys/system.h"
#include "runtime/verify/zip_archives.h"

namespace holdfast::verify {
namespace {

// Torch's id of a file, in which such a save writes its attempt: both halves, decimal.
constexpr absl::string_view kIdRecord = "/.data/serialization_id";
constexpr size_t kHalfDigits = 20;

}  // namespace

absl::StatusOr<directory::FileOrigin> OriginOf(int directory, const std::string& name) {
  directory::FileOrigin origin;
  HOLDFAST_ASSIGN_OR_RETURN(const base::UniqueFd fd,
                            directory::OpenFile(directory, name, /*follow_symlink=*/false));
  struct stat status = {};
  if (sys::Sys().fstat(fd.get(), &status) != 0) return base::ErrnoStatus("stat", name, errno);
  HOLDFAST_ASSIGN_OR_RETURN(const ZipArchives archives,
                            FindZipArchives(fd.get(), name, static_cast<uint64_t>(status.st_size)));
  if (archives.archives == 0) {
    const auto file = load::ReadSafetensorsFile(fd.get(), name);
    if (file.ok()) origin.attempt = file->attempt_id();
    return origin;
  }
  origin.certain = archives.archives == 1 && archives.gaps.empty();
  for (const format::ZipRecord& record : archives.records) {
    if (!absl::EndsWith(record.name, kIdRecord) || record.bytes != 2 * kHalfDigits) continue;
    HOLDFAST_ASSIGN_OR_RETURN(const std::string text,
                              directory::ReadRange(fd.get(), name, record.begin, record.bytes));
    AttemptId attempt;
    if (absl::SimpleAtoi(text.substr(0, kHalfDigits), &attempt.high) &&
        absl::SimpleAtoi(text.substr(kHalfDigits), &attempt.low)) {
      origin.attempt = attempt;
    }
  }
  return origin;
}

}  // namespace holdfast::verify
