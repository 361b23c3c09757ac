// Names and shapes of GPT-2 small with the state of its Adam optimizer: 124 million parameters.
#ifndef HOLDFAST_TOOLS_DEMO_GPT2_SHAPES_H_
#define HOLDFAST_TOOLS_DEMO_GPT2_SHAPES_H_

#include <cstdint>
#include <string>
#include <vector>

namespace holdfast::demo {

struct Shape {
  std::string name;
  std::vector<int64_t> dimensions;
};

/// The parameters, named as in Hugging Face's `gpt2` (GPT2LMHeadModel, whose head shares `wte`).
std::vector<Shape> Gpt2Parameters();

}  // namespace holdfast::demo

#endif  // HOLDFAST_TOOLS_DEMO_GPT2_SHAPES_H_
