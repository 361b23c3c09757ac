#include "runtime/sys/text_file.h"

#include <fcntl.h>

#include <cerrno>
#include <cstring>

#include "runtime/sys/assert.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/retry.h"
#include "runtime/sys/system.h"

namespace holdfast::sys {

ssize_t ReadTextFile(const char* path, char* out, size_t bytes) {
  HOLDFAST_ASSERT(bytes > 0);
  out[0] = '\0';
  const int fd = OpenOwned(AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) return -1;
  size_t length = 0;
  ssize_t got = 0;
  while (length + 1 < bytes) {
    got = Uninterrupted([&] { return Sys().read(fd, out + length, bytes - 1 - length); });
    if (got <= 0) break;
    length += static_cast<size_t>(got);
  }
  const int error = errno;
  (void)CloseOwned(fd);  // Read only: no data can be lost.
  out[length] = '\0';
  errno = error;
  return got < 0 ? -1 : static_cast<ssize_t>(length);
}

const char* FindField(const char* text, const char* key) {
  const size_t length = strlen(key);
  for (const char* line = text; line != nullptr && *line != '\0';) {
    const char* value = line + length;
    if (strncmp(line, key, length) == 0 && (*value == ':' || *value == ' ')) {
      while (*value == ':' || *value == ' ' || *value == '\t') ++value;
      return value;
    }
    line = strchr(line, '\n');
    if (line != nullptr) ++line;
  }
  return nullptr;
}

uint64_t FindBytes(const char* text, const char* key, uint64_t fallback) {
  const char* at = FindField(text, key);
  if (at == nullptr || *at < '0' || *at > '9') return fallback;
  uint64_t value = 0;
  while (*at >= '0' && *at <= '9') value = value * 10 + static_cast<uint64_t>(*at++ - '0');
  return strncmp(at, " kB", 3) == 0 ? value * 1024 : value;
}

}  // namespace holdfast::sys
