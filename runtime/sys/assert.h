// HOLDFAST_ASSERT, for conditions that only wrong code or damaged memory can break. Active in every
// build type, below the fork line, where no failure may abort the trainer.
//
// Bad input, a full disk and a damaged shared index are errors, not assertions.
#ifndef HOLDFAST_RUNTIME_SYS_ASSERT_H_
#define HOLDFAST_RUNTIME_SYS_ASSERT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace holdfast::sys {

/// The text that a failed assertion of a worker leaves, and the way in which the worker ends.
struct LastWords {
  char* text = nullptr;  ///< Shared with the trainer; null between two jobs.
  size_t bytes = 0;
  std::atomic<uint32_t>* said = nullptr;  ///< Set to 1 (release) after `text` is written.
  bool in_trainer = false;                ///< The worker is a thread of the trainer's process.
};

/// Sets the calling thread's last words, which must outlive the thread; null: not a worker.
void SetLastWords(const LastWords* words);
const LastWords* GetLastWords();

/// Ends the worker. A worker process ends with kExitAssertion. A worker thread sleeps for ever:
/// memory in reach of its transfers must never count as free. A thread without a worker (a load)
/// prints the text and aborts the process.
[[noreturn]] void AssertionFailed(const char* text);

/// Exit status of a worker process after a failed assertion.
inline constexpr int kExitAssertion = 73;

}  // namespace holdfast::sys

#define HOLDFAST_ASSERT_TEXT_OF(line) #line
#define HOLDFAST_ASSERT_TEXT(line, condition) \
  __FILE_NAME__ ":" HOLDFAST_ASSERT_TEXT_OF(line) ": " condition
#define HOLDFAST_ASSERT(condition) \
  ((condition) ? (void)0           \
               : ::holdfast::sys::AssertionFailed(HOLDFAST_ASSERT_TEXT(__LINE__, #condition)))

#endif  // HOLDFAST_RUNTIME_SYS_ASSERT_H_
