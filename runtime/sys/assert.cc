#include "runtime/sys/assert.h"

#include <signal.h>
#include <unistd.h>

#include <cstring>

#include "runtime/sys/process.h"
#include "runtime/sys/system.h"

namespace holdfast::sys {
namespace {

thread_local const LastWords* g_words = nullptr;

}  // namespace

void SetLastWords(const LastWords* words) { g_words = words; }
const LastWords* GetLastWords() { return g_words; }

void AssertionFailed(const char* text) {
  const LastWords* const words = g_words;
  if (words == nullptr) {
    (void)!Sys().write(STDERR_FILENO, text, strlen(text));
    (void)!Sys().write(STDERR_FILENO, "\n", 1);
    Sys().kill(Sys().getpid(), SIGABRT);
    ExitNow(kExitAssertion);
  }
  if (words->text != nullptr) {
    const size_t length = strnlen(text, words->bytes - 1);
    memcpy(words->text, text, length);
    words->text[length] = '\0';
    // release: a trainer that reads 1 also reads the text.
    words->said->store(1, std::memory_order_release);
  }
  if (!words->in_trainer) ExitNow(kExitAssertion);
  while (true) {
    const struct timespec pause = {.tv_sec = 3600, .tv_nsec = 0};
    Sys().nanosleep(&pause, nullptr);
  }
}

}  // namespace holdfast::sys
