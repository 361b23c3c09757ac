// The rank board: a small file in the partial directory of a save of several ranks, with the state
// of every rank.
//
// Workers and trainers read and write the board by pread(2) and pwrite(2) on an open fd, so that
// waiting costs data calls and no lookups. Each range has one writer: a rank's trainer, a rank's
// worker, or rank 0. The board is never fsynced and never decides completeness: a vote is a durable
// manifest, and FORMAT.md section 1 defines a checkpoint. FORMAT.md has the bytes.
#ifndef HOLDFAST_RUNTIME_LAYOUT_BOARD_H_
#define HOLDFAST_RUNTIME_LAYOUT_BOARD_H_

#include <cstdint>
#include <type_traits>

#include "holdfast/pod.h"

namespace holdfast::layout {

inline constexpr char kBoardName[] = "ranks.board";
inline constexpr uint64_t kBoardMagic = 0x314b'4e52'4246'4c48;  // "HLFBRNK1" in memory
/// Raised with any change of the bytes below. A rank refuses a board of another version.
inline constexpr uint32_t kBoardVersion = 1;

/// The first bytes, written alike by every rank in any order.
struct BoardHead {
  uint64_t magic = kBoardMagic;
  uint32_t version = kBoardVersion;
  uint32_t world_size = 0;
  AttemptId attempt;
  uint64_t reserved[4] = {};
};

/// Points at the slot of a failed rank. Written by the failing rank; of several writes the last
/// stays, and each is right.
struct BoardAlarm {
  uint32_t failed = 0;  ///< 1 + the rank; 0: none.
  uint32_t reserved = 0;
};

enum class Decision : uint32_t {
  kNone = 0,
  kCommitting = 1,  ///< Rank 0 has all votes and renames unless a failure shows up now.
  kCommitted = 2,   ///< The directory has its final name.
};

/// Written by rank 0 alone.
struct BoardDecision {
  uint32_t decision = 0;
  uint32_t reserved = 0;
};

enum class RankState : uint32_t {
  kAbsent = 0,
  kJoined = 1,
  kVoted = 2,   ///< The rank's manifest is durable. Written only by workers.
  kFailed = 3,  ///< The rank's RankFailure was written before.
};

/// A sign of life of one process of one rank.
struct RankPulse {
  uint32_t state = 0;  ///< RankState
  /// If not 0: the process is inside one fsync and may be silent for so many seconds.
  uint32_t silent_s_max = 0;
  uint64_t beat = 0;  ///< Changes with each sign of life.
  uint64_t reserved[2] = {};
};

/// A rank, with a range for each of its two processes.
struct RankSlot {
  RankPulse trainer;
  RankPulse worker;
};

enum class RankFailureKind : uint32_t {
  kUnknown = 0,  ///< The record is torn or damaged.
  kFailed = 1,   ///< The rank failed: code, operation, error_number, text.
  kSilent = 2,   ///< No process of the rank gives a sign of life.
  kAbsent = 3,   ///< The rank has not begun the save.
  kSlow = 4,     ///< The live rank has not voted within time_ranks_max.
  kFenced = 5,   ///< A recovery has renamed the directory; written by rank 0.
  kDiffers = 6,  ///< The rank's replicated files are not rank 0's; text: the tensor or the file.
};

/// Why the save cannot go on, in the words of the reporting rank.
struct RankFailure {
  uint64_t check = 0;      ///< CheckOf the other bytes; refuses a record read during its write.
  uint32_t rank = 0;       ///< The rank at fault; another rank may report.
  uint32_t kind = 0;       ///< RankFailureKind
  int32_t code = 0;        ///< FailureCode
  uint32_t operation = 0;  ///< Operation
  int32_t error_number = 0;
  uint32_t seconds = 0;  ///< Elapsed time, for kinds with a deadline.
  /// 1: the slot's rank has not voted and never will (rank 0: has not renamed and never will), so
  /// that the save cannot be committed.
  uint32_t is_final = 0;
  uint32_t is_message = 0;  ///< 1: `text` is the whole message; 0: the object of `operation`.
  char text[216] = {};      ///< UTF-8, terminated.
};

static_assert(sizeof(BoardHead) == 64 && sizeof(RankPulse) == 32 && sizeof(RankSlot) == 64);
static_assert(sizeof(RankFailure) == 256 && sizeof(BoardAlarm) == 8 && sizeof(BoardDecision) == 8);
static_assert(std::is_trivially_copyable_v<RankFailure> && std::is_trivially_copyable_v<RankSlot>);

inline constexpr uint64_t kBoardAlarmAt = 64;
inline constexpr uint64_t kBoardDecisionAt = 128;
inline constexpr uint64_t kBoardSlotsAt = 256;

constexpr uint64_t SlotAt(uint32_t rank) { return kBoardSlotsAt + uint64_t{rank} * 64; }
constexpr uint64_t TrainerPulseAt(uint32_t rank) { return SlotAt(rank); }
constexpr uint64_t WorkerPulseAt(uint32_t rank) { return SlotAt(rank) + sizeof(RankPulse); }
/// Failures follow the slots, so that one read returns slots only.
constexpr uint64_t RankFailureAt(uint32_t rank, uint32_t world_size) {
  constexpr uint64_t kAlignment = 4096;
  const uint64_t begin = (SlotAt(world_size) + kAlignment - 1) / kAlignment * kAlignment;
  return begin + uint64_t{rank} * sizeof(RankFailure);
}

/// The part that a waiting rank reads: the head, the words behind it, and rank 0's slot.
struct BoardTop {
  BoardHead head;
  BoardAlarm alarm;
  char padding_1[kBoardDecisionAt - kBoardAlarmAt - sizeof(BoardAlarm)] = {};
  BoardDecision decision;
  char padding_2[kBoardSlotsAt - kBoardDecisionAt - sizeof(BoardDecision)] = {};
  RankSlot rank_zero;
};
static_assert(sizeof(BoardTop) == kBoardSlotsAt + sizeof(RankSlot));

/// The code of a rank that ends because of another rank's failure.
constexpr FailureCode CodeFor(const RankFailure& failure) {
  return failure.kind == static_cast<uint32_t>(RankFailureKind::kDiffers)
             ? FailureCode::kFailedPrecondition
             : FailureCode::kAborted;
}

/// Combined state of a rank's two processes.
constexpr RankState StateOf(const RankSlot& slot) {
  const auto is = [&slot](RankState state) {
    return slot.trainer.state == static_cast<uint32_t>(state) ||
           slot.worker.state == static_cast<uint32_t>(state);
  };
  if (is(RankState::kFailed)) return RankState::kFailed;
  if (is(RankState::kVoted)) return RankState::kVoted;
  return is(RankState::kJoined) ? RankState::kJoined : RankState::kAbsent;
}

/// FNV-1a of all bytes behind `check`. Detects torn reads, not deliberate damage.
inline uint64_t CheckOf(const RankFailure& failure) {
  constexpr uint64_t kBasis = 0xcbf2'9ce4'8422'2325;
  constexpr uint64_t kPrime = 0x100'0000'01b3;
  const auto* const bytes = reinterpret_cast<const unsigned char*>(&failure);
  uint64_t hash = kBasis;
  for (uint64_t i = sizeof(failure.check); i < sizeof(failure); ++i) {
    hash = (hash ^ bytes[i]) * kPrime;
  }
  return hash;
}

}  // namespace holdfast::layout

#endif  // HOLDFAST_RUNTIME_LAYOUT_BOARD_H_
