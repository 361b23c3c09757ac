// A training process that has no memory for a moment.
#include <atomic>
#include <cstdlib>
#include <new>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "tests/testing/child_process.h"
#include "tests/testing/save_test.h"

namespace {

std::atomic<bool> g_none = false;
thread_local bool t_spared = false;

}  // namespace

// Inlined, they would look like a mismatch to the compiler.
[[gnu::noinline]] void* operator new(size_t bytes) {
  if (g_none && !t_spared) throw std::bad_alloc();
  void* const memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace holdfast::testing {
namespace {

class NoMemory : public SaveTest {};

// Each thread of the training process meets the end of memory, but the test's own. An exception in
// a thread would end the process.
TEST_F(NoMemory, OfThreadsForAMomentLetsASaveGoOn) {
  t_spared = true;
  CheckpointerOptions options = SmallOptions(directory());
  options.staging.arena_bytes = 32u << 20;
  options.launcher = Launcher::kSpawn;
  options.qos.bytes_per_second_max = 4u << 20;
  const auto checkpointer = Make(options);
  ASSERT_NE(checkpointer, nullptr);
  const TrainingState state = TrainingState::Uniform(3, 4u << 20, 1);
  const auto save = Begin(checkpointer.get(), "step-1", state);
  ASSERT_TRUE(save.ok()) << save.status();
  ASSERT_TRUE(WaitFor([&] { return save->progress().bytes_written > 0; }));
  g_none = true;
  absl::SleepFor(absl::Milliseconds(300));
  g_none = false;
  EXPECT_FALSE(save->IsDone());
  const auto report = save->WaitDurable(kLong);
  EXPECT_TRUE(report.ok()) << report.status();
  ExpectMemoryBack(checkpointer.get());
}

}  // namespace
}  // namespace holdfast::testing
