// The sanitizer of a test run, for the few tests without meaning under a sanitizer.
#ifndef HOLDFAST_TESTS_TESTING_SANITIZERS_H_
#define HOLDFAST_TESTS_TESTING_SANITIZERS_H_

namespace holdfast::testing {

#if defined(__has_feature)
#define HOLDFAST_TEST_HAS_FEATURE(feature) __has_feature(feature)
#else
#define HOLDFAST_TEST_HAS_FEATURE(feature) 0
#endif

/// Races are errors, and a child of a process with threads may not start threads.
inline constexpr bool kThreadSanitizer =
#if defined(__SANITIZE_THREAD__) || HOLDFAST_TEST_HAS_FEATURE(thread_sanitizer)
    true;
#else
    false;
#endif

/// Freed memory is kept for a while, and every byte has a shadow: sizes have no meaning.
inline constexpr bool kAnySanitizer =
#if defined(__SANITIZE_ADDRESS__) || HOLDFAST_TEST_HAS_FEATURE(address_sanitizer)
    true;
#else
    kThreadSanitizer;
#endif

#undef HOLDFAST_TEST_HAS_FEATURE

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_TESTING_SANITIZERS_H_
