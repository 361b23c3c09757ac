#include "runtime/base/thread.h"

#include <sys/resource.h>

#include <cerrno>
#include <chrono>
#include <fstream>
#include <memory>
#include <new>
#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/sys/system.h"
#include "tests/testing/sanitizers.h"

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

constexpr size_t kBytes = size_t{256} << 20;

/// During its life, this process gets fewer than `kBytes` more.
class LittleMemory {
 public:
  LittleMemory() {
    getrlimit(RLIMIT_AS, &before_);
    size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlimit less = {pages * 4096 + kBytes / 2, before_.rlim_max};
    setrlimit(RLIMIT_AS, &less);
  }
  ~LittleMemory() { setrlimit(RLIMIT_AS, &before_); }

 private:
  rlimit before_{};
};

TEST(Thread, WaitsForMemoryThatItDoesNotGet) {
  if (testing::kAnySanitizer) GTEST_SKIP() << "a sanitizer has an operator new of its own";
  bool got = false;
  Thread thread;
  ASSERT_TRUE(thread.Start([] {}).ok());
  thread.Join();
  {
    const LittleMemory limit;
    ASSERT_TRUE(thread.Start([&got] { got = std::make_unique<char[]>(kBytes) != nullptr; }).ok());
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    EXPECT_THROW(std::make_unique<char[]>(kBytes), std::bad_alloc);  // A thread of the host.
  }
  thread.Join();
  EXPECT_TRUE(got);
}

}  // namespace
}  // namespace holdfast::base
