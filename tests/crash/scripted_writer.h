// The commit protocol of a save as a script: every step of trainer and worker of all ranks, one
// after the other in one process, through the table of system calls.
#ifndef HOLDFAST_TESTS_CRASH_SCRIPTED_WRITER_H_
#define HOLDFAST_TESTS_CRASH_SCRIPTED_WRITER_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/testing/small_checkpoint.h"

namespace holdfast::testing {

/// Directory of the campaigns, in memory if possible. The campaigns kill processes and model power
/// cuts; a real disk would only cost minutes.
std::string Scratch();

/// While it lives, directories cannot be exchanged, as on some file systems. Around one table of
/// calls another writer may be put, with a script of its own.
class WithoutExchange {
 public:
  explicit WithoutExchange(bool active);
  ~WithoutExchange();
  WithoutExchange(const WithoutExchange&) = delete;
  WithoutExchange& operator=(const WithoutExchange&) = delete;

 private:
  const bool active_;
  int (*const outer_)(int, const char*, int, const char*, unsigned);
};

struct Script {
  std::string directory;
  SmallRank like;                     ///< Name, attempt, world size, step; every rank is written.
  std::vector<uint32_t> order = {0};  ///< Order of the ranks' parts. Rank 0 commits last.
  bool replace = false;
  bool exchange = true;  ///< False: the file system cannot exchange two directories.
  bool sync_record =
      true;  ///< False: the planted bug of a record that is renamed before its fsync.
  std::function<void()> acknowledge;  ///< Called when "durable" would be reported.
};

/// Returns false after the first failed call; locks are then released as by a dying process.
bool RunScript(const Script& script);

/// Writes one rank's part, without the commit, into the partial directory `partial`.
bool WriteRankDurably(int parent, const std::string& partial, const SmallRank& rank);

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_CRASH_SCRIPTED_WRITER_H_
