// Seeded random changes of valid inputs: no parser may crash, and no parser may accept a wrong
// input. The fuzzers in fuzz/ go deeper; this runs with every test run.
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "fuzz/mutate.h"
#include "runtime/format/manifest.h"
#include "runtime/format/safetensors.h"
#include "runtime/format/torch_zip.h"
#include "tests/unit/format/sample.h"
#include "tests/unit/format/zip_sample.h"

namespace holdfast::format {
namespace {

constexpr int kRounds = 20'000;

class Mutation : public ::testing::Test {
 protected:
  size_t Below(size_t bound) { return mutator_.Below(bound); }
  std::string Change(std::string text) { return mutator_.Change(std::move(text)); }

  const uint32_t seed_ = Seed();
  fuzz::Mutator mutator_{seed_};
};

SavePlan RichPlan(SampleTensors* tensors) {
  tensors->Add("a", "F32", {2, 3}, 24);
  tensors->Add("q", "QINT8", {4}, 4);
  tensors->Add("\xc3\xa9\n", "BF16", {}, 2);
  tensors->Add("none", "U8", {0}, 0);
  return *PlanSafetensors("model.safetensors", tensors->sources,
                          {.metadata = {{"holdfast.attempt", "x"}}});
}

TEST_F(Mutation, NeverMakesAnotherManifest) {
  SampleTensors tensors;
  const std::string good = CompleteManifest(SampleInput(), RichPlan(&tensors));
  ASSERT_TRUE(ParseManifest(good).ok());
  for (int round = 0; round < kRounds; ++round) {
    const std::string changed = Change(good);
    if (changed == good) continue;
    ASSERT_FALSE(ParseManifest(changed).ok()) << "seed " << seed_ << " round " << round;
  }
}

TEST_F(Mutation, OfAManifestWithARightSelfDigestStaysInBounds) {
  SampleTensors tensors;
  const std::string good = CompleteManifest(SampleInput(), RichPlan(&tensors));
  const size_t covered = good.size() - 50;
  int accepted = 0;
  for (int round = 0; round < kRounds; ++round) {
    const std::string changed = Reseal(Change(good.substr(0, covered)) + good.substr(covered));
    const auto manifest = ParseManifest(changed);
    if (!manifest.ok()) {
      ASSERT_EQ(manifest.status().code(), absl::StatusCode::kDataLoss) << manifest.status();
      continue;
    }
    ++accepted;
    ASSERT_LT(manifest->rank, manifest->world_size);
    for (const Manifest::Tensor& tensor : manifest->tensors) {
      ASSERT_LT(tensor.file, manifest->files.size());
      ASSERT_LE(tensor.begin, tensor.end);
      ASSERT_LE(tensor.end, manifest->files[tensor.file].bytes);
    }
  }
  // Some changes are of free values (a step, a name): if none passed, the test would prove nothing.
  EXPECT_GT(accepted, kRounds / 1000);
  EXPECT_LT(accepted, kRounds / 2);
}

TEST_F(Mutation, OfASafetensorsHeaderStaysInBounds) {
  SampleTensors tensors;
  const SavePlan plan = RichPlan(&tensors);
  const std::string header = plan.files[0].segments[0].literal;
  const std::string json = header.substr(8, header.find_last_not_of(' ') - 7);
  int accepted = 0;
  for (int round = 0; round < kRounds; ++round) {
    std::string changed = Change(json);
    const size_t length = changed.size();
    std::string prefix(8, '\0');
    for (size_t i = 0; i < 8; ++i) prefix[i] = static_cast<char>(length >> (8 * i));
    const uint64_t file_bytes = 8 + length + 30;
    const auto parsed = ParseSafetensors(prefix + changed, file_bytes);
    if (!parsed.ok()) {
      ASSERT_TRUE(parsed.status().code() == absl::StatusCode::kDataLoss ||
                  parsed.status().code() == absl::StatusCode::kUnimplemented)
          << parsed.status();
      continue;
    }
    ++accepted;
    uint64_t end = parsed->data_begin;
    for (const PlannedTensor& tensor : parsed->tensors) {
      ASSERT_EQ(tensor.begin, end);
      end = tensor.end;
    }
    ASSERT_EQ(end, file_bytes);
  }
  EXPECT_GT(accepted, kRounds / 1000);
}

TEST_F(Mutation, OfTheSafetensorsLengthIsBounded) {
  SampleTensors tensors;
  const SavePlan plan = RichPlan(&tensors);
  const std::string header = plan.files[0].segments[0].literal;
  for (int round = 0; round < kRounds; ++round) {
    std::string first = header.substr(0, 8);
    first[Below(8)] = static_cast<char>(Below(256));
    const uint64_t file_bytes = Below(10'000);
    const auto length = HeaderLength(first, file_bytes);
    if (length.ok()) {
      ASSERT_LE(*length + 8, file_bytes);
    }
  }
}

TEST_F(Mutation, OfAZipStaysInBounds) {
  ZipSample sample;
  sample.records = {{.name = "archive/data.pkl", .data = "pickle"},
                    {.name = "archive/data/0", .data = std::string(100, 'x'), .zip64 = true},
                    {.name = "archive/version", .data = "3\n"}};
  int accepted = 0;
  for (int round = 0; round < kRounds; ++round) {
    sample.zip64_end = round % 2 == 0;
    const std::string file = Change(sample.Write());
    const auto where = FindZipDirectory(file, file.size());
    if (!where.ok()) continue;
    ASSERT_LE(where->begin + where->bytes, file.size());
    const auto records = ParseZipDirectory(
        absl::string_view(file).substr(where->begin, where->bytes), *where, file.size());
    if (!records.ok()) continue;
    ++accepted;
    for (const ZipRecord& record : *records) {
      ASSERT_LE(record.begin, where->begin);
      ASSERT_LE(record.bytes, where->begin - record.begin);
    }
    if (CheckZipLayout(*records, *where).ok()) {
      for (size_t i = 0; i < records->size(); ++i) {
        const auto ignored = LocalHeaderBytes(absl::string_view(file).substr((*records)[i].begin),
                                              (*records)[i].name);
        if (ignored.ok()) {
          ASSERT_GE(*ignored, 30u);
        }
      }
    }
  }
  EXPECT_GT(accepted, kRounds / 1000);
}

}  // namespace
}  // namespace holdfast::format
