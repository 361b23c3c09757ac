// Mistakes on purpose, for tests that prove that they can fail. Only in builds with
// HOLDFAST_PLANTED_BUGS, which no library that is installed has.
#ifndef HOLDFAST_RUNTIME_DIRECTORY_PLANTED_BUGS_H_
#define HOLDFAST_RUNTIME_DIRECTORY_PLANTED_BUGS_H_

namespace holdfast::directory {

enum class Bug {
  kNone,
  kPromoteWithoutSizes,     ///< A manifest alone makes a checkpoint complete.
  kPromoteOtherAttempt,     ///< Whatever attempt the manifests carry.
  kReplaceUnproven,         ///< Whatever stands under the name is replaced.
  kRemoveUnproven,          ///< Whatever stands beside a complete checkpoint was replaced by it.
  kRemoveBeforeParentSync,  ///< An exchange that is not durable is built on.
  kRemoveBeforePromotion,   ///< Partial directories go unseen.
  kPromoteWithoutDirectorySync,
  kReportWithoutParentSync,
  kIgnoreLocks,           ///< Every directory is nobody's.
  kNoFence,               ///< An orphan may commit after the recovery.
  kIgnoreCommitFile,      ///< Manifests alone make a framework's checkpoint complete.
  kTrainerKeepsFailures,  ///< A trainer does not publish the failure that its worker could not.
  kTrainerGivesNoSigns,   ///< A trainer gives no signs of life for its rank.
};

/// Which one is made; defined only in builds with HOLDFAST_PLANTED_BUGS.
extern Bug g_bug;

#ifdef HOLDFAST_PLANTED_BUGS
inline bool Planted(Bug bug) { return g_bug == bug; }
#else
constexpr bool Planted(Bug) { return false; }
#endif

}  // namespace holdfast::directory

#endif  // HOLDFAST_RUNTIME_DIRECTORY_PLANTED_BUGS_H_
