// Proof that the lifetime tests can fail: each planted bug is found, with its chunk.

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/base/planted_bugs.h"
#include "runtime/staging/residence.h"
#include "tests/stress/hostile_saves.h"
#include "tests/testing/settings.h"

namespace holdfast::testing {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct PlantedBug : ::testing::Test {
  void SetUp() override { HOLDFAST_SKIP_WITHOUT_RING(EngineRung::kUring); }
};

TEST_F(PlantedBug, ReleaseAtSubmitIsFoundAndNamed) {
  base::g_bug = base::Bug::kReleaseAtSubmit;
  const HostileResult result =
      RunHostileSaves({.launcher = Launcher::kSpawn, .engine = EngineRung::kUring, .saves = 6});
  base::g_bug = base::Bug::kNone;
  EXPECT_THAT(result.problems,
              Contains(AllOf(HasSubstr("are not what was sealed"), HasSubstr("bytes ["))));
}

TEST_F(PlantedBug, TrimUnderARegistrationIsFoundOnDisk) {
  base::g_bug = base::Bug::kTrimUnderRegistration;
  const HostileResult result = RunHostileSaves({.launcher = Launcher::kPersistent,
                                                .engine = EngineRung::kUringFixed,
                                                .saves = 4,
                                                .trim_between = true});
  base::g_bug = base::Bug::kNone;
  // The worker's second look at memory agrees with the seal, because the registration wrote other
  // pages. Only the bytes on disk show the bug.
  EXPECT_THAT(result.problems, Contains(HasSubstr("layer.")));
}

TEST_F(PlantedBug, TrimUnderARegistrationIsRefusedByReadBack) {
  base::g_bug = base::Bug::kTrimUnderRegistration;
  const HostileResult result = RunHostileSaves({.launcher = Launcher::kPersistent,
                                                .engine = EngineRung::kUringFixed,
                                                .saves = 4,
                                                .read_back = true,
                                                .trim_between = true});
  base::g_bug = base::Bug::kNone;
  EXPECT_THAT(result.problems, Contains(AllOf(HasSubstr("DATA_LOSS"), HasSubstr("bytes ["))));
}

TEST_F(PlantedBug, ReturningWhileTensorsAreStillCopiedIsFoundOnDisk) {
  base::g_bug = base::Bug::kReturnWhileCopying;
  const HostileResult result =
      RunHostileSaves({.launcher = Launcher::kSpawn, .engine = EngineRung::kUring, .saves = 4});
  base::g_bug = base::Bug::kNone;
  EXPECT_THAT(result.problems, Contains(HasSubstr("layer.")));
}

TEST_F(PlantedBug, WithoutItTheSameRunsAreClean) {
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
