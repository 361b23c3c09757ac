#include "runtime/base/thread.h"

#include <cerrno>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/sys/system.h"

namespace holdfast::base {
namespace {

int NoThread(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*) { return EAGAIN; }

TEST(Thread, ThatIsRefusedNamesEveryLimitThatCanRefuseIt) {
  sys::g_system.thread_create = NoThread;
  Thread thread;
  const absl::Status status = thread.Start([] {});
  sys::g_system = sys::kKernel;
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  // No room for the stack is EAGAIN, too.
  for (const char* const limit : {"ulimit -u", "ulimit -v", "pids.max"})
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(limit));
}

}  // namespace
}  // namespace holdfast::base
