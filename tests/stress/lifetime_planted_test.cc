// Proof that the lifetime tests can fail: each planted bug is found, with its chunk.

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/staging/residence.h"
#include "runtime/writer/planted_bugs.h"
#include "tests/stress/hostile_saves.h"

namespace holdfast::testing {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(PlantedBug, ReleaseAtSubmitIsFoundAndNamed) {
  writer::testing::release_at_submit = true;
  const HostileResult result =
      RunHostileSaves({.launcher = Launcher::kSpawn, .engine = EngineRung::kUring, .saves = 6});
  writer::testing::release_at_submit = false;
  EXPECT_THAT(result.problems,
              Contains(AllOf(HasSubstr("are not what was sealed"), HasSubstr("bytes ["))));
}

TEST(PlantedBug, TrimUnderARegistrationIsFoundOnDisk) {
  staging::testing::trim_under_registration = true;
  const HostileResult result = RunHostileSaves({.launcher = Launcher::kPersistent,
                                                .engine = EngineRung::kUringFixed,
                                                .saves = 4,
                                                .trim_between = true});
  staging::testing::trim_under_registration = false;
  // The worker's second look at memory agrees with the seal, because the registration wrote other
  // pages. Only the bytes on disk show the bug.
  EXPECT_THAT(result.problems, Contains(HasSubstr("layer.")));
}

TEST(PlantedBug, TrimUnderARegistrationIsRefusedByReadBack) {
  staging::testing::trim_under_registration = true;
  const HostileResult result = RunHostileSaves({.launcher = Launcher::kPersistent,
                                                .engine = EngineRung::kUringFixed,
                                                .saves = 4,
                                                .read_back = true,
                                                .trim_between = true});
  staging::testing::trim_under_registration = false;
  EXPECT_THAT(result.problems, Contains(AllOf(HasSubstr("DATA_LOSS"), HasSubstr("bytes ["))));
}

TEST(PlantedBug, ReturningWhileTensorsAreStillCopiedIsFoundOnDisk) {
  writer::testing::return_while_copying = true;
  const HostileResult result =
      RunHostileSaves({.launcher = Launcher::kSpawn, .engine = EngineRung::kUring, .saves = 4});
  writer::testing::return_while_copying = false;
  EXPECT_THAT(result.problems, Contains(HasSubstr("layer.")));
}

TEST(PlantedBug, WithoutItTheSameRunsAreClean) {
  EXPECT_THAT(
      RunHostileSaves({.launcher = Launcher::kSpawn, .engine = EngineRung::kUring, .saves = 6})
          .problems,
      IsEmpty());
  EXPECT_THAT(RunHostileSaves({.launcher = Launcher::kPersistent,
                               .engine = EngineRung::kUringFixed,
                               .saves = 4,
                               .trim_between = true})
                  .problems,
              IsEmpty());
}

}  // namespace
}  // namespace holdfast::testing
