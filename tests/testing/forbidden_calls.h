// System calls that fail, as the filters of container engines let them.
#ifndef HOLDFAST_TESTS_TESTING_FORBIDDEN_CALLS_H_
#define HOLDFAST_TESTS_TESTING_FORBIDDEN_CALLS_H_

#include <initializer_list>

namespace holdfast::testing {

/// Makes the system calls `numbers` fail with `error` in this process and its children, for good.
/// Returns false where the kernel takes no filters.
bool ForbidCalls(std::initializer_list<int> numbers, int error);

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_TESTING_FORBIDDEN_CALLS_H_
