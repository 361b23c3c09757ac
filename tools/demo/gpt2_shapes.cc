#include "tools/demo/gpt2_shapes.h"

#include "absl/strings/str_cat.h"

namespace holdfast::demo {
namespace {

constexpr int64_t kVocabulary = 50257;
constexpr int64_t kPositions = 1024;
constexpr int64_t kWidth = 768;
constexpr int64_t kInner = 4 * kWidth;
constexpr int kLayers = 12;

}  // namespace

std::vector<Shape> Gpt2Parameters() {
  std::vector<Shape> shapes = {{"transformer.wte.weight", {kVocabulary, kWidth}},
                               {"transformer.wpe.weight", {kPositions, kWidth}}};
  const auto add = [&shapes](const std::string& name, std::vector<int64_t> dimensions) {
    shapes.push_back({absl::StrCat("transformer.", name), std::move(dimensions)});
  };
  for (int layer = 0; layer < kLayers; ++layer) {
    const std::string block = absl::StrCat("h.", layer, ".");
    add(block + "ln_1.weight", {kWidth});
    add(block + "ln_1.bias", {kWidth});
    // Conv1D keeps its weight as (inputs, outputs).
    add(block + "attn.c_attn.weight", {kWidth, 3 * kWidth});
    add(block + "attn.c_attn.bias", {3 * kWidth});
    add(block + "attn.c_proj.weight", {kWidth, kWidth});
    add(block + "attn.c_proj.bias", {kWidth});
    add(block + "ln_2.weight", {kWidth});
    add(block + "ln_2.bias", {kWidth});
    add(block + "mlp.c_fc.weight", {kWidth, kInner});
    add(block + "mlp.c_fc.bias", {kInner});
    add(block + "mlp.c_proj.weight", {kInner, kWidth});
    add(block + "mlp.c_proj.bias", {kWidth});
  }
  add("ln_f.weight", {kWidth});
  add("ln_f.bias", {kWidth});
  return shapes;
}

}  // namespace holdfast::demo
