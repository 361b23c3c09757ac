// What must hold for anything that a parser accepts.
#ifndef HOLDFAST_FUZZ_EXPECT_H_
#define HOLDFAST_FUZZ_EXPECT_H_

#include <cstdio>

/// Ends the run with the condition's text; libFuzzer keeps the input.
#define HOLDFAST_EXPECT(condition)                                                 \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      __builtin_trap();                                                            \
    }                                                                              \
  } while (false)

#endif  // HOLDFAST_FUZZ_EXPECT_H_
