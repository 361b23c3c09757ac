// One training step on a run of elements: a rule that changes every element of every type.
#ifndef HOLDFAST_TOOLS_DEMO_UPDATE_RULE_H_
#define HOLDFAST_TOOLS_DEMO_UPDATE_RULE_H_

#include <cstdint>
#include <string>

namespace holdfast::demo {

/// Where a step is: its ordinal, and what its pseudo-gradients are made from.
struct StepNoise {
  uint64_t step = 0;
  uint64_t seed = 0;
};

/// Adam on `count` parameters with both moments; `first` is the ordinal of the first of them.
void AdamStep(float* parameters, float* moment1, float* moment2, uint64_t first, uint64_t count,
              StepNoise noise);

/// For tensors whose role is unknown: changes every element of `dtype` in [begin, begin + bytes),
/// which starts and ends at element borders. Floating-point values stay finite, BOOL stays 0 or 1.
void PlainStep(const std::string& dtype, char* begin, uint64_t bytes, uint64_t first,
               StepNoise noise);

}  // namespace holdfast::demo

#endif  // HOLDFAST_TOOLS_DEMO_UPDATE_RULE_H_
