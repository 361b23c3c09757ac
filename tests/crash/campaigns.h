// Crash campaigns against the commit protocol and recovery: every step killed, every state of a
// power cut visited, and what must hold afterwards.
#ifndef HOLDFAST_TESTS_CRASH_CAMPAIGNS_H_
#define HOLDFAST_TESTS_CRASH_CAMPAIGNS_H_

#include <cstdint>
#include <string>
#include <vector>

namespace holdfast::testing {

/// What a campaign saw. `violations` is empty if recovery keeps its promises.
struct Outcome {
  int states = 0;  ///< Crashes that were recovered from.
  std::vector<std::string> violations;
};

struct CommitCase {
  std::vector<uint32_t> order = {0, 1};  ///< Of two ranks.
  bool replace = false;
  bool exchange = true;     ///< As Script's; likewise for the recovery.
  bool sync_record = true;  ///< As Script's.
};

/// A save is killed before each of its calls; then recovery runs, twice.
Outcome KillCommits(const CommitCase& commit);

/// A recovery is killed before each of its calls, on a directory with one of everything; then
/// another recovery runs.
Outcome KillRecoveries(bool exchange);

/// A removal of a retired checkpoint, or of a replaced one, is killed before each of its calls;
/// then another program puts a file into what is left, and recovery runs.
Outcome KillRemovals();

/// Rank 1 is killed before each of its calls while rank 0's trainer lives; recovery must not touch
/// the save.
Outcome KillOneRankOfARunningSave();

/// Power is cut after each call of a save, and after each call of a recovery of what the save left
/// when it died at some call.
Outcome CutPower(const CommitCase& commit);

/// A save that a crash left with a file too short under a complete set of manifests, one whose
/// manifests are another attempt's, two complete ones of one name of which neither replaces the
/// other, and an orphan that goes on after the recovery.
Outcome Oddities();

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_CRASH_CAMPAIGNS_H_
