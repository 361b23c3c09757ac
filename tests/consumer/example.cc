// What a project that uses the installed package looks like: a plan of one file, checked.
#include <iostream>
#include <vector>

#include "holdfast/plan.h"

int main() {
  const std::vector<float> weights(1024, 0.5f);
  holdfast::SavePlan plan;
  plan.tensors.push_back({"weights", "F32", {1024}, 0, 0, 4096});
  plan.files.push_back({"model.bin", 4096, {{0, 4096, 0, weights.data(), "", nullptr, nullptr}}});
  const absl::Status status = holdfast::ValidatePlan(plan);
  std::cout << "plan of " << plan.total_bytes() << " bytes: " << status << "\n";
  return status.ok() ? 0 : 1;
}
