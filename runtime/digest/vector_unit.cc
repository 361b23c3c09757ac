// Names the vector unit of the digests. libxxhash does not report its choice, so the same test is
// repeated here.
#include "runtime/digest/digest.h"

#if HOLDFAST_XXHASH_DISPATCH
#include <cpuid.h>
#endif

namespace holdfast::digest {

#if HOLDFAST_XXHASH_DISPATCH

namespace {

// The register state that the operating system saves and restores (XCR0).
uint32_t SavedRegisters() {
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

}  // namespace

const char* VectorUnit() {
  constexpr uint32_t kOsXsave = 1u << 27, kAvx = 1u << 28;       // leaf 1, ecx
  constexpr uint32_t kAvx2 = 1u << 5;                            // leaf 7, ebx
  constexpr uint32_t kAvx512 = (1u << 16) | (1u << 30);          // leaf 7, ebx: F and BW
  constexpr uint32_t kYmmSaved = 0x06, kZmmSaved = 0xe0 | 0x06;  // XCR0
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return "sse2";
  if ((ecx & kOsXsave) == 0 || (ecx & kAvx) == 0) return "sse2";
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return "sse2";
  const uint32_t saved = SavedRegisters();
  if ((ebx & kAvx512) == kAvx512 && (saved & kZmmSaved) == kZmmSaved) return "avx512";
  if ((ebx & kAvx2) != 0 && (saved & kYmmSaved) == kYmmSaved) return "avx2";
  return "sse2";
}

#else

// Without dispatch the library was built for the architecture's baseline.
const char* VectorUnit() {
#if defined(__SSE2__)
  return "sse2";
#elif defined(__ARM_NEON)
  return "neon";
#else
  return "scalar";
#endif
}

#endif

}  // namespace holdfast::digest
