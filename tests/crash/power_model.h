// A model of what a power cut leaves: files keep what was fsynced, directories keep what was
// fsynced and any prefix of what was done to them since.
//
// Calls go to the real file system and are recorded beside it. Then every state that a power cut
// could have left is written out as a real directory, for recovery to be run on. Stricter than
// journaling file systems, which keep the order between directories too.
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
  /// Takes over the table of system calls until destruction. What is in `directory` now counts as
  /// durable.
  explicit PowerModel(const std::string& directory);
  ~PowerModel();
  PowerModel(const PowerModel&) = delete;
  PowerModel& operator=(const PowerModel&) = delete;

  /// From the `call`th recorded call on (counting from 1) every one fails with EIO; 0 is never.
  void FailFrom(int call) { fail_from_ = call; }
  void StopFailing() { fail_from_ = 0; }
  int calls() const { return calls_; }

  /// Called after every recorded call that worked.
  void OnCall(std::function<void()> observer) { observer_ = std::move(observer); }

  /// Writes out each state that a power cut now could leave, one after the other, to a fresh
  /// directory, and calls `visit` with its path. At most a few hundred states; it says so if more.
  void ForEachState(const std::function<void(const std::string& path)>& visit) const;

 private:
  friend struct PowerHooks;
  using Id = int;
  using Entries = std::map<std::string, Id>;
  struct Inode {
    bool is_directory = false;
    std::string content;
    std::string durable_content;
    Entries durable;
    std::vector<std::function<void(Entries*)>> pending;  // since the last fsync, in order
  };

  bool Before();
  void After();
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
  std::function<void()> observer_;
};

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_CRASH_POWER_MODEL_H_
