// Where io_uring is forbidden (container runtimes), the save works and reports the reason for
// another rung.
#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "tests/testing/child_process.h"
#include "tests/testing/forbidden_calls.h"
#include "tests/testing/save_test.h"

namespace holdfast::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

/// Makes every io_uring call fail with `error` in this process and its children, permanently.
bool ForbidIoUring(int error) {
  return testing::ForbidCalls({SYS_io_uring_setup, SYS_io_uring_enter, SYS_io_uring_register},
                              error);
}

/// Forbids this process and its children to lock memory beyond RLIMIT_MEMLOCK.
bool DropLockCapability() {
  if (prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0) != 0) return false;
  __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
  __user_cap_data_struct data[2] = {};
  if (syscall(SYS_capget, &header, data) != 0) return false;
  constexpr uint32_t kLock = 1u << CAP_IPC_LOCK;
  data[0].effective &= ~kLock;
  data[0].permitted &= ~kLock;
  data[0].inheritable &= ~kLock;
  return syscall(SYS_capset, &header, data) == 0;
}

class EngineForbidden : public LauncherTest {
 protected:
  /// Saves under the present restrictions and returns the report.
  SaveReport SavedAnyway(EngineRung engine = EngineRung::kAuto) {
    CheckpointerOptions options = Options();
    options.engine = engine;
    const auto checkpointer = Make(options);
    if (checkpointer == nullptr) return {};
    const TrainingState state = TrainingState::Uniform(3, 3u << 20, 1);
    const auto report = Save(checkpointer.get(), "anyway", state);
    EXPECT_TRUE(report.ok()) << report.status();
    if (!report.ok()) return {};
    EXPECT_TRUE(state.CompareWith(report->path).ok());
    ExpectMemoryBack(checkpointer.get());
    return *report;
  }
};
INSTANTIATE_TEST_SUITE_P(All, EngineForbidden, kEveryLauncher, LauncherName);

TEST_P(EngineForbidden, BySeccomp) {
  for (const int error : {EPERM, ENOSYS}) {
    SCOPED_TRACE(error);
    const ChildResult result = RunInChild([this, error] {
      if (!ForbidIoUring(error)) return std::string("no seccomp filters here");
      const SaveReport report = SavedAnyway();
      EXPECT_EQ(report.engine, EngineRung::kPwrite);
      EXPECT_THAT(report.engine_reason, HasSubstr("io_uring_setup"));
      // This sysctl looks the same, and is of the whole machine.
      if (error == EPERM) {
        EXPECT_THAT(report.engine_reason, HasSubstr("kernel.io_uring_disabled"));
      }
      return std::string();
    });
    if (!result.skipped.empty()) GTEST_SKIP() << result.skipped;
    EXPECT_EQ(result.status, 0);
    std::filesystem::remove_all(absl::StrCat(directory(), "/anyway"));
  }
}

TEST_P(EngineForbidden, ByMemoryLimit) {
  const ChildResult result = RunInChild([this] {
    const rlimit none = {.rlim_cur = 0, .rlim_max = 0};
    if (setrlimit(RLIMIT_MEMLOCK, &none) != 0 || !DropLockCapability())
      return std::string("CAP_IPC_LOCK cannot be dropped here");
    const SaveReport report = SavedAnyway();
    EXPECT_THAT(report.engine, AnyOf(EngineRung::kUring, EngineRung::kPwrite));
    EXPECT_FALSE(report.engine_reason.empty());
    if (GetParam() == Launcher::kPersistent) {
      EXPECT_THAT(report.engine_reason, HasSubstr("memory limit"));
    }
    return std::string();
  });
  if (!result.skipped.empty()) GTEST_SKIP() << result.skipped;
  EXPECT_EQ(result.status, 0);
}

}  // namespace
}  // namespace holdfast::testing
