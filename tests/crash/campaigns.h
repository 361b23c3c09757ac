// Crash campaigns against the commit protocol and recovery: kills at every step, every state of a
// power cut, and the promises afterwards.
#ifndef HOLDFAST_TESTS_CRASH_CAMPAIGNS_H_
#define HOLDFAST_TESTS_CRASH_CAMPAIGNS_H_

#include <string>
#include <vector>

namespace holdfast::testing {

/// Result of a campaign. `violations` is empty if recovery keeps its promises.
struct Outcome {
  int states = 0;  ///< Crashes with a recovery.
  std::vector<std::string> violations;
};

/// A save of two ranks.
struct CommitCase {
  bool replace = false;
  bool exchange = true;  ///< As RealSave's; likewise for the recovery.
  bool sync_record =
      true;  ///< False: the planted bug of a commit record that is renamed before its fsync.
};

/// Kills a save before each of its calls, then runs recovery twice.
Outcome KillCommits(const CommitCase& commit);

/// A recovery is killed before each of its calls, on a directory with one of everything; then
/// another recovery runs.
Outcome KillRecoveries(bool exchange);

/// A removal of a retired checkpoint, or of a replaced one, is killed before each of its calls;
/// then another program puts a file into what is left, and recovery runs.
Outcome KillRemovals();

/// Kills rank 1 before each of its calls while rank 0's trainer lives; recovery must not touch the
/// save.
Outcome KillOneRankOfARunningSave();

/// Cuts power after each call of a save, and after each call of a recovery from a save that died at
/// some call.
Outcome CutPower(const CommitCase& commit);

/// A save that a crash left with a file too short under a complete set of manifests, one whose
/// manifests are another attempt's, two complete ones of one name of which neither replaces the
/// other, and an orphan that goes on after the recovery.
Outcome Oddities();

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_CRASH_CAMPAIGNS_H_
