// The slow device: other tests depend on the unfinished copies.
#include "tests/testing/slow_device.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace holdfast::testing {
namespace {

class SlowDeviceTest : public ::testing::Test {
 protected:
  CopyTicket Start(char* destination, const char* source, size_t bytes) {
    const absl::StatusOr<CopyTicket> ticket = device_.CopyToHost(destination, source, bytes);
    EXPECT_TRUE(ticket.ok()) << ticket.status();
    return ticket.value_or(0);
  }
  std::string Arena(size_t begin, size_t bytes) const { return std::string(arena_ + begin, bytes); }

  SlowDevice device_;
  char arena_[64] = {};
};

TEST_F(SlowDeviceTest, BytesArriveOnlyAtTheTestsCommand) {
  char* const tensor = device_.Allocate(4);
  std::memcpy(tensor, "abcd", 4);
  const CopyTicket ticket = Start(arena_, tensor, 4);
  EXPECT_FALSE(*device_.IsDone(ticket));
  EXPECT_EQ(arena_[0], 0);
  device_.CompletePart(ticket, 2);
  EXPECT_EQ(Arena(0, 4), std::string("ab\0\0", 4));
  EXPECT_FALSE(*device_.IsDone(ticket));
  // A source change before the end reaches the copy, as with DMA.
  std::memcpy(tensor, "ABCD", 4);
  device_.Complete(ticket);
  EXPECT_TRUE(*device_.IsDone(ticket));
  EXPECT_EQ(Arena(0, 4), "abCD");
}

TEST_F(SlowDeviceTest, CopiesEndInAnyOrder) {
  char* const tensor = device_.Allocate(8);
  std::vector<CopyTicket> tickets;
  for (int i = 0; i < 4; ++i) tickets.push_back(Start(arena_ + 8 * i, tensor, 8));
  EXPECT_TRUE(device_.CompleteNewest());
  EXPECT_TRUE(*device_.IsDone(tickets[3]));
  EXPECT_FALSE(*device_.IsDone(tickets[0]));
  EXPECT_TRUE(device_.CompleteOldest());
  EXPECT_TRUE(*device_.IsDone(tickets[0]));
  EXPECT_EQ(device_.pending().size(), 2u);
  device_.CompleteAllShuffled(7);
  EXPECT_TRUE(device_.pending().empty());
  EXPECT_FALSE(device_.CompleteOldest());
}

TEST_F(SlowDeviceTest, AFailedCopyReportsItsErrorOnceAndDeliversHalf) {
  char* const tensor = device_.Allocate(4);
  std::memcpy(tensor, "abcd", 4);
  const CopyTicket ticket = Start(arena_, tensor, 4);
  device_.Fail(ticket, absl::InternalError("an illegal memory access"));
  EXPECT_EQ(device_.IsDone(ticket).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(Arena(0, 4), std::string("ab\0\0", 4));
  EXPECT_TRUE(*device_.IsDone(ticket));
}

TEST_F(SlowDeviceTest, CallsFailOnDemandAfterSkippingSome) {
  char* const tensor = device_.Allocate(4);
  device_.FailCall(SlowDevice::Call::kCopyToHost, absl::InternalError("no"), /*skip=*/1);
  EXPECT_TRUE(device_.CopyToHost(arena_, tensor, 4).ok());
  EXPECT_EQ(device_.CopyToHost(arena_, tensor, 4).status().message(), "no");
  EXPECT_TRUE(device_.CopyToHost(arena_, tensor, 4).ok());
  device_.FailCall(SlowDevice::Call::kUnregisterMemory, absl::InternalError("stuck"));
  ASSERT_TRUE(device_.RegisterMemory(arena_, sizeof(arena_)).ok());
  device_.CompleteAll();
  EXPECT_FALSE(device_.UnregisterMemory(arena_, sizeof(arena_)).ok());
  EXPECT_EQ(device_.registered().size(), 1u);
}

TEST_F(SlowDeviceTest, RefusesMemoryThatIsNotItsOwnAndTicketsThatItNeverGave) {
  char other[8] = {};
  EXPECT_EQ(device_.CopyToHost(arena_, other, 8).status().code(),
            absl::StatusCode::kInvalidArgument);
  char* const tensor = device_.Allocate(8);
  EXPECT_EQ(device_.CopyToHost(arena_, tensor, 9).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(device_.IsDone(1).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(SlowDeviceTest, RegistrationsAreRecordedAndHeldWhileCopiesUseThem) {
  char* const tensor = device_.Allocate(8);
  Start(arena_, tensor, 8);
  EXPECT_EQ(device_.copies_unregistered(), 1u);
  ASSERT_TRUE(device_.RegisterMemory(arena_, sizeof(arena_)).ok());
  Start(arena_ + 8, tensor, 8);
  EXPECT_EQ(device_.copies_unregistered(), 1u);
  EXPECT_EQ(device_.UnregisterMemory(arena_, sizeof(arena_)).code(),
            absl::StatusCode::kFailedPrecondition);
  device_.CompleteAll();
  EXPECT_TRUE(device_.UnregisterMemory(arena_, sizeof(arena_)).ok());
  const std::vector<SlowDevice::LogEntry> log = device_.log();
  ASSERT_EQ(log.size(), 4u);
  EXPECT_EQ(log[1].call, SlowDevice::Call::kRegisterMemory);
  EXPECT_EQ(log[3].call, SlowDevice::Call::kUnregisterMemory);
}

TEST_F(SlowDeviceTest, CopiesSeeTheWorkThatTheyWereOrderedAfter) {
  char* const tensor = device_.Allocate(1);
  const StreamHandle stream = device_.CreateStream();
  device_.Enqueue(stream, [=] { *tensor = 1; });
  ASSERT_TRUE(device_.OrderAfter(stream).ok());
  device_.Enqueue(stream, [=] { *tensor = 2; });
  device_.Complete(Start(arena_, tensor, 1));
  EXPECT_EQ(arena_[0], 1);
}

TEST_F(SlowDeviceTest, AStreamWaitsForItsCopies) {
  char* const tensor = device_.Allocate(1);
  *tensor = 1;
  const StreamHandle stream = device_.CreateStream();
  const CopyTicket ticket = Start(arena_, tensor, 1);
  ASSERT_TRUE(device_.MakeStreamWait(stream).ok());
  device_.Enqueue(stream, [=] { *tensor = 2; });
  EXPECT_EQ(device_.RunStream(stream), 2u);
  EXPECT_EQ(*tensor, 1);
  device_.Complete(ticket);
  EXPECT_EQ(arena_[0], 1);
  EXPECT_EQ(device_.RunStream(stream), 0u);
  EXPECT_EQ(*tensor, 2);
}

TEST_F(SlowDeviceTest, ReleasedMemoryIsOverwrittenAtOnceAndHandedOutAgain) {
  char* const tensor = device_.Allocate(8);
  *tensor = 1;
  device_.Release(tensor);
  EXPECT_EQ(*tensor, SlowDevice::kReleased);
  EXPECT_EQ(device_.Allocate(8), tensor);
}

TEST_F(SlowDeviceTest, WaitIsBoundedAndEndsWithTheCopy) {
  char* const tensor = device_.Allocate(8);
  const CopyTicket ticket = Start(arena_, tensor, 8);
  EXPECT_EQ(device_.Wait(ticket, absl::ZeroDuration()).code(), absl::StatusCode::kDeadlineExceeded);
  std::thread other([&] { device_.Complete(ticket); });
  EXPECT_TRUE(device_.Wait(ticket, absl::InfiniteDuration()).ok());
  other.join();
}

TEST_F(SlowDeviceTest, TheCompleterEndsEverything) {
  char* const tensor = device_.Allocate(1);
  device_.StartCompleter(/*seed=*/1);
  std::vector<CopyTicket> tickets;
  for (int i = 0; i < 50; ++i) tickets.push_back(Start(arena_ + i, tensor, 1));
  for (const CopyTicket ticket : tickets) {
    EXPECT_TRUE(device_.Wait(ticket, absl::Seconds(60)).ok());
  }
  device_.StopCompleter();
  EXPECT_EQ(std::count(arena_, arena_ + 50, SlowDevice::kFresh), 50);
  device_.CompleteAtOnce(true);
  EXPECT_TRUE(*device_.IsDone(Start(arena_, tensor, 1)));
}

}  // namespace
}  // namespace holdfast::testing
