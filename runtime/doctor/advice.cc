#include "runtime/doctor/advice.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace holdfast::doctor {
namespace {

constexpr uint64_t kFewFreeBytes = uint64_t{1} << 30;
// The locked memory of a registered arena of the default size.
constexpr uint64_t kMemlockBytes = uint64_t{1} << 30;

bool HugePages(PageRung pages) {
  return pages == PageRung::kHugetlb || pages == PageRung::kTmpfsHuge ||
         pages == PageRung::kMadviseHuge;
}

void AdviseOnWhatFails(const ProbeReport& report, const std::string& worker_why,
                       std::vector<std::string>* advice) {
  if (report.engine == EngineRung::kAuto) {
    advice->push_back(absl::StrCat("No engine works: ", report.engine_reason));
  }
  if (report.pages == PageRung::kAuto) {
    advice->push_back(absl::StrCat("The staging arena cannot be made: ", report.pages_reason));
  }
  if (!report.worker_program_found) {
    advice->push_back(absl::StrCat(
        "The launchers spawn and persistent do not work (", worker_why,
        "): install holdfast-worker beside the program or set HOLDFAST_WORKER to its path."));
  }
  if (report.free_bytes < kFewFreeBytes) {
    advice->push_back(absl::StrCat("Only ", report.free_bytes >> 20, " MiB are free."));
  }
}

void AdviseOnSafety(const ProbeReport& report, bool local, std::vector<std::string>* advice) {
  if (report.file_system == "tmpfs" || report.file_system == "ramfs") {
    advice->push_back("This file system is memory: no checkpoint here survives a reboot.");
  }
  if (!local || !report.lock) {
    advice->push_back(absl::StrCat(
        "Locks on ", report.file_system, local ? " do not work" : " may not reach other machines",
        ", so Recover cannot tell a running save from a dead one and leaves partial checkpoints "
        "alone: incomplete ones for 24 hours, complete ones for two minutes. Where no save runs, "
        "set "
        "RecoveryOptions::age_without_locks to zero."));
  }
  if (!report.rename_exchange) {
    advice->push_back(
        "Directories cannot be exchanged atomically here: replacing a checkpoint leaves a moment "
        "in which only Recover finds the new one. Prefer new names.");
  }
  if (!report.reserve) {
    advice->push_back(
        "Space cannot be reserved here: a full disk is found only in the middle of a save.");
  }
}

void AdviseOnSpeed(const ProbeReport& report, std::vector<std::string>* advice) {
  if (report.direct_io == DirectIo::kNo) {
    advice->push_back(absl::StrCat(
        "Writes go through the page cache, which costs CPU and pushes other data out: ",
        report.file_system, " refuses O_DIRECT. ext4 and xfs on a local disk take it."));
  } else if (report.direct_io == DirectIo::kClaimed) {
    advice->push_back(absl::StrCat(
        "O_DIRECT is accepted, but ", report.file_system,
        " does not prove that it means it, so read_back may compare with the page cache instead "
        "of the disk."));
  }
  if (report.engine == EngineRung::kPwrite) {
    const bool memory = absl::StrContains(report.engine_reason, "ENOMEM");
    advice->push_back(absl::StrCat(
        "io_uring cannot be used (", report.engine_reason,
        memory ? "). Raise the limit on locked memory (ulimit -l; for a container --ulimit "
                 "memlock=-1)."
               : "). In a container allow io_uring_setup, io_uring_enter and io_uring_register in "
                 "its seccomp profile; on the host set sysctl kernel.io_uring_disabled=0."));
  }
  if (report.pages == PageRung::kSmall) {
    advice->push_back(absl::StrCat(
        "The arena is on small pages, which makes writing cost many times the CPU. Reserve huge "
        "pages for it (1 GiB: sysctl vm.nr_hugepages=512), or write advise to "
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled (",
        report.pages_reason, ")."));
  }
  if (report.engine == EngineRung::kUring && HugePages(report.pages) &&
      report.memlock_bytes < kMemlockBytes) {
    advice->push_back(absl::StrCat("Only ", report.memlock_bytes >> 10,
                                   " KiB may be locked, so buffers are not registered: raise "
                                   "RLIMIT_MEMLOCK (ulimit -l) to the arena's size."));
  }
  if (report.digest_bytes_per_second > 0 &&
      report.digest_bytes_per_second < report.write_bytes_per_second) {
    advice->push_back(
        "One thread digests slower than the disk writes: give StagingOptions::threads more.");
  }
}

}  // namespace

std::vector<std::string> Advise(const ProbeReport& report, bool local,
                                const std::string& worker_why) {
  std::vector<std::string> advice;
  AdviseOnWhatFails(report, worker_why, &advice);
  AdviseOnSafety(report, local, &advice);
  AdviseOnSpeed(report, &advice);
  return advice;
}

}  // namespace holdfast::doctor
