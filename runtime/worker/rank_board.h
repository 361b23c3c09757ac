// The rank board as a file: opening it, and reading and writing its ranges.
//
// Used by workers and by trainers (runtime/checkpointer/rank_presence.cc). What the ranges mean is
// in runtime/layout/board.h; what a worker does about them in ranks.cc.
#ifndef HOLDFAST_RUNTIME_WORKER_RANK_BOARD_H_
#define HOLDFAST_RUNTIME_WORKER_RANK_BOARD_H_

#include <cstddef>
#include <cstdint>

#include "holdfast/pod.h"
#include "runtime/layout/board.h"

namespace holdfast::worker {

struct RankBoard {
  int fd = -1;
  /// For reads of whole blocks past a page cache that may hide other machines' writes; -1: `fd`
  /// needs no help.
  int block_fd = -1;
  uint32_t rank = 0;
  uint32_t world_size = 0;

  bool is_open() const { return fd >= 0; }
};

/// Opens the board of `attempt` below `directory`, or makes it. Returns 0 or an errno; EPROTO when
/// the board there is of another version, world size or attempt.
int OpenBoard(int directory, const AttemptId& attempt, uint32_t rank, uint32_t world_size,
              RankBoard* board);
void CloseBoard(RankBoard* board);

/// Which process of the rank writes.
enum class Side { kTrainer, kWorker };

/// Publishes this rank's state as `side` sees it, and a sign of life. False with errno.
bool WritePulse(const RankBoard& board, Side side, layout::RankState state,
                uint32_t silent_s_max = 0);

/// Publishes that this rank has failed. `raise`: other ranks are to see it; not for a rank that
/// ends because of a failure that they see already. False with errno.
bool WriteFailure(const RankBoard& board, Side side, layout::RankFailure failure, bool raise);

/// Rank 0's word. False with errno.
bool WriteDecision(const RankBoard& board, layout::Decision decision);

/// False if less than all of it could be read.
bool ReadTop(const RankBoard& board, layout::BoardTop* top);
/// Slots of the ranks from `first` on, as many as `count`. False if not all could be read.
bool ReadSlots(const RankBoard& board, uint32_t first, uint32_t count, layout::RankSlot* slots);
/// The failure that stands in the slot of `rank`; kUnknown if it is torn or names no rank.
layout::RankFailure ReadFailure(const RankBoard& board, uint32_t rank);

/// Whether every rank has failed, so that none can come late: the board may go.
bool AllHaveFailed(const RankBoard& board, char* buffer, uint32_t buffer_bytes);

/// Copies `text`, UTF-8, to `bytes` bytes at `out`, cut at a character's border and terminated.
void CopyText(const char* text, char* out, size_t bytes);
/// The same, into the record.
void SetText(layout::RankFailure* failure, const char* text);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_RANK_BOARD_H_
