// Which sanitizer a test runs under, for the few that cannot say anything then.
#ifndef HOLDFAST_TESTS_TESTING_SANITIZERS_H_
#define HOLDFAST_TESTS_TESTING_SANITIZERS_H_

namespace holdfast::testing {

#if defined(__has_feature)
#define HOLDFAST_TEST_HAS_FEATURE(feature) __has_feature(feature)
#else
#define HOLDFAST_TEST_HAS_FEATURE(feature) 0
#endif

/// Races are errors, and a child of a process with threads may not start any.
inline constexpr bool kThreadSanitizer =
#if defined(__SANITIZE_THREAD__) || HOLDFAST_TEST_HAS_FEATURE(thread_sanitizer)
    true;
#else
    false;
#endif

/// Memory that is freed is kept for a while, and every byte has a shadow: sizes mean nothing.
inline constexpr bool kAnySanitizer =
#if defined(__SANITIZE_ADDRESS__) || HOLDFAST_TEST_HAS_FEATURE(address_sanitizer)
    true;
#else
    kThreadSanitizer;
#endif

#undef HOLDFAST_TEST_HAS_FEATURE

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_TESTING_SANITIZERS_H_
