#include "runtime/worker/rank_board.h"

#include <fcntl.h>
#include <sys/vfs.h>

#include <cerrno>
#include <cstring>

#include "runtime/sys/assert.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/retry.h"
#include "runtime/sys/system.h"

namespace holdfast::worker {
namespace {

constexpr int kLooksMax = 5;
constexpr long kPauseNs = 1'000'000;

/// Reads `bytes` or up to the end of the file; fills the rest with zeros.
bool ReadFrom(int fd, void* out, uint64_t bytes, uint64_t offset) {
  uint64_t done = 0;
  while (done < bytes) {
    const ssize_t got = sys::Uninterrupted([&] {
      return sys::Sys().pread(fd, static_cast<char*>(out) + done, bytes - done,
                              static_cast<off_t>(offset + done));
    });
    if (got < 0) return false;
    if (got == 0) break;
    done += static_cast<uint64_t>(got);
  }
  memset(static_cast<char*>(out) + done, 0, bytes - done);
  return true;
}

bool ReadAt(const RankBoard& board, void* out, uint64_t bytes, uint64_t offset) {
  if (board.block_fd < 0) return ReadFrom(board.fd, out, bytes, offset);
  alignas(kIoAlignment) char block[kIoAlignment];
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t at = offset + done;
    const uint64_t begin = at / kIoAlignment * kIoAlignment;
    if (!ReadFrom(board.block_fd, block, kIoAlignment, begin)) return false;
    const uint64_t there = begin + kIoAlignment - at;
    const uint64_t part = there < bytes - done ? there : bytes - done;
    HOLDFAST_ASSERT(part > 0 && at - begin + part <= kIoAlignment);
    memcpy(static_cast<char*>(out) + done, block + (at - begin), part);
    done += part;
  }
  return true;
}

bool WriteAt(const RankBoard& board, const void* from, uint64_t bytes, uint64_t offset) {
  HOLDFAST_ASSERT(board.is_open() && bytes > 0);
  const int error = sys::WriteAll(bytes, [&](uint64_t done) {
    return sys::Sys().pwrite(board.fd, static_cast<const char*>(from) + done, bytes - done,
                             static_cast<off_t>(offset + done));
  });
  if (error != 0) {
    errno = error;
    return false;
  }
  // Data held back in a page cache is invisible to other machines.
  constexpr unsigned kNow =
      SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
  if (board.block_fd >= 0) (void)sys::Sys().sync_file_range(board.fd, 0, 0, kNow);
  return true;
}

/// Returns true when this machine's page cache may hide another machine's writes for seconds.
/// O_DIRECT is the only way around the cache there, and needs no alignment.
bool CachesAlone(int fd) {
  constexpr uint32_t kNfs = 0x6969;
  constexpr uint32_t kFuse = 0x65735546;
  constexpr uint32_t kCifs = 0xff534d42;
  constexpr uint32_t kSmb2 = 0xfe534d42;
  struct statfs found = {};
  if (sys::Sys().fstatfs(fd, &found) != 0) return false;
  const auto magic = static_cast<uint32_t>(found.f_type);
  return magic == kNfs || magic == kFuse || magic == kCifs || magic == kSmb2;
}

bool HasOnlyZeros(const layout::BoardHead& head) {
  const char* const bytes = reinterpret_cast<const char*>(&head);
  for (size_t i = 0; i < sizeof(head); ++i) {
    if (bytes[i] != 0) return false;
  }
  return true;
}

/// Writes the head of a new board, or compares the head of an existing board. Returns 0 or an
/// errno.
int AgreeOnHead(const RankBoard& board, const AttemptId& attempt) {
  layout::BoardHead head;
  head.world_size = board.world_size;
  head.attempt = attempt;
  // A read may see part of a head that another rank is writing.
  for (int look = 0; look < kLooksMax; ++look) {
    layout::BoardHead found;
    if (!ReadAt(board, &found, sizeof(found), 0)) return errno;
    if (HasOnlyZeros(found)) return WriteAt(board, &head, sizeof(head), 0) ? 0 : errno;
    if (memcmp(&found, &head, sizeof(head)) == 0) return 0;
    const struct timespec pause = {.tv_sec = 0, .tv_nsec = kPauseNs};
    sys::Sys().nanosleep(&pause, nullptr);
  }
  return EPROTO;
}

/// Opens the file once more past the cache, where possible. Returns true when the heads agree. Some
/// file systems transfer only whole blocks past the cache: reads use the second descriptor there,
/// and writes are flushed.
bool OpenPastCache(int directory, const AttemptId& attempt, RankBoard* board) {
  if (!CachesAlone(board->fd)) return false;
  RankBoard direct = *board;
  direct.fd =
      sys::OpenOwned(directory, layout::kBoardName, O_RDWR | O_DIRECT | O_NOFOLLOW | O_CLOEXEC, 0);
  if (!direct.is_open()) return false;
  if (AgreeOnHead(direct, attempt) == 0) {
    sys::CloseOwned(board->fd);
    board->fd = direct.fd;
    return true;
  }
  board->block_fd = direct.fd;
  layout::BoardHead head;
  if (ReadAt(*board, &head, sizeof(head), 0)) return false;
  sys::CloseOwned(board->block_fd);
  board->block_fd = -1;
  return false;
}

uint64_t PulseAt(const RankBoard& board, Side side) {
  return side == Side::kTrainer ? layout::TrainerPulseAt(board.rank)
                                : layout::WorkerPulseAt(board.rank);
}

}  // namespace

int OpenBoard(int directory, const AttemptId& attempt, uint32_t rank, uint32_t world_size,
              RankBoard* board) {
  HOLDFAST_ASSERT(rank < world_size);
  *board = {.fd = -1, .rank = rank, .world_size = world_size};
  // Not O_EXCL: every rank writes the same head, and separate ranges behind it.
  board->fd = sys::OpenOwned(directory, layout::kBoardName,
                             O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, sys::kFileMode);
  if (!board->is_open()) return errno;
  int error = OpenPastCache(directory, attempt, board) ? 0 : AgreeOnHead(*board, attempt);
  if (error == 0) {
    // Allocates the blocks of the rank's record now: a rank could not publish a full disk
    // otherwise. An existing record of the trainer or the worker stays.
    const layout::RankFailure there = ReadFailure(*board, rank);
    const uint64_t at = layout::RankFailureAt(rank, world_size);
    if (there.check == 0 && !WriteAt(*board, &there, sizeof(there), at)) error = errno;
  }
  if (error != 0) CloseBoard(board);
  return error;
}

void CloseBoard(RankBoard* board) {
  if (board->is_open()) sys::CloseOwned(board->fd);
  if (board->block_fd >= 0) sys::CloseOwned(board->block_fd);
  board->fd = board->block_fd = -1;
}

bool WritePulse(const RankBoard& board, Side side, layout::RankState state, uint32_t silent_s_max) {
  layout::RankPulse pulse;
  pulse.state = static_cast<uint32_t>(state);
  pulse.silent_s_max = silent_s_max;
  pulse.beat = sys::NowNs();  // of this machine's clock alone: readers look for a change
  return WriteAt(board, &pulse, sizeof(pulse), PulseAt(board, side));
}

bool WriteFailure(const RankBoard& board, Side side, layout::RankFailure failure, bool raise) {
  HOLDFAST_ASSERT(board.is_open() && board.rank < board.world_size);
  HOLDFAST_ASSERT(failure.rank < board.world_size);
  failure.check = CheckOf(failure);
  // The record precedes the state that readers look for, and the alarm comes last.
  if (!WriteAt(board, &failure, sizeof(failure),
               layout::RankFailureAt(board.rank, board.world_size)) ||
      !WritePulse(board, side, layout::RankState::kFailed)) {
    return false;
  }
  if (!raise) return true;
  const layout::BoardAlarm alarm = {.failed = board.rank + 1};
  return WriteAt(board, &alarm, sizeof(alarm), layout::kBoardAlarmAt);
}

bool WriteDecision(const RankBoard& board, layout::Decision decision) {
  const layout::BoardDecision word = {.decision = static_cast<uint32_t>(decision)};
  return WriteAt(board, &word, sizeof(word), layout::kBoardDecisionAt);
}

bool ReadTop(const RankBoard& board, layout::BoardTop* top) {
  return ReadAt(board, top, sizeof(*top), 0);
}

bool ReadSlots(const RankBoard& board, uint32_t first, uint32_t count, layout::RankSlot* slots) {
  HOLDFAST_ASSERT(uint64_t{first} + count <= board.world_size);
  return ReadAt(board, slots, count * sizeof(layout::RankSlot), layout::SlotAt(first));
}

layout::RankFailure ReadFailure(const RankBoard& board, uint32_t rank) {
  layout::RankFailure failure;
  if (rank < board.world_size &&
      ReadAt(board, &failure, sizeof(failure), layout::RankFailureAt(rank, board.world_size)) &&
      failure.check != 0 && failure.check == CheckOf(failure) && failure.rank < board.world_size) {
    failure.text[sizeof(failure.text) - 1] = '\0';
    return failure;
  }
  failure = layout::RankFailure{};
  failure.rank = rank;
  return failure;
}

bool AllHaveFailed(const RankBoard& board, char* buffer, uint32_t buffer_bytes) {
  auto* const slots = reinterpret_cast<layout::RankSlot*>(buffer);
  const uint32_t at_once = buffer_bytes / uint32_t{sizeof(layout::RankSlot)};
  HOLDFAST_ASSERT(at_once > 0);
  for (uint32_t first = 0; first < board.world_size; first += at_once) {
    const uint32_t left = board.world_size - first;
    const uint32_t count = left < at_once ? left : at_once;
    if (!ReadSlots(board, first, count, slots)) return false;
    for (uint32_t i = 0; i < count; ++i) {
      if (StateOf(slots[i]) != layout::RankState::kFailed) return false;
    }
  }
  return true;
}

void CopyText(const char* text, char* out, size_t bytes) {
  HOLDFAST_ASSERT(bytes > 0);
  size_t length = 0;
  while (text[length] != '\0' && length < bytes - 1) ++length;
  if (text[length] != '\0') {
    // 10xxxxxx continues a character.
    while (length > 0 && (static_cast<unsigned char>(text[length]) & 0xc0) == 0x80) --length;
  }
  memcpy(out, text, length);
  out[length] = '\0';
}

void SetText(layout::RankFailure* failure, const char* text) {
  CopyText(text, failure->text, sizeof(failure->text));
}

}  // namespace holdfast::worker
