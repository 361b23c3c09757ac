#include "tools/trainer/late_device.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace holdfast::trainer {
namespace {

constexpr std::chrono::hours kLong{1};
constexpr std::chrono::milliseconds kShort{5};

TEST(LateDevice, ReadsItsSourceAtTheEndOfACopy) {
  LateDevice device(1, kLong);
  char source = 'a';
  char destination = 0;
  const auto ticket = device.CopyToHost(&destination, &source, 1);
  ASSERT_TRUE(ticket.ok());
  EXPECT_FALSE(*device.IsDone(*ticket));
  EXPECT_EQ(device.Wait(*ticket, absl::Milliseconds(1)).code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(destination, 0);
  source = 'b';
  EXPECT_TRUE(device.MakeStreamWait(nullptr).ok());
  EXPECT_TRUE(*device.IsDone(*ticket));
  EXPECT_EQ(destination, 'b');
}

TEST(LateDevice, EndsCopiesInTheOrderOfTheSeed) {
  std::vector<std::vector<size_t>> orders;
  for (const uint64_t seed : {1, 1, 2}) {
    LateDevice device(seed, kShort * 10);
    const std::array<char, 8> source{};
    std::array<char, 8> destination{};
    std::vector<CopyTicket> tickets;
    for (size_t i = 0; i < source.size(); ++i)
      tickets.push_back(*device.CopyToHost(&destination[i], &source[i], 1));
    std::vector<size_t>& order = orders.emplace_back();
    while (order.size() < tickets.size()) {
      for (size_t i = 0; i < tickets.size(); ++i) {
        if (std::find(order.begin(), order.end(), i) == order.end() && *device.IsDone(tickets[i]))
          order.push_back(i);
      }
    }
  }
  EXPECT_FALSE(std::is_sorted(orders[0].begin(), orders[0].end()));
  EXPECT_NE(orders[0], orders[2]);
}

TEST(LateDevice, EndsACopyThatIsWaitedFor) {
  LateDevice device(1, kShort);
  const char source = 'a';
  char destination = 0;
  const auto ticket = device.CopyToHost(&destination, &source, 1);
  ASSERT_TRUE(ticket.ok());
  EXPECT_TRUE(device.Wait(*ticket, absl::Seconds(60)).ok());
  EXPECT_EQ(destination, 'a');
  EXPECT_EQ(*device.CopyFromHost(&destination, "c", 1), 0u);
  EXPECT_EQ(destination, 'c');
}

TEST(LateDevice, LosesOneCopyWithAnError) {
  LateDevice device(1, kShort);
  const std::array<char, 2> source = {'a', 'b'};
  std::array<char, 2> destination{};
  int told = 0;
  device.LoseNext([&told] { ++told; });
  const CopyTicket lost = *device.CopyToHost(&destination[0], &source[0], 1);
  const CopyTicket other = *device.CopyToHost(&destination[1], &source[1], 1);
  EXPECT_EQ(told, 0);
  EXPECT_EQ(device.Wait(lost, absl::Seconds(60)).code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(device.Wait(other, absl::Seconds(60)).ok());
  EXPECT_EQ(told, 1);
  EXPECT_TRUE(*device.IsDone(lost));  // the error is reported once
  EXPECT_EQ(destination, (std::array<char, 2>{'\0', 'b'}));
}

}  // namespace
}  // namespace holdfast::trainer
