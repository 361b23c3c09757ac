// How long it takes to find the newest of many checkpoints, with and without commit records.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "holdfast/recovery.h"
#include "runtime/layout/job.h"
#include "tests/testing/small_checkpoint.h"

namespace holdfast::testing {
namespace {

double Seconds(const std::string& directory) {
  const absl::Time begin = absl::Now();
  const auto newest = FindNewest(directory);
  const double seconds = absl::ToDoubleSeconds(absl::Now() - begin);
  if (!newest.ok()) {
    std::fprintf(stderr, "%s\n", newest.status().ToString().c_str());
    std::exit(1);
  }
  return seconds;
}

void Run(const std::string& below, uint64_t checkpoints, uint32_t ranks) {
  const TemporaryDirectory directory(below);
  for (uint64_t step = 1; step <= checkpoints; ++step) {
    const SmallRank like = {.checkpoint = absl::StrCat("step-", step),
                            .attempt = {.high = 1, .low = step},
                            .world_size = ranks,
                            .step = step,
                            .saved_at_ns = 1'700'000'000'000'000'000 + step,
                            .bytes = 16};
    const std::string path = directory / like.checkpoint;
    WriteSmallCheckpoint(path, like);
    std::ofstream(absl::StrCat(path, "/", layout::kCommitRecordName)) << like.record_text();
  }
  Seconds(directory.path());
  const double with = Seconds(directory.path());
  for (uint64_t step = 1; step <= checkpoints; ++step) {
    std::filesystem::remove(
        absl::StrCat(directory / absl::StrCat("step-", step), "/", layout::kCommitRecordName));
  }
  const double without = Seconds(directory.path());
  std::printf("%llu checkpoints of %u ranks: %.3f s with commit records, %.3f s without\n",
              static_cast<unsigned long long>(checkpoints), ranks, with, without);
}

}  // namespace
}  // namespace holdfast::testing

int main(int argc, char** argv) {
  const std::string below = argc > 1 ? argv[1] : "/tmp";
  const uint64_t checkpoints = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 10'000;
  const auto ranks = static_cast<uint32_t>(argc > 3 ? std::strtoul(argv[3], nullptr, 10) : 8);
  holdfast::testing::Run(below, checkpoints, ranks);
}
