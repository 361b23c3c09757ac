// Checkpoints with several tensors, written without a save, for tests of readers and of damage.
#ifndef HOLDFAST_TESTS_TESTING_CHECKPOINT_FILES_H_
#define HOLDFAST_TESTS_TESTING_CHECKPOINT_FILES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "holdfast/plan.h"
#include "holdfast/pod.h"

namespace holdfast::testing {

/// The rank and the save of the files.
struct RankFiles {
  std::string checkpoint = "step-7";
  AttemptId attempt = {.high = 7, .low = 8};
  uint32_t rank = 0;
  uint32_t world_size = 1;
  uint64_t step = 7;

  std::string model_name() const;
  std::string manifest_name() const;
};

/// Writes the safetensors file and the manifest of one rank into the existing `directory`. Returns
/// the plan with every tensor's place.
SavePlan WriteRank(const std::string& directory, const RankFiles& rank,
                   absl::Span<const TensorSource> tensors);

/// Returns the manifest of files with the given contents.
std::string ManifestText(const RankFiles& rank, const SavePlan& plan,
                         const std::vector<std::string>& contents);

/// Recomputes the self-digest of an edited manifest, for damage in the meaning only.
std::string Resealed(std::string manifest);

/// Returns a tensor's place; aborts for an unknown name.
const PlannedTensor& TensorOf(const SavePlan& plan, const std::string& name);

std::string ReadFileBytes(const std::string& path);
void WriteFileBytes(const std::string& path, const std::string& bytes);
/// Inverts one bit in place.
void FlipBit(const std::string& path, uint64_t offset);

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_TESTING_CHECKPOINT_FILES_H_
