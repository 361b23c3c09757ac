// How long a rank takes to open its part of a checkpoint of many ranks, with and without the commit
// record.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "holdfast/load.h"
#include "runtime/digest/digest.h"
#include "runtime/format/commit_record.h"
#include "runtime/layout/job.h"
#include "tests/testing/checkpoint_files.h"
#include "tests/testing/small_checkpoint.h"
#include "tests/testing/training_state.h"

namespace holdfast::testing {
namespace {

void Require(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

/// Opens rank 0's part and that of the last rank, as one reader or as two.
double Milliseconds(const std::string& path, uint32_t ranks, bool one_reader) {
  const absl::Time begin = absl::Now();
  const auto zero = CheckpointReader::Open(path, 0);
  Require(zero.status());
  Require(one_reader ? (*zero)->Add(ranks - 1) : CheckpointReader::Open(path, ranks - 1).status());
  return absl::ToDoubleMilliseconds(absl::Now() - begin);
}

void Run(const std::string& below, uint32_t ranks, uint32_t tensors) {
  const TemporaryDirectory directory(below);
  RankFiles rank = {.world_size = ranks};
  const std::string path = directory / rank.checkpoint;
  std::filesystem::create_directory(path);
  std::vector<format::CommitRecord::RankManifest> manifests;
  for (; rank.rank < ranks; ++rank.rank) {
    WriteRank(path, rank, TrainingState::Uniform(tensors, 64, rank.rank).Sources());
    const std::string text = ReadFileBytes(absl::StrCat(path, "/", rank.manifest_name()));
    manifests.push_back({text.size(), digest::Of(text.data(), text.size())});
  }
  const std::string record = absl::StrCat(path, "/", layout::kCommitRecordName);
  WriteFileBytes(record, format::CompleteCommitRecord({.checkpoint = rank.checkpoint,
                                                       .attempt = rank.attempt,
                                                       .world_size = ranks,
                                                       .step = rank.step},
                                                      1, 1, manifests));
  Milliseconds(path, ranks, true);
  const double with = Milliseconds(path, ranks, true);
  std::filesystem::remove(record);
  const double without = Milliseconds(path, ranks, true);
  const double twice = Milliseconds(path, ranks, false);
  std::printf(
      "%u ranks of %u tensors: %.1f ms with the commit record, %.1f ms without, %.1f ms without "
      "and with two readers\n",
      ranks, tensors, with, without, twice);
}

}  // namespace
}  // namespace holdfast::testing

int main(int argc, char** argv) {
  const std::string below = argc > 1 ? argv[1] : "/tmp";
  const auto ranks = static_cast<uint32_t>(argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 64);
  const auto tensors = static_cast<uint32_t>(argc > 3 ? std::strtoul(argv[3], nullptr, 10) : 1000);
  holdfast::testing::Run(below, ranks, tensors);
}
