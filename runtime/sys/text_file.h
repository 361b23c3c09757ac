// Small text files of the kernel: /proc, and the files of control groups. Below the fork line.
#ifndef HOLDFAST_RUNTIME_SYS_TEXT_FILE_H_
#define HOLDFAST_RUNTIME_SYS_TEXT_FILE_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace holdfast::sys {

/// Reads the file at `path` into `out`, at most `bytes` - 1 bytes, and terminates the text. Returns
/// its length, or -1 with errno.
ssize_t ReadTextFile(const char* path, char* out, size_t bytes);

/// Returns the text behind the blanks of a line "KEY value" or "KEY: value"; null if none has the
/// key.
const char* FindField(const char* text, const char* key);

/// Returns the number of a line "KEY: value kB" or "KEY value", in bytes; `fallback` if none has
/// the key or its value is no number.
uint64_t FindBytes(const char* text, const char* key, uint64_t fallback = 0);

}  // namespace holdfast::sys

#endif  // HOLDFAST_RUNTIME_SYS_TEXT_FILE_H_
