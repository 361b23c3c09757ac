// HOLDFAST_ASSERT: for what cannot be false unless this code, or the memory that it stands in, is
// wrong. On in every build type, below the fork line, where nothing may abort the trainer.
//
// Bad input, a full disk and a damaged shared index are no assertion's matter: they are errors.
#ifndef HOLDFAST_RUNTIME_SYS_ASSERT_H_
#define HOLDFAST_RUNTIME_SYS_ASSERT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace holdfast::sys {

/// What a failed assertion of a worker leaves behind, and how the worker ends.
struct LastWords {
  char* text = nullptr;  ///< Shared with the trainer; null between two jobs.
  size_t bytes = 0;
  std::atomic<uint32_t>* said = nullptr;  ///< Becomes 1 (release) once `text` is there.
  bool in_trainer = false;                ///< The worker is a thread of the trainer's process.
};

/// Makes `words` those of the calling thread; null: it is no worker's. They must outlive it.
void SetLastWords(const LastWords* words);
const LastWords* GetLastWords();

/// Ends the worker: its process by kExitAssertion, its thread by sleeping for ever, because memory
/// that its transfers may touch must never be taken for free. A thread of no worker (a load)
/// prints the text and aborts the process.
[[noreturn]] void AssertionFailed(const char* text);

/// Status of a worker's process that an assertion ended.
inline constexpr int kExitAssertion = 73;

}  // namespace holdfast::sys

#define HOLDFAST_ASSERT_TEXT_OF(line) #line
#define HOLDFAST_ASSERT_TEXT(line, condition) \
  __FILE_NAME__ ":" HOLDFAST_ASSERT_TEXT_OF(line) ": " condition
#define HOLDFAST_ASSERT(condition) \
  ((condition) ? (void)0           \
               : ::holdfast::sys::AssertionFailed(HOLDFAST_ASSERT_TEXT(__LINE__, #condition)))

#endif  // HOLDFAST_RUNTIME_SYS_ASSERT_H_
