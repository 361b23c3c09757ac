// The next step of a transfer after each result.
#include "io_uring/transfer.h"

#include <gtest/gtest.h>

#include <cerrno>

namespace holdfast::io {
namespace {

Transfer Make(Opcode opcode, uint32_t bytes) {
  static char buffer[1];
  return {.request = {.opcode = opcode, .fd = 3, .buffer = buffer, .offset = 8192, .bytes = bytes}};
}

TEST(Transfer, EndsWithAllBytes) {
  Transfer transfer = Make(Opcode::kWrite, 8192);
  EXPECT_EQ(transfer.Advance(8192), Next::kFinished);
  EXPECT_EQ(transfer.End().bytes, 8192u);
  EXPECT_EQ(transfer.End().error, 0);
}

TEST(Transfer, GoesOnAtTheBlockBoundaryAfterAShortResult) {
  Transfer transfer = Make(Opcode::kWrite, 16384);
  EXPECT_EQ(transfer.Advance(5000), Next::kAgain);
  EXPECT_EQ(transfer.offset(), 8192u + 4096u);
  EXPECT_EQ(transfer.bytes(), 16384u - 4096u);
  EXPECT_EQ(transfer.buffer(), static_cast<char*>(transfer.request.buffer) + 4096);
  EXPECT_EQ(transfer.Advance(16384 - 4096), Next::kFinished);
  EXPECT_EQ(transfer.End().bytes, 16384u);
}

TEST(Transfer, DoesNotCountRepeatedBytesTwice) {
  Transfer transfer = Make(Opcode::kWrite, 16384);
  EXPECT_EQ(transfer.Advance(5000), Next::kAgain);
  EXPECT_EQ(transfer.Advance(1000), Next::kAgain);  // to 5096
  EXPECT_EQ(transfer.done, 5096u);
}

TEST(Transfer, NeverCountsMoreThanWasAskedFor) {
  Transfer transfer = Make(Opcode::kWrite, 4096);
  EXPECT_EQ(transfer.Advance(1 << 20), Next::kFinished);
  EXPECT_EQ(transfer.End().bytes, 4096u);
}

TEST(Transfer, ReadThatGetsNoFurtherIsAtTheEndOfTheFile) {
  Transfer transfer = Make(Opcode::kRead, 12288);
  EXPECT_EQ(transfer.Advance(10000), Next::kAgain);
  EXPECT_EQ(transfer.Advance(10000 - 8192), Next::kFinished);
  EXPECT_EQ(transfer.End().bytes, 10000u);
  EXPECT_EQ(transfer.End().error, 0);
}

TEST(Transfer, WriteThatGetsNoFurtherTriesTheExactByteForTheRealError) {
  Transfer transfer = Make(Opcode::kWrite, 8192);
  EXPECT_EQ(transfer.Advance(4196), Next::kAgain);
  EXPECT_EQ(transfer.Advance(100), Next::kAgain);
  EXPECT_EQ(transfer.offset(), 8192u + 4196u);
  EXPECT_EQ(transfer.Advance(-EFBIG), Next::kFinished);
  EXPECT_EQ(transfer.End().error, EFBIG);
  EXPECT_EQ(transfer.End().bytes, 4196u);
}

TEST(Transfer, ExactByteRefusedByDirectIoIsAnIoError) {
  Transfer transfer = Make(Opcode::kWrite, 8192);
  EXPECT_EQ(transfer.Advance(4196), Next::kAgain);
  EXPECT_EQ(transfer.Advance(100), Next::kAgain);
  EXPECT_EQ(transfer.Advance(-EINVAL), Next::kFinished);
  EXPECT_EQ(transfer.End().error, EIO);
}

TEST(Transfer, WriteOfNothingIsAnError) {
  Transfer transfer = Make(Opcode::kWrite, 8192);
  EXPECT_EQ(transfer.Advance(0), Next::kFinished);
  EXPECT_EQ(transfer.End().error, EIO);
}

TEST(Transfer, RetriesInterruptionsWithABound) {
  for (const int error : {EINTR, EAGAIN}) {
    Transfer transfer = Make(Opcode::kWrite, 4096);
    uint32_t attempts = 1;
    while (transfer.Advance(-error) == Next::kAgain) ++attempts;
    EXPECT_EQ(attempts, kRefusalsMax + 1);
    EXPECT_EQ(transfer.End().error, error);
  }
}

TEST(Transfer, ProgressBeginsTheCountOfRefusalsAnew) {
  Transfer transfer = Make(Opcode::kWrite, 8192);
  EXPECT_EQ(transfer.Advance(-EINTR), Next::kAgain);
  EXPECT_EQ(transfer.Advance(4096), Next::kAgain);
  EXPECT_EQ(transfer.refusals, 0u);
}

}  // namespace
}  // namespace holdfast::io
