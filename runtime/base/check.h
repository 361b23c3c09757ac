// CHECK, for conditions that only a wrong program can break. Active in every build type.
#ifndef HOLDFAST_RUNTIME_BASE_CHECK_H_
#define HOLDFAST_RUNTIME_BASE_CHECK_H_

namespace holdfast::base {
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition, const char* why);
}  // namespace holdfast::base

/// Aborts with file, line, condition and `why` (the corruption that the abort prevents).
#define HOLDFAST_CHECK(condition, why) \
  ((condition) ? (void)0 : ::holdfast::base::CheckFailed(__FILE__, __LINE__, #condition, (why)))

#endif  // HOLDFAST_RUNTIME_BASE_CHECK_H_
