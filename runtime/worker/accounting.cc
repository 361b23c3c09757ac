#include "runtime/worker/accounting.h"

#include <time.h>

#include "runtime/layout/launcher.h"
#include "runtime/sys/system.h"
#include "runtime/sys/text_file.h"

namespace holdfast::worker {
namespace {

constexpr size_t kTextBytes = 4096;

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
    if (sys::ReadTextFile("/proc/self/smaps_rollup", text, sizeof(text)) <= 0) return;
    bytes = sys::FindBytes(text, "Private_Clean") + sys::FindBytes(text, "Private_Dirty");
  } else {
    // Everything shared here is the arena, the table and program text. A counter, so its cost
    // does not grow with the arena's page tables, as reading smaps would.
    if (sys::ReadTextFile("/proc/self/status", text, sizeof(text)) <= 0) return;
    bytes = sys::FindBytes(text, "RssAnon");
  }
  uint64_t* const peak = &run->figures.worker_private_bytes_peak;
  if (bytes > *peak) *peak = bytes;
}

}  // namespace holdfast::worker
