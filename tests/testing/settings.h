// The launchers and engines of tests, and their words in the names of cases: SpawnFixed,
// ThreadPwrite. tools/test.sh selects cases by these names.
#ifndef HOLDFAST_TESTS_TESTING_SETTINGS_H_
#define HOLDFAST_TESTS_TESTING_SETTINGS_H_

#include <string>
#include <tuple>

#include "gtest/gtest.h"
#include "holdfast/pod.h"

namespace holdfast::testing {

inline const auto kEveryLauncher =
    ::testing::Values(Launcher::kSpawn, Launcher::kFork, Launcher::kPersistent, Launcher::kThread);
/// Launchers with worker processes.
inline const auto kProcessLaunchers =
    ::testing::Values(Launcher::kSpawn, Launcher::kFork, Launcher::kPersistent);
inline const auto kEveryEngine =
    ::testing::Values(EngineRung::kUringFixed, EngineRung::kUring, EngineRung::kPwrite);

inline std::string NameOf(Launcher launcher) {
  constexpr const char* kNames[] = {"Spawn", "Fork", "Persistent", "Thread"};
  return kNames[static_cast<int>(launcher)];
}
inline std::string NameOf(EngineRung engine) {
  constexpr const char* kNames[] = {"Auto", "Fixed", "Uring", "Pwrite"};
  return kNames[static_cast<int>(engine)];
}

/// Why the kernel gives an engine no ring: the kernel has none, or a filter forbids rings. Empty
/// where a ring can be had, and for engines without a ring.
std::string WhyNoRing(EngineRung engine);

#define HOLDFAST_SKIP_WITHOUT_RING(engine)                                            \
  if (const std::string why = ::holdfast::testing::WhyNoRing(engine); !why.empty()) { \
    GTEST_SKIP() << why;                                                              \
  }

using Setting = std::tuple<Launcher, EngineRung>;

// For INSTANTIATE_TEST_SUITE_P.
inline std::string LauncherName(const ::testing::TestParamInfo<Launcher>& info) {
  return NameOf(info.param);
}
inline std::string EngineName(const ::testing::TestParamInfo<EngineRung>& info) {
  return NameOf(info.param);
}
inline std::string SettingName(const ::testing::TestParamInfo<Setting>& info) {
  return NameOf(std::get<0>(info.param)) + NameOf(std::get<1>(info.param));
}

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_TESTING_SETTINGS_H_
