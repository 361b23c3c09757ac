// The rank board, to which every rank of a save writes: as workers and trainers read it, and as
// `holdfast top` reads it.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "fuzz/expect.h"
#include "fuzz/input.h"
#include "fuzz/planted.h"
#include "holdfast/watch.h"
#include "runtime/base/status.h"
#include "runtime/layout/board.h"
#include "runtime/worker/rank_board.h"

namespace {

using namespace holdfast::layout;  // NOLINT: a fuzzer of this namespace
using holdfast::fuzz::Input;
using holdfast::worker::RankBoard;

constexpr holdfast::AttemptId kAttempt = {.high = 1, .low = 2};
constexpr size_t kFailuresMax = 4;

enum Shape : uint8_t {
  kOtherHead = 1,  // any bytes instead of a sound head
  kCut = 2,        // a file that ends early
};

std::string Board(Input* input, uint32_t world_size) {
  const uint8_t shape = input->Byte();
  std::string board(RankFailureAt(world_size, world_size), '\0');
  BoardHead head{.world_size = world_size, .attempt = kAttempt};
  if ((shape & kOtherHead) != 0) input->Take(&head, sizeof(head));
  std::memcpy(board.data(), &head, sizeof(head));
  input->Take(&board[kBoardAlarmAt], sizeof(BoardAlarm));
  input->Take(&board[kBoardDecisionAt], sizeof(BoardDecision));
  for (size_t i = input->Below(kFailuresMax + 1); i-- > 0;) {
    RankFailure failure;
    const uint64_t at = RankFailureAt(static_cast<uint32_t>(input->Below(world_size)), world_size);
    const bool whole = input->Byte() % 4 != 0;
    input->Take(&failure, sizeof(failure));
    if (whole) failure.check = CheckOf(failure);
    std::memcpy(&board[at], &failure, sizeof(failure));
  }
  input->Take(&board[kBoardSlotsAt], uint64_t{world_size} * sizeof(RankSlot));
  if ((shape & kCut) != 0) board.resize(input->Below(board.size()));
  return board;
}

RankFailure FailureOf(const RankBoard& board, uint32_t rank) {
  RankFailure failure;
  const auto at = static_cast<off_t>(RankFailureAt(rank, board.world_size));
  // As if a record were taken without a look at its check.
  if (holdfast::fuzz::Planted() && rank < board.world_size &&
      pread(board.fd, &failure, sizeof(failure), at) == sizeof(failure)) {
    return failure;
  }
  return holdfast::worker::ReadFailure(board, rank);
}

void ReadAsRank(const RankBoard& board) {
  BoardTop top;
  HOLDFAST_EXPECT(holdfast::worker::ReadTop(board, &top));
  std::vector<RankSlot> slots(board.world_size);
  HOLDFAST_EXPECT(holdfast::worker::ReadSlots(board, 0, board.world_size, slots.data()));
  HOLDFAST_EXPECT(std::memcmp(&slots[0], &top.rank_zero, sizeof(RankSlot)) == 0);
  bool all_failed = true;
  for (const RankSlot& slot : slots) all_failed = all_failed && StateOf(slot) == RankState::kFailed;
  alignas(RankSlot) std::array<char, 3 * sizeof(RankSlot)> buffer;
  HOLDFAST_EXPECT(holdfast::worker::AllHaveFailed(board, buffer.data(), buffer.size()) ==
                  all_failed);
  // The alarm's rank too, which may be none.
  for (const uint32_t rank : {uint32_t{0}, board.world_size - 1, top.alarm.failed - 1}) {
    const RankFailure failure = FailureOf(board, rank);
    HOLDFAST_EXPECT(std::memchr(failure.text, 0, sizeof(failure.text)) != nullptr);
    HOLDFAST_EXPECT(failure.rank < board.world_size ||
                    failure.kind == static_cast<uint32_t>(RankFailureKind::kUnknown));
    HOLDFAST_EXPECT(!holdfast::base::Describe(failure).empty());
    HOLDFAST_EXPECT(CodeFor(failure) != holdfast::FailureCode::kOk);
  }
}

void ReadAsWatcher(const RankBoard& board, const std::string& bytes) {
  const auto ranks = holdfast::ReadRanksWaitedFor(board.fd, kAttempt, board.world_size);
  const BoardHead sound{.world_size = board.world_size, .attempt = kAttempt};
  constexpr size_t kCompared = offsetof(BoardHead, reserved);
  const bool is_sound =
      bytes.size() >= sizeof(sound) && std::memcmp(bytes.data(), &sound, kCompared) == 0;
  HOLDFAST_EXPECT(ranks.ok() == is_sound);
  if (!ranks.ok()) {
    HOLDFAST_EXPECT(absl::IsFailedPrecondition(ranks.status()));
    return;
  }
  HOLDFAST_EXPECT(!ranks->empty() && std::is_sorted(ranks->begin(), ranks->end()));
  HOLDFAST_EXPECT(ranks->back() < board.world_size);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  static RankBoard board = {.fd = memfd_create("board", MFD_CLOEXEC)};
  Input input(data, bytes);
  board.world_size = static_cast<uint32_t>(1 + input.Below(40));
  board.rank = static_cast<uint32_t>(input.Below(board.world_size));
  const std::string file = Board(&input, board.world_size);
  HOLDFAST_EXPECT(ftruncate(board.fd, static_cast<off_t>(file.size())) == 0);
  HOLDFAST_EXPECT(pwrite(board.fd, file.data(), file.size(), 0) ==
                  static_cast<ssize_t>(file.size()));
  ReadAsRank(board);
  ReadAsWatcher(board, file);
  return 0;
}
