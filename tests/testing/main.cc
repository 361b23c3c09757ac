// The main of every test program. Like gtest's, but a program whose tests all skipped has its own
// exit status, so that "nothing ran" never counts as "passed".
#include "gmock/gmock.h"
#include "gtest/gtest.h"

// Asked for by TSan. Abseil's library is not instrumented: TSan sees that a shared Status is
// deleted there, and does not see the count of its owners, which orders the delete behind their
// reads. The name of an inlined call has no namespace.
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() {
  return "race:absl::*Status::Unref\nrace:^Unref$\n";
}

int main(int argc, char** argv) {
  ::testing::InitGoogleMock(&argc, argv);
  const int result = RUN_ALL_TESTS();
  const ::testing::UnitTest& tests = *::testing::UnitTest::GetInstance();
  constexpr int kSkipped = 77;  // As in automake; SKIP_RETURN_CODE in CMake.
  const bool all_skipped =
      tests.test_to_run_count() > 0 && tests.skipped_test_count() == tests.test_to_run_count();
  return result == 0 && all_skipped ? kSkipped : result;
}
