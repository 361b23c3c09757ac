// What is advised for what was found.
#include "runtime/doctor/advice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace holdfast::doctor {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// A machine and a directory on which there is nothing to say.
ProbeReport Good() {
  ProbeReport report;
  report.file_system = "xfs";
  report.engine = EngineRung::kUringFixed;
  report.pages = PageRung::kHugetlb;
  report.direct_io = DirectIo::kProven;
  report.reserve = report.rename_noreplace = report.rename_exchange = report.lock = true;
  report.free_bytes = uint64_t{1} << 40;
  report.memlock_bytes = UINT64_MAX;
  report.worker_program_found = true;
  report.write_bytes_per_second = 2e9;
  report.digest_bytes_per_second = 2e10;
  return report;
}

TEST(Advice, SaysNothingWhereNothingIsToBeSaid) {
  EXPECT_THAT(Advise(Good(), true, ""), IsEmpty());
}

TEST(Advice, PutsWhatFailsBeforeWhatIsUnsafeBeforeWhatIsSlow) {
  ProbeReport report = Good();
  report.worker_program_found = false;
  report.rename_exchange = false;
  report.direct_io = DirectIo::kNo;
  EXPECT_THAT(Advise(report, true, "not there"),
              ElementsAre(HasSubstr("not there"), HasSubstr("exchanged"), HasSubstr("page cache")));
}

TEST(Advice, NamesTheReasonOfAFallenRung) {
  ProbeReport report = Good();
  report.engine = EngineRung::kPwrite;
  report.engine_reason = "io_uring_setup: Operation not permitted";
  report.pages = PageRung::kSmall;
  report.pages_reason = "no huge page is free";
  EXPECT_THAT(Advise(report, true, ""),
              ElementsAre(HasSubstr("Operation not permitted"), HasSubstr("no huge page is free")));
}

TEST(Advice, NamesTheLimitThatKeepsIoUringFromItsMemory) {
  ProbeReport report = Good();
  report.engine = EngineRung::kPwrite;
  report.engine_reason = "io_uring_setup: ENOMEM (memory limit); pwrite, threads: 2";
  EXPECT_THAT(Advise(report, true, ""),
              ElementsAre(AllOf(HasSubstr("ulimit -l"), Not(HasSubstr("seccomp")))));
}

TEST(Advice, NamesWhatWorksNotAtAll) {
  ProbeReport report = Good();
  report.engine = EngineRung::kAuto;
  report.engine_reason = "threads cannot be started";
  report.pages = PageRung::kAuto;
  report.pages_reason = "no memory";
  report.free_bytes = 5 << 20;
  EXPECT_THAT(Advise(report, true, ""), ElementsAre(HasSubstr("threads cannot be started"),
                                                    HasSubstr("no memory"), HasSubstr("5 MiB")));
}

TEST(Advice, WarnsOfLocksThatOtherMachinesDoNotSee) {
  ProbeReport report = Good();
  report.file_system = "nfs";
  EXPECT_THAT(Advise(report, false, ""), ElementsAre(HasSubstr("24 hours")));
  report.file_system = "xfs";
  report.lock = false;
  EXPECT_THAT(Advise(report, true, ""), ElementsAre(HasSubstr("do not work")));
}

TEST(Advice, WarnsOfMemoryThatIsNoDisk) {
  ProbeReport report = Good();
  report.file_system = "tmpfs";
  EXPECT_THAT(Advise(report, true, ""), ElementsAre(HasSubstr("reboot")));
}

TEST(Advice, TellsWhenTheLockedMemoryLimitKeepsBuffersFromBeingRegistered) {
  ProbeReport report = Good();
  report.engine = EngineRung::kUring;
  report.memlock_bytes = 8 << 20;
  EXPECT_THAT(Advise(report, true, ""), ElementsAre(HasSubstr("RLIMIT_MEMLOCK")));
}

TEST(Advice, TellsOfDigestsSlowerThanTheDisk) {
  ProbeReport report = Good();
  report.digest_bytes_per_second = 1e9;
  EXPECT_THAT(Advise(report, true, ""), ElementsAre(HasSubstr("threads")));
}

TEST(Advice, TellsOfNoReservationAndUnprovenDirectIo) {
  ProbeReport report = Good();
  report.reserve = false;
  report.direct_io = DirectIo::kClaimed;
  EXPECT_THAT(Advise(report, true, ""), ElementsAre(HasSubstr("reserved"), HasSubstr("prove")));
}

}  // namespace
}  // namespace holdfast::doctor
