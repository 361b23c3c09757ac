// Deliberate mistakes of the trainer's side, for tests that must fail with each. Only in builds
// with HOLDFAST_PLANTED_BUGS, never in an installed library.
#ifndef HOLDFAST_RUNTIME_BASE_PLANTED_BUGS_H_
#define HOLDFAST_RUNTIME_BASE_PLANTED_BUGS_H_

namespace holdfast::base {

enum class Bug {
  kNone,
  kPromoteWithoutSizes,  ///< A manifest alone makes a checkpoint complete.
  kPromoteOtherAttempt,  ///< The attempt in the manifests is ignored.
  kReplaceUnproven,      ///< Recovery replaces any directory under the name.
  /// Recovery takes any directory beside a complete checkpoint for a replaced one.
  kRemoveUnproven,
  kRemoveBeforeParentSync,  ///< Recovery relies on an exchange that is not durable.
  kRemoveBeforePromotion,   ///< Recovery overlooks partial directories.
  kPromoteWithoutDirectorySync,
  kPromoteWithoutRecord,  ///< Recovery gives the final name to a directory without a record.
  kReportWithoutParentSync,
  kIgnoreLocks,            ///< Every directory counts as unowned.
  kNoFence,                ///< An orphan may commit after the recovery.
  kIgnoreCommitFile,       ///< Manifests alone make a framework's checkpoint complete.
  kTrainerKeepsFailures,   ///< A trainer does not publish a failure in its worker's place.
  kTrainerGivesNoSigns,    ///< A trainer gives no signs of life for its rank.
  kTrimUnderRegistration,  ///< A trim punches pages under a registration.
  /// Memory is released when the worker was asked to write it, as a framework's allocator does
  /// without regard to the writer process.
  kReleaseAtSubmit,
  kTrustThePidfd,       ///< The end of a worker's process counts as the end of its transfers.
  kReturnWhileCopying,  ///< The call returns while other threads copy the caller's tensors.
  kNewestByStep,        ///< The newest checkpoint is that of the highest step.
  kInodeIsIdentity,     ///< Two directories with the same inode number, in sequence, are the same.
  kTrustEveryLock,      ///< Locks of FUSE and network file systems count as those of local ones.
  kAddChecksumsTwice,   ///< Sealing adds checksums that the copy has added.
  kKeepUnlanded,        ///< Memory that a closed Checkpointer's dead workers still read stays.
};

#ifdef HOLDFAST_PLANTED_BUGS
inline Bug g_bug = Bug::kNone;  ///< The bug to make.
inline bool Planted(Bug bug) { return g_bug == bug; }
#else
constexpr bool Planted(Bug) { return false; }
#endif

}  // namespace holdfast::base

#endif  // HOLDFAST_RUNTIME_BASE_PLANTED_BUGS_H_
