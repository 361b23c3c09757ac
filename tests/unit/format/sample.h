// Samples for the tests of this folder: plans, their bytes, and manifests completed the way that
// sealers and the worker complete them.
#ifndef HOLDFAST_TESTS_UNIT_FORMAT_SAMPLE_H_
#define HOLDFAST_TESTS_UNIT_FORMAT_SAMPLE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "holdfast/plan.h"
#include "runtime/format/commit_record.h"
#include "runtime/format/manifest.h"

namespace holdfast::format {

/// Tensors together with the bytes that they point to.
struct SampleTensors {
  std::vector<TensorSource> sources;
  std::vector<std::string> bytes;

  /// The bytes count up from `bytes.size()`.
  void Add(const std::string& name, const std::string& dtype, std::vector<int64_t> shape,
           uint64_t byte_count);
};

/// The bytes of the plan's file `index`.
std::string FileBytes(const SavePlan& plan, size_t index);

/// Input of an example: attempt 00112233445566778899aabbccddeeff, rank 0 of 2, step 1200,
/// saved on 14 November 2023, descended from attempt ffee...00.
ManifestInput SampleInput();

/// Fills every slot: digests of the plan's real bytes, and the worker's fields with made-up values.
std::string CompleteManifest(const ManifestInput& input, const SavePlan& plan,
                             bool streamed = false);

/// The commit record of the same save.
CommitInput SampleCommit();

/// Fills every slot: rank r's manifest is r bytes longer than that of the example.
std::string CompleteCommitRecord(const CommitInput& input);

/// The same plan and manifest that FORMAT.md shows.
SavePlan ExamplePlan();

/// Makes the self-digest right again after a change of the text in front of it.
std::string Reseal(std::string text);

/// The seed of randomized tests: the same in every run, so that a failure is one everywhere;
/// HOLDFAST_SEED in the environment takes another.
uint32_t Seed();

/// Replaces the only occurrence of `from`; fails the test if there is not exactly one.
std::string Replace(std::string text, const std::string& from, const std::string& to);

}  // namespace holdfast::format

#endif  // HOLDFAST_TESTS_UNIT_FORMAT_SAMPLE_H_
