// A model of the state after a power cut: files keep fsynced bytes, directories keep fsynced
// entries and any prefix of later operations.
//
// Calls go to the real file system and are recorded. Then every state that a power cut could leave
// is written out as a real directory, for recovery. Stricter than journaling file systems, which
// also keep the order between directories.
#ifndef HOLDFAST_TESTS_CRASH_POWER_MODEL_H_
#define HOLDFAST_TESTS_CRASH_POWER_MODEL_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace holdfast::testing {

class PowerModel {
 public:
  /// Replaces the table of system calls until destruction, before any thread makes such calls.
  /// Present entries of `directory` count as durable.
  explicit PowerModel(const std::string& directory);
  ~PowerModel();
  PowerModel(const PowerModel&) = delete;
  PowerModel& operator=(const PowerModel&) = delete;

  /// Makes every recorded call from the `call`th on (counting from 1) fail with EIO; 0 is never.
  void FailFrom(int call) { fail_from_ = call; }
  void StopFailing() { fail_from_ = 0; }
  int calls() const { return calls_; }

  /// Files whose names begin so keep nothing of an fsync: a planted bug.
  void ForgetFsyncOf(const std::string& name) { forgotten_ = name; }

  /// Called after every recorded call that may change what a power cut leaves.
  void OnCall(std::function<void()> observer) { observer_ = std::move(observer); }

  /// Writes out each state that a power cut now could leave, one after the other, to a fresh
  /// directory, and calls `visit` with its path. At most a few hundred states; reports an excess.
  void ForEachState(const std::function<void(const std::string& path)>& visit) const;

 private:
  friend class PowerCall;
  friend struct PowerHooks;
  using Id = int;
  using Entries = std::map<std::string, Id>;
  struct Inode {
    bool is_directory = false;
    std::string durable_content;
    Entries durable;
    std::vector<std::function<void(Entries*)>> pending;  // since the last fsync, in order
  };

  bool Before();
  void After() const;
  Id IdOf(int fd) const;
  Id IdAt(int directory, const char* name) const;
  Id Import(const std::string& path);
  void MaterializeInto(const std::string& path, Id directory,
                       const std::map<Id, size_t>& prefixes) const;

  std::vector<Inode> inodes_;
  std::map<uint64_t, Id> by_number_;  // inode numbers are reused, ids are not
  Id root_ = 0;
  int calls_ = 0;
  int fail_from_ = 0;
  std::string forgotten_;
  std::function<void()> observer_;
};

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_CRASH_POWER_MODEL_H_
