// The rank board: one small file in the partial directory of a save of several ranks, in which
// every rank says how its part stands.
//
// Workers and trainers read and write it by pread(2) and pwrite(2) on an fd that stays open, so
// that waiting costs data calls and no lookups. Each range has one writer: a rank's trainer, a
// rank's worker, or rank 0. Nothing in it is fsynced and nothing on disk is judged by it: a vote is
// a durable manifest, and a checkpoint is what FORMAT.md section 1 says. FORMAT.md has the bytes.
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

/// The first bytes. Every rank writes the same ones, so that it does not matter who comes first.
struct BoardHead {
  uint64_t magic = kBoardMagic;
  uint32_t version = kBoardVersion;
  uint32_t world_size = 0;
  AttemptId attempt;
  uint64_t reserved[4] = {};
};

/// Points at the slot of a rank that has failed. Written by the failing rank; of several the last
/// one stays, and any of them is right.
struct BoardAlarm {
  uint32_t failed = 0;  ///< 1 + the rank; 0: none.
  uint32_t reserved = 0;
};

enum class Decision : uint32_t {
  kNone = 0,
  kCommitting = 1,  ///< Rank 0 has all votes and renames unless it finds a failure now.
  kCommitted = 2,   ///< The final name stands.
};

/// Written by rank 0 alone.
struct BoardDecision {
  uint32_t decision = 0;
  uint32_t reserved = 0;
};

enum class RankState : uint32_t {
  kAbsent = 0,
  kJoined = 1,
  kVoted = 2,   ///< The rank's manifest is durable. Written by workers alone.
  kFailed = 3,  ///< The rank's RankFailure was written before.
};

/// A sign of life of one process of one rank.
struct RankPulse {
  uint32_t state = 0;  ///< RankState
  /// While it is not 0, this process may be silent for so many seconds: it is inside one fsync.
  uint32_t silent_s_max = 0;
  uint64_t beat = 0;  ///< Any value; each sign of life changes it.
  uint64_t reserved[2] = {};
};

/// A rank: each of its two processes has a range of its own.
struct RankSlot {
  RankPulse trainer;
  RankPulse worker;
};

enum class RankFailureKind : uint32_t {
  kUnknown = 0,  ///< What was read is torn or damaged.
  kFailed = 1,   ///< It failed by itself: code, operation, error_number, text.
  kSilent = 2,   ///< None of its processes gives a sign of life.
  kAbsent = 3,   ///< It has not begun the save.
  kSlow = 4,     ///< It lives and has not voted within time_ranks_max.
  kFenced = 5,   ///< A recovery has taken the directory away; said by rank 0.
};

/// Why the save cannot go on, in the words of the rank that says it.
struct RankFailure {
  uint64_t check = 0;  ///< CheckOf the rest: a record that is read while it is written is refused.
  uint32_t rank = 0;   ///< The rank at fault, which need not be the one that says it.
  uint32_t kind = 0;   ///< RankFailureKind
  int32_t code = 0;    ///< FailureCode
  uint32_t operation = 0;  ///< Operation
  int32_t error_number = 0;
  uint32_t seconds = 0;  ///< The time that has passed, for the kinds that are a deadline's.
  /// 1: the slot's rank has not voted and never will (rank 0: has not renamed and never will), so
  /// that the save cannot be committed any more.
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
/// Failures stand behind all slots, so that one read of slots has nothing else.
constexpr uint64_t RankFailureAt(uint32_t rank, uint32_t world_size) {
  constexpr uint64_t kAlignment = 4096;
  const uint64_t begin = (SlotAt(world_size) + kAlignment - 1) / kAlignment * kAlignment;
  return begin + uint64_t{rank} * sizeof(RankFailure);
}

/// What a waiting rank reads each time: the head, the words behind it, and the slot of rank 0.
struct BoardTop {
  BoardHead head;
  BoardAlarm alarm;
  char padding_1[kBoardDecisionAt - kBoardAlarmAt - sizeof(BoardAlarm)] = {};
  BoardDecision decision;
  char padding_2[kBoardSlotsAt - kBoardDecisionAt - sizeof(BoardDecision)] = {};
  RankSlot rank_zero;
};
static_assert(sizeof(BoardTop) == kBoardSlotsAt + sizeof(RankSlot));

/// What both processes of a rank say together.
constexpr RankState StateOf(const RankSlot& slot) {
  const auto is = [&slot](RankState state) {
    return slot.trainer.state == static_cast<uint32_t>(state) ||
           slot.worker.state == static_cast<uint32_t>(state);
  };
  if (is(RankState::kFailed)) return RankState::kFailed;
  if (is(RankState::kVoted)) return RankState::kVoted;
  return is(RankState::kJoined) ? RankState::kJoined : RankState::kAbsent;
}

/// FNV-1a of all bytes behind `check`. Against torn reads, not against damage by design.
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
