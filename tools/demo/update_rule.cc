#include "tools/demo/update_rule.h"

#include <cmath>
#include <cstring>

namespace holdfast::demo {
namespace {

constexpr float kBeta1 = 0.9f;
constexpr float kBeta2 = 0.999f;
constexpr float kRate = 1e-3f;
constexpr float kEpsilon = 1e-8f;

/// A pseudo-gradient in [-1, 1) that depends on element and step: a multiplicative hash, cheap and
/// without a chain from element to element, so that compilers make vector code of the loops.
inline float Gradient(uint64_t element, uint32_t salt) {
  uint32_t hash = (static_cast<uint32_t>(element) ^ salt) * 0x9E3779B1u;
  hash ^= hash >> 15;
  hash *= 0x85EBCA77u;
  return static_cast<float>(static_cast<int32_t>(hash)) * (1.0f / 2147483648.0f);
}

inline uint32_t Salt(StepNoise noise) {
  const uint64_t mixed =
      (noise.seed * 0x9E3779B97F4A7C15ull) ^ (noise.step * 0xD1B54A32D192ED03ull);
  return static_cast<uint32_t>(mixed ^ (mixed >> 32));
}

template <typename Float>
void FloatStep(char* begin, uint64_t bytes, uint64_t first, StepNoise noise) {
  const uint32_t salt = Salt(noise);
  for (uint64_t i = 0; i < bytes / sizeof(Float); ++i) {
    Float value;
    std::memcpy(&value, begin + i * sizeof(Float), sizeof(Float));
    const Float moved = value * Float(0.999) + Float(0.01) * Float(Gradient(first + i, salt));
    // What is too small to move the value moves its lowest bit.
    Float next = moved == value ? std::nextafter(value, Float(1)) : moved;
    if (!std::isfinite(next)) next = Float(Gradient(first + i, salt));
    std::memcpy(begin + i * sizeof(Float), &next, sizeof(Float));
  }
}

/// Integers count; narrow floats (16 and 8 bits) move in their lowest bits, so that they stay
/// finite whatever they were.
template <typename Word>
void WordStep(char* begin, uint64_t bytes, Word flip, Word add) {
  for (uint64_t i = 0; i < bytes / sizeof(Word); ++i) {
    Word value;
    std::memcpy(&value, begin + i * sizeof(Word), sizeof(Word));
    value = static_cast<Word>((value ^ flip) + add);
    std::memcpy(begin + i * sizeof(Word), &value, sizeof(Word));
  }
}

}  // namespace

void AdamStep(float* parameters, float* moment1, float* moment2, uint64_t first, uint64_t count,
              StepNoise noise) {
  const uint32_t salt = Salt(noise);
  for (uint64_t i = 0; i < count; ++i) {
    const float gradient = Gradient(first + i, salt);
    const float m = kBeta1 * moment1[i] + (1 - kBeta1) * gradient;
    const float v = kBeta2 * moment2[i] + (1 - kBeta2) * gradient * gradient;
    moment1[i] = m;
    moment2[i] = v;
    parameters[i] -= kRate * m / (std::sqrt(v) + kEpsilon);
  }
}

void PlainStep(const std::string& dtype, char* begin, uint64_t bytes, uint64_t first,
               StepNoise noise) {
  if (dtype == "F32") return FloatStep<float>(begin, bytes, first, noise);
  if (dtype == "F64") return FloatStep<double>(begin, bytes, first, noise);
  if (dtype == "BF16" || dtype == "F16") {
    // One of the two lowest bits of the mantissa, which never makes an infinity of a number.
    return WordStep<uint16_t>(begin, bytes, (noise.step & 1) != 0 ? 1 : 2, 0);
  }
  if (dtype == "BOOL") return WordStep<uint8_t>(begin, bytes, 1, 0);
  if (dtype == "I64" || dtype == "U64") return WordStep<uint64_t>(begin, bytes, 0, 1);
  if (dtype == "I32" || dtype == "U32") return WordStep<uint32_t>(begin, bytes, 0, 1);
  if (dtype == "I16" || dtype == "U16") return WordStep<uint16_t>(begin, bytes, 0, 1);
  if (dtype == "I8" || dtype == "U8") return WordStep<uint8_t>(begin, bytes, 0, 1);
  WordStep<uint8_t>(begin, bytes, 1, 0);
}

}  // namespace holdfast::demo
