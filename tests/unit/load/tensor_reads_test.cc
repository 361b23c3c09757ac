// Which bytes a load reads, and which digest is compared with the bytes.
#include "runtime/load/tensor_reads.h"

#include <gtest/gtest.h>

#include "runtime/digest/digest.h"
#include "tests/testing/checkpoint_files.h"

namespace holdfast::load {
namespace {

constexpr uint64_t kC = kChunkBytes;

SavePlan PlanOf(std::vector<std::pair<uint64_t, uint64_t>> places, uint64_t file_bytes) {
  SavePlan plan;
  plan.files.push_back({.name = "f", .bytes = file_bytes, .segments = {}});
  for (const auto& [begin, end] : places) {
    plan.tensors.push_back({.name = "t" + std::to_string(plan.tensors.size()),
                            .dtype = "U8",
                            .shape = {static_cast<int64_t>(end - begin)},
                            .begin = begin,
                            .end = end});
  }
  return plan;
}

ReadPlan Reads(const SavePlan& plan, std::vector<uint32_t> tensors,
               const format::Manifest* manifest = nullptr) {
  std::vector<WantedTensor> wanted;
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    const PlannedTensor& tensor = plan.tensors[tensors[i]];
    wanted.push_back(
        {.tensor = tensors[i], .target = i, .begin = 0, .bytes = tensor.end - tensor.begin});
  }
  return PlanReads(plan.tensors, wanted, manifest);
}

TEST(TensorReads, ReadNothingForNothing) {
  EXPECT_TRUE(Reads(PlanOf({{10, 10}}, 100), {0}).reads.empty());
  EXPECT_TRUE(Reads(PlanOf({{10, 20}}, 100), {}).reads.empty());
}

TEST(TensorReads, OfASmallTensorAreItsOwnBytesOnly) {
  const ReadPlan reads = Reads(PlanOf({{kC + 100, kC + 200}}, 3 * kC), {0});
  ASSERT_EQ(reads.reads.size(), 1u);
  EXPECT_EQ(reads.ranges[0].offset, kC + 100);
  EXPECT_EQ(reads.ranges[0].bytes, 100u);
}

TEST(TensorReads, AreCutAtChunkBorders) {
  const ReadPlan reads = Reads(PlanOf({{kC - 1, 2 * kC + 1}}, 3 * kC), {0});
  ASSERT_EQ(reads.pieces.size(), 3u);
  EXPECT_EQ(reads.pieces[0].bytes, 1u);
  EXPECT_EQ(reads.pieces[1].bytes, kC);
  EXPECT_EQ(reads.pieces[2].bytes, 1u);
  EXPECT_EQ(reads.pieces[2].target_offset, kC + 1);
  EXPECT_EQ(reads.reads.size(), 3u);
}

TEST(TensorReads, JoinNeighboursOfOneChunkButNotAcrossItsBorder) {
  const SavePlan plan = PlanOf({{0, 1000}, {1000, 2000}, {3000, kC}, {kC, kC + 10}}, 2 * kC);
  const ReadPlan reads = Reads(plan, {3, 1, 0, 2});
  ASSERT_EQ(reads.reads.size(), 2u);
  EXPECT_EQ(reads.reads[0].piece_count, 3u);
  EXPECT_EQ(reads.ranges[0].bytes, kC);
  EXPECT_EQ(reads.reads[1].piece_count, 1u);
  EXPECT_EQ(reads.pieces[0].target, 2u) << "pieces keep their targets through the sorting";
}

TEST(TensorReads, DoNotReadThroughALongGap) {
  const SavePlan plan = PlanOf({{0, 10}, {20 + kGapBytesMax, 30 + kGapBytesMax}}, kC);
  EXPECT_EQ(Reads(plan, {0, 1}).reads.size(), 2u);
}

TEST(TensorReads, HoldTheRightDigestAgainstEveryPiece) {
  // From a border into the second chunk, within a chunk, over three chunks, to the end.
  const uint64_t file_bytes = 5 * kC + 99;
  const SavePlan plan = PlanOf({{0, kC + 5},
                                {kC + 5, kC + 50},
                                {kC + 50, 4 * kC + 3},
                                {4 * kC + 3, 5 * kC},
                                {5 * kC, file_bytes}},
                               file_bytes);
  std::string content(file_bytes, '\0');
  for (size_t i = 0; i < content.size(); ++i) content[i] = static_cast<char>(i * 31 + i / 4099);
  const auto manifest = format::ParseManifest(testing::ManifestText({}, plan, {content}));
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  const ReadPlan reads = Reads(plan, {0, 1, 2, 3, 4}, &*manifest);
  EXPECT_EQ(reads.pieces.size(), 2u + 1 + 4 + 1 + 1);
  for (const TensorPiece& piece : reads.pieces) {
    EXPECT_EQ(piece.digest, digest::Of(content.data() + piece.begin, piece.bytes)) << piece.begin;
  }
}

}  // namespace
}  // namespace holdfast::load
