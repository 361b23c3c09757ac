#include "runtime/worker/accounting.h"

#include <fcntl.h>
#include <time.h>

#include "runtime/layout/launcher.h"
#include "runtime/sys/assert.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"

namespace holdfast::worker {
namespace {

constexpr size_t kTextBytes = 4096;

/// Reads a small file of /proc into `out`, terminated. Returns its length; 0 on failure.
size_t ReadText(const char* path, char (&out)[kTextBytes]) {
  const int fd = sys::OpenOwned(AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) return 0;
  size_t length = 0;
  while (length + 1 < kTextBytes) {
    const ssize_t got = sys::Sys().read(fd, out + length, kTextBytes - 1 - length);
    if (got <= 0) break;
    length += static_cast<size_t>(got);
  }
  HOLDFAST_ASSERT(length < kTextBytes);
  sys::CloseOwned(fd);
  out[length] = '\0';
  return length;
}

uint64_t Number(const char** text) {
  while (**text != '\0' && (**text < '0' || **text > '9')) ++*text;
  uint64_t value = 0;
  while (**text >= '0' && **text <= '9')
    value = value * 10 + static_cast<uint64_t>(*(*text)++ - '0');
  return value;
}

/// Returns the value in bytes of a line "KEY:  N kB"; 0 if the line is absent.
uint64_t Field(const char* text, const char* key) {
  for (const char* line = text; *line != '\0';) {
    const char* a = line;
    const char* b = key;
    while (*b != '\0' && *a == *b) ++a, ++b;
    if (*b == '\0' && *a == ':') return Number(&a) * 1024;
    while (*line != '\0' && *line != '\n') ++line;
    if (*line == '\n') ++line;
  }
  return 0;
}

}  // namespace

uint64_t CpuNs(Launcher launcher) {
  timespec time = {};
  const clockid_t clock =
      layout::TraitsOf(launcher).process ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_THREAD_CPUTIME_ID;
  if (sys::Sys().clock_gettime(clock, &time) != 0) return 0;
  return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(time.tv_nsec);
}

void SamplePrivateBytes(JobRun* run) {
  char text[kTextBytes];
  uint64_t bytes = 0;
  const layout::LauncherTraits traits = layout::TraitsOf(run->launcher);
  if (!traits.process) return;
  if (traits.forked()) {
    // Nearly all anonymous pages are shared copy-on-write with the trainer. Only a walk counts the
    // copied pages.
    if (ReadText("/proc/self/smaps_rollup", text) == 0) return;
    bytes = Field(text, "Private_Clean") + Field(text, "Private_Dirty");
  } else {
    // Everything shared here is the arena, the table and program text. A counter, so its cost
    // does not grow with the arena's page tables, as reading smaps would.
    if (ReadText("/proc/self/status", text) == 0) return;
    bytes = Field(text, "RssAnon");
  }
  uint64_t* const peak = &run->figures.worker_private_bytes_peak;
  if (bytes > *peak) *peak = bytes;
}

}  // namespace holdfast::worker
