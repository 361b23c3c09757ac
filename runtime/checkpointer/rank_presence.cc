#include "runtime/checkpointer/rank_presence.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "runtime/base/clock.h"
#include "runtime/base/planted_bugs.h"
#include "runtime/base/status.h"
#include "runtime/base/thread.h"
#include "runtime/checkpointer/options.h"
#include "runtime/directory/entries.h"
#include "runtime/directory/locks.h"
#include "runtime/format/directory_names.h"
#include "runtime/format/file_names.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"
#include "runtime/worker/contents.h"

namespace holdfast {
namespace checkpointer {
namespace {

using layout::Decision;
using layout::RankState;
using worker::Side;

// As in the worker: two of three signs of life may be lost, or late.
constexpr int kBeatsPerLiveness = 3;
// The time of a rename and its fsync, after rank 0 has announced them.
constexpr absl::Duration kCommitMax = absl::Seconds(2);
constexpr absl::Duration kPoll = absl::Milliseconds(5);
constexpr uint32_t kBufferBytes = 32 * 1024;
// Empty payload, see AllRanksKnow.
constexpr char kKnownPayload[] = "holdfast/known-to-all-ranks";

absl::Status Known(absl::Status status) {
  status.SetPayload(kKnownPayload, absl::Cord());
  return status;
}

/// Writes the signs of life for the process's presences, in one thread. The thread runs while any
/// presence exists. Never destroyed: a presence may end during process exit.
class Keeper {
 public:
  static Keeper& Get() {
    // A forked child has no such thread, and the mutex may be locked for ever.
    static std::atomic<Keeper*> instance{new Keeper};
    Keeper* keeper = instance.load(std::memory_order_acquire);
    if (keeper->guard_.InCreator()) return *keeper;
    auto* const fresh = new Keeper;
    if (instance.compare_exchange_strong(keeper, fresh, std::memory_order_acq_rel)) return *fresh;
    delete fresh;
    return *keeper;
  }

  absl::Status Add(const std::shared_ptr<RankPresence>& presence) {
    const base::MutexLock lock(&mutex_);
    entries_.push_back({presence.get(), presence, base::Now() + presence->interval()});
    changed_.NotifyAll();
    if (running_) return absl::OkStatus();
    const absl::Status started = thread_.Start([this] { Run(); });
    running_ = started.ok();
    if (!started.ok()) entries_.pop_back();
    return started;
  }

  void Remove(const RankPresence* presence) {
    const base::MutexLock lock(&mutex_);
    std::erase_if(entries_, [presence](const Entry& e) { return e.key == presence; });
    changed_.NotifyAll();
  }

 private:
  struct Entry {
    const RankPresence* key;
    std::weak_ptr<RankPresence> presence;
    absl::Time due;
  };

  void Run() {
    while (true) {
      std::vector<std::shared_ptr<RankPresence>> due;
      // Declared outside the lock: destroying the last reference takes the lock.
      std::vector<std::shared_ptr<RankPresence>> others;
      {
        const base::MutexLock lock(&mutex_);
        if (entries_.empty()) {
          running_ = false;
          thread_.Detach();  // a presence's end does not wait for the last sign of life
          return;
        }
        const absl::Time now = base::Now();
        absl::Time next = absl::InfiniteFuture();
        for (Entry& entry : entries_) {
          auto presence = entry.presence.lock();
          if (presence == nullptr) continue;
          const bool is_due = entry.due <= now;
          if (is_due) entry.due = now + presence->interval();
          next = std::min(next, entry.due);
          (is_due ? due : others).push_back(std::move(presence));
        }
        if (due.empty()) changed_.WaitUntil(&mutex_, next);
      }
      // Outside the lock: a hanging file system must not block Leave.
      for (const auto& presence : due) presence->Beat();
    }
  }

  base::ForkGuard guard_;
  base::Mutex mutex_;
  base::Condition changed_;
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mutex_);
  base::Thread thread_ ABSL_GUARDED_BY(mutex_);
  bool running_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

bool AllRanksKnow(const absl::Status& status) {
  return status.GetPayload(kKnownPayload).has_value();
}

RankPresence::RankPresence(const RankInSave& who, base::UniqueFd directory,
                           std::function<void()> on_remains)
    : who_(who),
      partial_(format::PartialName(who.name, who.attempt)),
      directory_(std::move(directory)),
      on_remains_(std::move(on_remains)) {}

absl::StatusOr<std::shared_ptr<RankPresence>> RankPresence::Join(int parent, const RankInSave& who,
                                                                 std::function<void()> on_remains) {
  const std::string partial = format::PartialName(who.name, who.attempt);
  HOLDFAST_ASSIGN_OR_RETURN(base::UniqueFd directory, directory::MakeDirectory(parent, partial));
  std::shared_ptr<RankPresence> presence(
      new RankPresence(who, std::move(directory), std::move(on_remains)));
  worker::RankBoard& board = presence->board_;
  const std::string object = absl::StrCat(partial, "/", layout::kBoardName);
  const int error =
      worker::OpenBoard(presence->directory_.get(), who.attempt, who.rank, who.world_size, &board);
  if (error == EPROTO) {
    return absl::FailedPreconditionError(absl::StrCat(
        "join ", object, ": it is of another world size or another version of Holdfast; start all ",
        "ranks of a job alike"));
  }
  if (error != 0) return base::ErrnoStatus("join", object, error);
  if (!worker::WritePulse(board, Side::kTrainer, RankState::kJoined)) {
    return base::ErrnoStatus("join", object, errno);
  }
  layout::BoardTop top;
  if (worker::ReadTop(board, &top) && top.alarm.failed != 0 && top.alarm.failed <= who.world_size) {
    layout::RankFailure failure = worker::ReadFailure(board, top.alarm.failed - 1);
    failure.is_final = 1;
    (void)worker::WriteFailure(board, Side::kTrainer, failure, /*raise=*/false);
    presence->RemoveIfLast(parent);
    return Known(absl::Status(static_cast<absl::StatusCode>(layout::CodeFor(failure)),
                              base::Describe(failure)));
  }
  const absl::Status kept = Keeper::Get().Add(presence);
  // The other ranks have seen this rank, and would wait for its next sign of life.
  if (!kept.ok()) {
    presence->Fail(parent, kept);
    return Known(kept);
  }
  return presence;
}

RankPresence::~RankPresence() {
  if (!guard_.InCreator()) return;
  Leave();
  worker::CloseBoard(&board_);
}

absl::Duration RankPresence::interval() const { return who_.time_liveness_max / kBeatsPerLiveness; }

void RankPresence::Beat() {
  const base::MutexLock lock(&mutex_);
  if (failed_ || left_ || base::Planted(base::Bug::kTrainerGivesNoSigns)) return;
  // Another presence of this rank may have published a failure. A later sign of life would
  // overwrite the failure.
  layout::RankSlot slot;
  if (worker::ReadSlots(board_, who_.rank, 1, &slot)) {
    failed_ = slot.trainer.state == static_cast<uint32_t>(RankState::kFailed);
  }
  if (!failed_) (void)worker::WritePulse(board_, Side::kTrainer, RankState::kJoined);
}

absl::Status RankPresence::CheckRanks(absl::Span<const uint32_t> ranks) {
  layout::BoardTop top;
  if (worker::ReadTop(board_, &top) && top.alarm.failed != 0 &&
      top.alarm.failed <= who_.world_size) {
    const layout::RankFailure failure = worker::ReadFailure(board_, top.alarm.failed - 1);
    return absl::Status(static_cast<absl::StatusCode>(layout::CodeFor(failure)),
                        base::Describe(failure));
  }
  std::vector<uint32_t> silent;
  const base::MutexLock lock(&mutex_);
  for (const uint32_t rank : ranks) {
    layout::RankSlot slot;
    // A slot that cannot be read counts as unchanged.
    const bool is_read = rank < who_.world_size && worker::ReadSlots(board_, rank, 1, &slot);
    const auto [note, is_first] = notes_.try_emplace(rank, Note{.since = base::Now()});
    const uint64_t beats = is_read ? slot.trainer.beat + slot.worker.beat : note->second.beats;
    if (beats != note->second.beats) note->second = {.beats = beats, .since = base::Now()};
    if (base::Now() - note->second.since > who_.time_liveness_max) silent.push_back(rank);
  }
  if (silent.empty()) return absl::OkStatus();
  return absl::DeadlineExceededError(absl::StrCat(
      silent.size() == 1 ? "rank " : "ranks ", absl::StrJoin(silent, ", "),
      silent.size() == 1 ? " has" : " have", " given no sign of life for ",
      absl::ToDoubleSeconds(who_.time_liveness_max), " s (time_liveness_max): dead, or stopped"));
}

void RankPresence::Leave() {
  {
    const base::MutexLock lock(&mutex_);
    left_ = true;
  }
  Keeper::Get().Remove(this);
}

void RankPresence::Publish(const absl::Status& why, bool is_final) {
  if (failed_ || base::Planted(base::Bug::kTrainerKeepsFailures)) return;
  layout::RankFailure failure;
  failure.rank = who_.rank;
  failure.kind = static_cast<uint32_t>(layout::RankFailureKind::kFailed);
  failure.code = static_cast<int32_t>(why.code());
  failure.error_number = base::ErrnoOf(why);
  failure.is_final = is_final ? 1 : 0;
  failure.is_message = 1;
  worker::SetText(&failure, std::string(why.message()).c_str());
  failed_ = worker::WriteFailure(board_, Side::kTrainer, failure, /*raise=*/true);
}

void RankPresence::RemoveIfLast(int parent) {
  alignas(layout::RankSlot) char buffer[kBufferBytes];
  if (!worker::AllHaveFailed(board_, buffer, sizeof(buffer)) ||
      !directory::NameRefersTo(parent, partial_, directory_.get())) {
    return;
  }
  // Files of a killed worker keep their marks, by which every later removal recognizes a save.
  if (!worker::HoldsOnlyMarks(directory_.get(), buffer)) {
    if (on_remains_) on_remains_();
    return;
  }
  for (const char* const mark : {layout::kBoardName, worker::kMarkName})
    sys::Sys().unlinkat(directory_.get(), mark, 0);
  // Refused while the directory holds files of a rank whose worker did not remove them.
  sys::Sys().unlinkat(parent, partial_.c_str(), AT_REMOVEDIR);
}

void RankPresence::Fail(int parent, const absl::Status& why) {
  {
    const base::MutexLock lock(&mutex_);
    Publish(why, /*is_final=*/true);
  }
  Leave();
  RemoveIfLast(parent);
}

void RankPresence::GiveUp(const absl::Status& why) {
  {
    const base::MutexLock lock(&mutex_);
    Publish(why, /*is_final=*/false);
  }
  Leave();
}

absl::Status RankPresence::Conclude(int parent, const absl::Status& outcome, bool reported) {
  absl::Status status = outcome;
  if (!outcome.ok()) {
    const base::MutexLock lock(&mutex_);
    status = ConcludeFailed(parent, outcome, reported);
  }
  Leave();
  if (!status.ok()) RemoveIfLast(parent);
  return status;
}

absl::Status RankPresence::ConcludeFailed(int parent, const absl::Status& outcome, bool reported) {
  layout::RankSlot slot;
  if (worker::ReadSlots(board_, who_.rank, 1, &slot) &&
      slot.worker.state == static_cast<uint32_t>(RankState::kFailed)) {
    failed_ = true;
    return outcome;
  }
  const auto is_committed = [&] {
    return directory::NameRefersTo(parent, who_.name, directory_.get());
  };
  if (!is_committed()) {
    // On rank 0 only the worker could rename, and the worker has ended. Another rank's vote binds
    // rank 0: the failure asks rank 0 to stop. A rank 0 past its announcement may miss the failure.
    const bool voted = who_.rank != 0 && HasVoted();
    Publish(outcome, /*is_final=*/!voted);
    if (voted) AwaitDecision();
  } else if (who_.rank == 0) {
    (void)worker::WriteDecision(board_, Decision::kCommitted);
  }
  // A worker's report after the commit stays: a second fsync proves nothing about data that the
  // worker could not make durable.
  if (reported || !is_committed()) return outcome;
  return directory::SyncDirectory(parent, absl::StrCat("of ", who_.name));
}

bool RankPresence::HasVoted() const {
  struct stat found {};
  const std::string manifest = format::ManifestName(who_.rank, who_.world_size);
  return sys::Sys().fstatat(directory_.get(), manifest.c_str(), &found, AT_SYMLINK_NOFOLLOW) == 0;
}

/// Waits while rank 0 is between its announcement and its rename.
void RankPresence::AwaitDecision() const {
  const absl::Time deadline = base::Now() + kCommitMax;
  layout::BoardTop top;
  while (worker::ReadTop(board_, &top) &&
         top.decision.decision == static_cast<uint32_t>(Decision::kCommitting) &&
         layout::StateOf(top.rank_zero) != RankState::kFailed && base::Now() < deadline) {
    directory::Pause(kPoll);
  }
}

absl::Status RefuseSave(int parent, const std::shared_ptr<RankPresence>& presence,
                        const RankInSave& who, const absl::Status& why) {
  if (who.world_size < 2 || who.attempt == AttemptId()) return why;
  if (presence != nullptr) {
    presence->Fail(parent, why);
  } else {
    (void)AbandonSave(who, why);
  }
  return why;
}

}  // namespace checkpointer

class RankAnnouncement::Impl {
 public:
  base::ForkGuard guard;
  base::UniqueFd parent;
  // Taken before the first sign of life: a recovery removes a directory without locks.
  directory::PartialDirectory locked;
  std::shared_ptr<checkpointer::RankPresence> presence;
};

RankAnnouncement::RankAnnouncement(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
RankAnnouncement::~RankAnnouncement() = default;

absl::StatusOr<std::unique_ptr<RankAnnouncement>> RankAnnouncement::Make(const RankInSave& who) {
  HOLDFAST_RETURN_IF_ERROR(checkpointer::ValidateName(who.name));
  if (who.rank >= who.world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", who.rank, " of a world of ", who.world_size, ": must be less"));
  }
  const std::string save = absl::StrCat("save ", who.directory, "/", who.name);
  auto impl = std::make_unique<Impl>();
  impl->parent = base::UniqueFd(
      sys::OpenOwned(AT_FDCWD, who.directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0));
  if (!impl->parent.valid()) {
    return base::Annotate(base::ErrnoStatus("open checkpoint directory", who.directory, errno),
                          save);
  }
  const int parent = impl->parent.get();
  auto locked = directory::MakePartialDirectory(parent, format::PartialName(who.name, who.attempt));
  auto joined = locked.ok() ? checkpointer::RankPresence::Join(parent, who) : locked.status();
  if (!joined.ok()) {
    // The other ranks may have begun the save, and would wait for a sign of life. A second try may
    // work, also in the directory of another rank.
    if (!checkpointer::AllRanksKnow(joined.status())) {
      auto again = checkpointer::RankPresence::Join(parent, who);
      if (again.ok()) (*again)->Fail(parent, joined.status());
    }
    return base::Annotate(joined.status(), save);
  }
  impl->locked = *std::move(locked);
  impl->presence = *std::move(joined);
  return std::unique_ptr<RankAnnouncement>(new RankAnnouncement(std::move(impl)));
}

void RankAnnouncement::Abandon(const absl::Status& why) {
  if (!impl_->guard.InCreator()) return;
  impl_->presence->Fail(impl_->parent.get(), why);
  impl_->locked = {};
}

absl::Status RankAnnouncement::CheckRanks(absl::Span<const uint32_t> ranks) {
  if (!impl_->guard.InCreator()) return absl::OkStatus();
  return impl_->presence->CheckRanks(ranks);
}

absl::Status AbandonSave(const RankInSave& who, const absl::Status& why) {
  auto announcement = RankAnnouncement::Make(who);
  if (checkpointer::AllRanksKnow(announcement.status())) return absl::OkStatus();
  if (!announcement.ok()) return announcement.status();
  (*announcement)->Abandon(why);
  return absl::OkStatus();
}

}  // namespace holdfast
