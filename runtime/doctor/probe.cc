// The findings of holdfast-doctor: every feature is tested, version numbers are ignored.
#include "holdfast/probe.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "holdfast/device.h"
#include "io_uring/queue.h"
#include "runtime/base/status.h"
#include "runtime/digest/digest.h"
#include "runtime/directory/entries.h"
#include "runtime/directory/file_system.h"
#include "runtime/doctor/advice.h"
#include "runtime/doctor/directory_probe.h"
#include "runtime/doctor/speed_probe.h"
#include "runtime/staging/arena.h"
#include "runtime/sys/system.h"
#include "runtime/writer/worker_program.h"

namespace holdfast {
namespace doctor {

namespace {

// Larger than most last-level caches' share of a core, small enough for any training machine.
constexpr uint64_t kArenaBytes = uint64_t{64} << 20;
constexpr int kGpusMax = 64;

/// Creates the arena on the rung that saves would get. Returns null with the reason in the report.
std::unique_ptr<staging::Arena> TryPages(ProbeReport* report) {
  report->base_page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  auto arena = staging::Arena::Create({.bytes = kArenaBytes});
  if (!arena.ok()) {
    report->pages_reason = std::string(arena.status().message());
    return nullptr;
  }
  report->pages = (*arena)->pages();
  report->pages_reason = (*arena)->reason();
  report->page_bytes = (*arena)->page_bytes();
  return *std::move(arena);
}

/// Creates the queue on the rung that a spawned worker would get.
std::unique_ptr<io::Queue> TryEngine(const staging::Arena* arena, ProbeReport* report) {
  auto queue = std::make_unique<io::Queue>();
  io::QueueOptions options;
  if (arena != nullptr) {
    options.region = arena->base();
    options.region_bytes = arena->bytes();
    // On small pages registration costs a spawned worker more than it saves.
    options.may_register = arena->page_bytes() > report->base_page_bytes;
  }
  const int failed = queue->Open(options);
  report->engine_reason = queue->reason();
  if (failed != 0) {
    if (report->engine_reason.empty()) {
      report->engine_reason = std::string(base::ErrnoStatus("open", "engine", failed).message());
    }
    return nullptr;
  }
  report->engine = queue->rung();
  return queue;
}

void AskLimits(ProbeReport* report) {
  struct rlimit limit = {};
  if (sys::Sys().getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return;
  report->memlock_bytes =
      limit.rlim_cur == RLIM_INFINITY ? UINT64_MAX : static_cast<uint64_t>(limit.rlim_cur);
}

void FindGpus(ProbeReport* report) {
  for (const auto find : {&CudaDevice, &HipDevice}) {
    for (int ordinal = 0; ordinal < kGpusMax; ++ordinal) {
      const absl::StatusOr<Device*> device = find(ordinal);
      if (!device.ok()) break;
      report->gpus.push_back((*device)->name());
    }
  }
}

}  // namespace
}  // namespace doctor

absl::StatusOr<ProbeReport> Probe(const std::string& directory, const ProbeOptions& options) {
  using namespace doctor;
  auto parent = directory::OpenDirectory(AT_FDCWD, absl::StrCat(directory, "/."));
  if (absl::IsNotFound(parent.status())) {
    return absl::NotFoundError(absl::StrCat(
        "probe ", directory, ": there is no such directory; make it, or name the one above"));
  }
  if (!parent.ok()) return base::Annotate(parent.status(), absl::StrCat("probe ", directory));
  HOLDFAST_ASSIGN_OR_RETURN(const directory::FileSystem file_system,
                            directory::IdentifyFileSystem(parent->get()));
  ProbeReport report;
  report.directory = directory;
  report.file_system = file_system.name;
  report.free_bytes = file_system.free_bytes;
  auto scratch = ScratchDirectory::Make(parent->get());
  if (!scratch.ok()) return base::Annotate(scratch.status(), absl::StrCat("probe ", directory));
  HOLDFAST_RETURN_IF_ERROR(TryDirectory(scratch->fd(), &report));

  const std::unique_ptr<staging::Arena> arena = TryPages(&report);
  const std::unique_ptr<io::Queue> queue = TryEngine(arena.get(), &report);
  AskLimits(&report);
  const absl::StatusOr<std::string> program = writer::FindWorkerProgram("");
  report.worker_program_found = program.ok();
  if (program.ok()) report.worker_program = *program;
  report.digest_unit = digest::VectorUnit();
  FindGpus(&report);
  if (options.speed_probe > absl::ZeroDuration() && arena != nullptr && queue != nullptr) {
    HOLDFAST_RETURN_IF_ERROR(
        MeasureSpeeds(scratch->fd(), queue.get(), *arena, options.speed_probe, &report));
  }
  report.advice = Advise(report, file_system.local, std::string(program.status().message()));
  return report;
}

}  // namespace holdfast
