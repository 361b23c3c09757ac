// The host as a device, and GPUs that no machine has.
#include <cstring>

#include "gtest/gtest.h"
#include "holdfast/device.h"

namespace holdfast {
namespace {

TEST(HostDevice, CopiesAreDoneWhenTheCallReturns) {
  Device* const host = HostDevice();
  EXPECT_EQ(host->name(), "host");
  EXPECT_TRUE(host->is_host());
  const char source[] = "tensor";
  char destination[sizeof(source)] = {};
  const absl::StatusOr<CopyTicket> ticket = host->CopyToHost(destination, source, sizeof(source));
  ASSERT_TRUE(ticket.ok());
  EXPECT_STREQ(destination, "tensor");
  EXPECT_TRUE(*host->IsDone(*ticket));
  EXPECT_TRUE(host->Wait(*ticket, absl::ZeroDuration()).ok());

  std::memset(destination, 0, sizeof(destination));
  ASSERT_TRUE(host->CopyFromHost(destination, source, sizeof(source)).ok());
  EXPECT_STREQ(destination, "tensor");
}

TEST(HostDevice, AnEmptyTensorNeedsNoAddress) {
  EXPECT_TRUE(HostDevice()->CopyToHost(nullptr, nullptr, 0).ok());
}

TEST(HostDevice, RefusesNullPointersAndUnknownTickets) {
  char byte = 0;
  EXPECT_EQ(HostDevice()->CopyToHost(&byte, nullptr, 1).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(HostDevice()->CopyToHost(nullptr, &byte, 1).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(HostDevice()->IsDone(7).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(HostDevice, HasNothingToRegisterOrToOrder) {
  char memory[64];
  EXPECT_TRUE(HostDevice()->RegisterMemory(memory, sizeof(memory)).ok());
  EXPECT_TRUE(HostDevice()->OrderAfter(nullptr).ok());
  EXPECT_TRUE(HostDevice()->MakeStreamWait(nullptr).ok());
  EXPECT_TRUE(HostDevice()->UnregisterMemory(memory, sizeof(memory)).ok());
}

TEST(GpuDevices, OfNoMachineAreNotFoundAndNeverACrash) {
  for (const auto find : {&CudaDevice, &HipDevice}) {
    for (const int ordinal : {-1, 1 << 20}) {
      EXPECT_EQ(find(ordinal).status().code(), absl::StatusCode::kNotFound);
    }
  }
}

}  // namespace
}  // namespace holdfast
