// Saves a state asynchronously while the training goes on, and proves what is on disk.
#include <iostream>
#include <vector>

#include "holdfast/checkpointer.h"
#include "holdfast/verify.h"

int main(int argc, char** argv) {
  auto checkpointer = holdfast::Checkpointer::Create(
      {.directory = argc > 1 ? argv[1] : ".", .staging = {.arena_bytes = 64 << 20}});
  if (!checkpointer.ok()) return std::cerr << checkpointer.status() << "\n", 1;
  std::vector<float> weights(1 << 20, 0.5f);
  const holdfast::TensorSource tensors[] = {{.name = "weights",
                                             .dtype = "F32",
                                             .shape = {1 << 20},
                                             .data = weights.data(),
                                             .bytes = weights.size() * sizeof(float)}};
  auto save = (*checkpointer)->SaveAsync({.name = "step-1", .step = 1, .tensors = tensors});
  if (!save.ok()) return std::cerr << save.status() << "\n", 1;
  weights.assign(weights.size(), 0.25f);  // The next step: the save has a copy of its own.
  auto report = save->WaitDurable(absl::Minutes(1));
  if (!report.ok()) return std::cerr << report.status() << "\n", 1;
  std::cout << report->path << " is durable after " << report->time_to_durable << " s\n";
  auto verified = holdfast::Verify(report->path, {});
  return verified.ok() && verified->verdict == holdfast::Verdict::kSound ? 0 : 1;
}
