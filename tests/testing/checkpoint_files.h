// Checkpoints with several tensors, written without a save: for tests of what reads them, and for
// damaging them.
#ifndef HOLDFAST_TESTS_TESTING_CHECKPOINT_FILES_H_
#define HOLDFAST_TESTS_TESTING_CHECKPOINT_FILES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "holdfast/plan.h"
#include "holdfast/pod.h"

namespace holdfast::testing {

/// Which rank of which save the files are of.
struct RankFiles {
  std::string checkpoint = "step-7";
  AttemptId attempt = {.high = 7, .low = 8};
  uint32_t rank = 0;
  uint32_t world_size = 1;
  uint64_t step = 7;

  std::string model_name() const;
  std::string manifest_name() const;
};

/// Writes the safetensors file and the manifest of one rank into `directory`, which exists. Returns
/// the plan: where every tensor is.
SavePlan WriteRank(const std::string& directory, const RankFiles& rank,
                   absl::Span<const TensorSource> tensors);

/// The manifest of files that have the given contents.
std::string ManifestText(const RankFiles& rank, const SavePlan& plan,
                         const std::vector<std::string>& contents);

/// Recomputes the self-digest of an edited manifest: damage that only its meaning shows.
std::string Resealed(std::string manifest);

/// A tensor's place; aborts if there is none of that name.
const PlannedTensor& TensorOf(const SavePlan& plan, const std::string& name);

std::string ReadFileBytes(const std::string& path);
void WriteFileBytes(const std::string& path, const std::string& bytes);
/// Inverts one bit in place.
void FlipBit(const std::string& path, uint64_t offset);

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_TESTING_CHECKPOINT_FILES_H_
