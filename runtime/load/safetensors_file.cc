#include "runtime/load/safetensors_file.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/digest/digest.h"
#include "runtime/directory/entries.h"
#include "runtime/sys/system.h"

namespace holdfast::load {

std::string SafetensorsFile::attempt() const {
  for (const auto& [key, value] : header.metadata) {
    if (key == format::kAttemptKey) return value;
  }
  return "";
}

std::optional<AttemptId> SafetensorsFile::attempt_id() const {
  const std::string text = attempt();
  AttemptId id;
  if (text.size() != digest::kHexDigits || !digest::FromHex(text.data(), &id)) return std::nullopt;
  return id;
}

absl::StatusOr<SafetensorsFile> ReadSafetensorsFile(int fd, const std::string& name) {
  struct stat status = {};
  if (sys::Sys().fstat(fd, &status) != 0) return base::ErrnoStatus("stat", name, errno);
  SafetensorsFile file;
  file.bytes = static_cast<uint64_t>(status.st_size);
  constexpr uint64_t kLengthBytes = 8;
  HOLDFAST_ASSIGN_OR_RETURN(const std::string first,
                            directory::ReadRange(fd, name, 0, std::min(file.bytes, kLengthBytes)));
  const auto length = format::HeaderLength(first, file.bytes);
  if (!length.ok()) return base::Annotate(length.status(), name);
  HOLDFAST_ASSIGN_OR_RETURN(const std::string prefix,
                            directory::ReadRange(fd, name, 0, kLengthBytes + *length));
  auto header = format::ParseSafetensors(prefix, file.bytes);
  if (!header.ok()) return base::Annotate(header.status(), name);
  file.header = *std::move(header);
  return file;
}

}  // namespace holdfast::load
