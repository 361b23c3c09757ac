// A fault of a real GPU's context, in a program of its own: a process cannot use the GPU after it.
// The fault is a kernel that writes to address 0, queued before a copy.
#include <iostream>
#include <vector>

#include "gtest/gtest.h"
#include "holdfast/device.h"
#include "tests/testing/gpu_driver.h"

namespace holdfast::testing {
namespace {

constexpr char kFaultyKernel[] = R"(
.version 6.0
.target sm_50
.address_size 64
.visible .entry fault()
{
  .reg .b64 %address;
  .reg .b32 %value;
  mov.u64 %address, 0;
  mov.u32 %value, 1;
  st.global.u32 [%address], %value;
  ret;
}
)";

TEST(CudaLostContext, EndsTheCopiesBehindItAndEveryLaterCall) {
  constexpr size_t kBytes = 1 << 20;
  auto gpu = GpuDriver::Open(kEveryGpu[0]);
  if (!gpu.ok()) GTEST_SKIP() << "no GPU: " << gpu.status();
  std::cout << (*gpu)->Describe() << std::endl;
  const absl::StatusOr<Device*> device = CudaDevice(0);
  ASSERT_TRUE(device.ok()) << device.status();
  std::vector<char> arena(kBytes);
  ASSERT_TRUE((*device)->RegisterMemory(arena.data(), kBytes).ok());
  const device::GpuStream stream = (*gpu)->MakeStream();
  char* const tensor = (*gpu)->Allocate(kBytes);
  (*gpu)->RunKernel(kFaultyKernel, "fault", stream);
  ASSERT_TRUE((*device)->OrderAfter(stream).ok());
  const absl::StatusOr<CopyTicket> ticket = (*device)->CopyToHost(arena.data(), tensor, kBytes);
  // The copy may have been refused already; else its wait reports the fault.
  const absl::Status fault =
      ticket.ok() ? (*device)->Wait(*ticket, absl::Seconds(60)) : ticket.status();
  std::cout << "the fault: " << fault << std::endl;
  EXPECT_FALSE(fault.ok());
  EXPECT_NE((*gpu)->TrySynchronize(stream), device::GpuCode::kSuccess);
  EXPECT_TRUE(absl::IsAborted((*device)->CopyToHost(arena.data(), tensor, kBytes).status()));
  EXPECT_TRUE(absl::IsAborted((*device)->MakeStreamWait(stream)));
  EXPECT_TRUE(absl::IsAborted((*device)->UnregisterMemory(arena.data(), kBytes)));
}

}  // namespace
}  // namespace holdfast::testing
