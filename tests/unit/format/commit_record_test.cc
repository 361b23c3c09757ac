// The commit record: what the trainer builds, what the worker adds, what a reader refuses.
#include "runtime/format/commit_record.h"

#include <gtest/gtest.h>

#include <string>

#include "runtime/digest/digest.h"
#include "runtime/format/file_names.h"
#include "tests/unit/format/sample.h"

namespace holdfast::format {
namespace {

TEST(CommitRecord, SaysWhatTheTrainerAndTheWorkerPutIn) {
  const CommitInput input = SampleCommit();
  const auto read = ParseCommitRecord(CompleteCommitRecord(input));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->checkpoint, "step-1200");
  EXPECT_EQ(read->series, "step-{}");
  EXPECT_EQ(read->attempt, input.attempt);
  EXPECT_EQ(read->parent, input.parent);
  EXPECT_EQ(read->world_size, 2u);
  EXPECT_EQ(read->step, 1200u);
  EXPECT_EQ(read->saved_at_ns, 1'700'000'000'123'456'789u);
  EXPECT_EQ(read->committed_at_ns, 1'700'000'002'000'000'000u);
  EXPECT_EQ(read->bytes, 8252u);
  ASSERT_EQ(read->manifests.size(), 2u);
  const std::string manifest = CompleteManifest(SampleInput(), ExamplePlan());
  EXPECT_EQ(read->manifests[0].bytes, manifest.size());
  EXPECT_EQ(read->manifests[0].digest, digest::Of(manifest.data(), manifest.size()));
  EXPECT_EQ(read->manifests[1].bytes, manifest.size() + 1);
}

TEST(CommitRecord, HasRowsOfOneLengthForAnyNumberOfRanks) {
  for (const uint32_t ranks : {1u, 2u, 11u, 1000u}) {
    CommitInput input = SampleCommit();
    input.world_size = ranks;
    const auto read = ParseCommitRecord(CompleteCommitRecord(input));
    ASSERT_TRUE(read.ok()) << read.status();
    ASSERT_EQ(read->manifests.size(), ranks);
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(read->manifests[rank].bytes, read->manifests[0].bytes + rank);
    }
  }
}

TEST(CommitRecord, IsRefusedUntilItIsFilled) {
  EXPECT_FALSE(ParseCommitRecord(BuildCommitRecord(SampleCommit()).text).ok());
}

TEST(CommitRecord, IsRefusedWhereverOneBitIsWrongOrOneByteIsMissing) {
  const std::string text = CompleteCommitRecord(SampleCommit());
  for (size_t bit = 0; bit < text.size() * 8; ++bit) {
    std::string changed = text;
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ (1 << bit % 8));
    EXPECT_FALSE(ParseCommitRecord(changed).ok()) << bit;
  }
  for (size_t bytes = 0; bytes < text.size(); ++bytes) {
    EXPECT_FALSE(ParseCommitRecord(text.substr(0, bytes)).ok()) << bytes;
  }
}

TEST(CommitRecord, IsRefusedWithAnotherMeaning) {
  const std::string text = CompleteCommitRecord(SampleCommit());
  const auto refused = [&text](const std::string& from, const std::string& to) {
    return !ParseCommitRecord(Reseal(Replace(text, from, to))).ok();
  };
  EXPECT_TRUE(refused("holdfast.commit", "holdfast.commits"));
  EXPECT_TRUE(refused("\"version\":1", "\"version\":2"));
  EXPECT_TRUE(refused("\"world_size\":2", "\"world_size\":3"));
  EXPECT_TRUE(refused("\"world_size\":2", "\"world_size\":0"));
  EXPECT_TRUE(refused("00112233445566778899aabbccddeeff", std::string(32, '0')));
  EXPECT_TRUE(refused("\"step-1200\"", "\"..\""));
  EXPECT_TRUE(refused("\"step\":1200", "\"step\":-1"));
  EXPECT_TRUE(refused(",\"step\":1200", ""));
  EXPECT_FALSE(refused("\"step\":1200", "\"step\":1201"));
}

TEST(CommitRecord, MayHaveTheFileByWhichAFrameworkCommits) {
  CommitInput input = SampleCommit();
  EXPECT_FALSE(ParseCommitRecord(CompleteCommitRecord(input))->commit_file.has_value());
  input.commit_file = {.name = ".metadata", .bytes = 77, .digest = {.low = 5, .high = 6}};
  const std::string text = CompleteCommitRecord(input);
  const auto read = ParseCommitRecord(text);
  ASSERT_TRUE(read.ok()) << read.status();
  ASSERT_TRUE(read->commit_file.has_value());
  EXPECT_EQ(read->commit_file->name, ".metadata");
  EXPECT_EQ(read->commit_file->bytes, 77u);
  EXPECT_EQ(read->commit_file->digest, input.commit_file->digest);
  for (const std::string name : {"", "..", "a/b", "holdfast.commit.json", "x.tmp"}) {
    EXPECT_FALSE(ParseCommitRecord(Reseal(Replace(text, ".metadata", name))).ok()) << name;
  }
  EXPECT_FALSE(ParseCommitRecord(Reseal(Replace(text, ",\"bytes\":77", ""))).ok());
}

TEST(CommitRecord, HasTheAttemptInItsNameWhereAFrameworkOwnsTheDirectory) {
  const AttemptId attempt = SampleCommit().attempt;
  const std::string name = CommitRecordName(attempt);
  EXPECT_EQ(name, "holdfast.commit-00112233445566778899aabbccddeeff.json");
  EXPECT_EQ(ParseCommitRecordName(name), attempt);
  EXPECT_TRUE(IsCommitFile(name));
  EXPECT_NE(WrongDataFileName(name), nullptr);
  for (const std::string& other :
       {std::string("holdfast.commit.json"), name + ".tmp", name.substr(1),
        Replace(name, "aabb", "AABB"), Replace(name, "aabb", "")}) {
    EXPECT_FALSE(ParseCommitRecordName(other).has_value()) << other;
  }
}

}  // namespace
}  // namespace holdfast::format
