// The rank board as a file: opens it, and reads and writes its ranges.
//
// Workers and trainers use the board (runtime/checkpointer/rank_presence.cc).
// runtime/layout/board.h defines the ranges; ranks.cc holds the worker's reactions.
#ifndef HOLDFAST_RUNTIME_WORKER_RANK_BOARD_H_
#define HOLDFAST_RUNTIME_WORKER_RANK_BOARD_H_

#include <cstddef>
#include <cstdint>

#include "holdfast/pod.h"
#include "runtime/layout/board.h"

namespace holdfast::worker {

struct RankBoard {
  int fd = -1;
  /// Reads whole blocks past a page cache that may hide other machines' writes; -1: `fd` suffices.
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

/// The writing process of the rank.
enum class Side { kTrainer, kWorker };

/// Publishes this rank's state as `side` sees it, and a heartbeat. Returns false with errno.
bool WritePulse(const RankBoard& board, Side side, layout::RankState state,
                uint32_t silent_s_max = 0);

/// Publishes this rank's failure. `raise` shows the failure to other ranks; false for a rank that
/// ends because of a failure on the board. Returns false with errno.
bool WriteFailure(const RankBoard& board, Side side, layout::RankFailure failure, bool raise);

/// Rank 0's word. False with errno.
bool WriteDecision(const RankBoard& board, layout::Decision decision);

/// Returns false if the read is short.
bool ReadTop(const RankBoard& board, layout::BoardTop* top);
/// Reads `count` slots of the ranks from `first` on. Returns false if the read is short.
bool ReadSlots(const RankBoard& board, uint32_t first, uint32_t count, layout::RankSlot* slots);
/// Returns the failure in the slot of `rank`; kUnknown if the record is torn or names no rank.
layout::RankFailure ReadFailure(const RankBoard& board, uint32_t rank);

/// Returns true when every rank has failed. No rank can come late then, and the board may be
/// removed.
bool AllHaveFailed(const RankBoard& board, char* buffer, uint32_t buffer_bytes);

/// Copies `text`, UTF-8, to `bytes` bytes at `out`, cut at a character's border and terminated.
void CopyText(const char* text, char* out, size_t bytes);
/// The same, into the record.
void SetText(layout::RankFailure* failure, const char* text);

}  // namespace holdfast::worker

#endif  // HOLDFAST_RUNTIME_WORKER_RANK_BOARD_H_
