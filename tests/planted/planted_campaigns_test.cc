// Tests of other folders, linked with the planted bugs. HOLDFAST_PLANT names the planted bug, and
// one test must fail. CMakeLists.txt has the pairs of bug and test.
#include <cstdlib>
#include <cstring>
#include <iostream>

#include "runtime/base/planted_bugs.h"
#include "runtime/worker/planted_bugs.h"

namespace holdfast::testing {
namespace {

/// Makes the bug before any test begins.
struct Plant {
  Plant() {
    const char* const name = std::getenv("HOLDFAST_PLANT");
    if (name == nullptr) return;
    using base::Bug;
    const struct {
      const char* name;
      Bug bug;
    } bugs[] = {{"kNewestByStep", Bug::kNewestByStep},
                {"kInodeIsIdentity", Bug::kInodeIsIdentity},
                {"kTrustEveryLock", Bug::kTrustEveryLock},
                {"kAddChecksumsTwice", Bug::kAddChecksumsTwice}};
    for (const auto& each : bugs) {
      if (std::strcmp(each.name, name) == 0) base::g_bug = each.bug;
    }
    const struct {
      const char* name;
      bool* flag;
    } flags[] = {{"g_ignore_byte_rate", &worker::testing::g_ignore_byte_rate},
                 {"g_retire_before_fsync", &worker::testing::g_retire_before_fsync},
                 {"g_commit_before_manifests", &worker::testing::g_commit_before_manifests},
                 {"g_name_manifest_late", &worker::testing::g_name_manifest_late}};
    bool found = base::g_bug != Bug::kNone;
    for (const auto& each : flags) {
      if (std::strcmp(each.name, name) != 0) continue;
      *each.flag = true;
      found = true;
    }
    if (!found) {
      std::cerr << "HOLDFAST_PLANT: there is no bug " << name << "\n";
      std::abort();
    }
  }
} plant;

}  // namespace
}  // namespace holdfast::testing
