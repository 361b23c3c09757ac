// A trainer's side small enough to see through: builds a job by the real table builder, seals
// extents when the test says so, starts a worker by any launcher and looks at what it left.
#ifndef HOLDFAST_TESTS_UNIT_WORKER_WORKER_RIG_H_
#define HOLDFAST_TESTS_UNIT_WORKER_WORKER_RIG_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "holdfast/plan.h"
#include "holdfast/pod.h"
#include "runtime/layout/job.h"
#include "runtime/layout/wire.h"
#include "runtime/worker/rank_board.h"
#include "runtime/writer/job_table.h"

namespace holdfast::worker {

/// A directory that is removed with everything in it. On /dev/shm's or the disk's file system.
class TestDirectory {
 public:
  explicit TestDirectory(const std::string& below = "/tmp");
  ~TestDirectory();
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// A trainer's process: it lives until it is told to die.
class StandIn {
 public:
  StandIn();
  ~StandIn();
  pid_t pid() const { return pid_; }
  void Die();

 private:
  pid_t pid_ = -1;
};

/// The staging memory and the doorbells of one stand-in trainer; several jobs may share it.
class Trainer {
 public:
  explicit Trainer(uint64_t arena_bytes, pid_t pid = 0);
  ~Trainer();

  char* arena = nullptr;
  uint64_t arena_bytes = 0;
  int arena_fd = -1;
  int pidfd = -1;
  int to_worker = -1;
  int to_trainer = -1;
};

/// The socket to one worker, and the worker.
class TestWorker {
 public:
  /// Starts it and sends kAttach. `in_fork`: not the program but a forked child of this test, which
  /// has its table of system calls, serves as `launcher`.
  TestWorker(Launcher launcher, const Trainer& trainer, uint32_t jobs_max = 1,
             uint32_t layout_version = layout::kLayoutVersion, bool in_fork = false);
  ~TestWorker();

  void Run(const writer::JobTable& table, int parent, int lock);
  void Send(layout::MessageKind kind, uint64_t bytes, const std::vector<int>& fds);
  bool AwaitMessage(layout::MessageKind kind);
  /// Closes the socket and waits for the worker's end. Returns its exit status (128 + signal).
  int Join();
  pid_t pid() const { return pid_; }

 private:
  Launcher launcher_;
  uint32_t layout_version_;
  int socket_ = -1;
  pid_t pid_ = -1;
  std::thread thread_;
  int exit_status_ = -1;
};

/// One save.
class TestSave {
 public:
  TestSave(Trainer* trainer, const std::string& directory);
  ~TestSave();

  writer::JobParameters parameters;  ///< Changed by the test before Build.

  /// A file of tensors of these sizes, with bytes of its own, behind `header_bytes` of literal.
  void AddFile(const std::string& name, const std::vector<uint64_t>& tensor_bytes,
               uint64_t header_bytes = 0);
  /// Lays out the table and copies the bytes to the arena, unless it streams.
  void Build();

  layout::Job* job() const { return table_->job(); }
  const writer::JobTable& table() const { return *table_; }
  uint32_t extent_count() const { return job()->extent_count; }
  int parent() const { return parent_; }
  char* Memory(uint32_t extent) const;

  /// Digests an extent and publishes it. `offset` is where in the arena it stands.
  void Stage(uint32_t extent, uint64_t offset);
  void Seal(uint32_t extent);
  void SealAll();
  void Ring() const;

  void StartOn(TestWorker* worker) const;
  /// The whole job by a worker of its own, joined at the end. False if there is no result.
  bool Run(Launcher launcher) const;
  /// False if the job ends without having been in this phase, as far as a look now and then tells.
  bool AwaitPhase(layout::Phase phase) const;
  /// False if there is no result within `seconds`.
  bool AwaitDone(int seconds = 120) const;
  const Failure& failure() const { return job()->completion.failure; }
  /// What a failure of kWaitRanks says of the rank at fault.
  const layout::RankFailure& seen() const { return job()->completion.rank_failure; }

  std::string target_path() const;
  std::string partial_path() const;
  const std::vector<std::string>& contents() const { return contents_; }
  const SavePlan& plan() const { return plan_; }
  std::string manifest_name() const { return job()->manifest; }

  /// Empty if the target holds exactly this save: bytes, manifest, and nothing else (but other
  /// ranks' files when there are any).
  std::string Unsound() const { return UnsoundAt(target_path()); }
  std::string UnsoundAt(const std::string& path) const;

 private:
  Trainer* trainer_;
  std::string directory_;
  int parent_ = -1;
  SavePlan plan_;
  std::vector<std::string> contents_;
  std::unique_ptr<writer::JobTable> table_;
  std::unique_ptr<layout::LogWriter> published_;
  uint32_t sealed_ = 0;
};

/// The rank board of `save` in `directory`, as `rank` has it. To be closed.
void OpenBoardOf(const TestSave& save, const std::string& directory, uint32_t rank,
                 RankBoard* board);

/// Another rank of `save` votes: a manifest that carries `attempt`, and the word on the board.
void VoteAs(const TestSave& save, uint32_t rank,
            const std::string& attempt = "112233445566778899aabbccddeeff00");

/// Names in a directory, sorted; empty if it is not there.
std::vector<std::string> NamesIn(const std::string& path);
std::string ReadFileOf(const std::string& path);
void WriteFileAt(const std::string& path, const std::string& bytes);
bool Exists(const std::string& path);
/// The name of a checkpoint that was replaced.
std::string RetiredName(const std::string& checkpoint, const AttemptId& attempt);
/// As much of a manifest as a worker reads of another attempt's: its attempt and its files.
inline constexpr AttemptId kManifestAttempt = {.high = 5, .low = 6};
std::string ManifestNaming(const std::vector<std::string>& files);
/// Number of open fds of this process.
int OpenFds();

}  // namespace holdfast::worker

#endif  // HOLDFAST_TESTS_UNIT_WORKER_WORKER_RIG_H_
