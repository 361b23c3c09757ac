// A recovery makes the commit record of a directory whose rank 0 died before its record.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>

#include "holdfast/recovery.h"
#include "holdfast/verify.h"
#include "runtime/format/commit_record.h"
#include "runtime/format/directory_names.h"
#include "runtime/sys/system.h"
#include "tests/testing/small_checkpoint.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using testing::SmallRank;
using testing::TemporaryDirectory;
using testing::WriteSmallCheckpoint;

constexpr AttemptId kNew = {.high = 1, .low = 2};
constexpr AttemptId kOld = {.high = 3, .low = 4};

class PromotionTest : public ::testing::Test {
 protected:
  void TearDown() override { sys::g_system = sys::kKernel; }

  static SmallRank Lacking() {
    return {.checkpoint = "step-7",
            .attempt = kNew,
            .world_size = 2,
            .step = 7,
            .saved_at_ns = 1'700'000'000'000'000'000,
            .recorded = true,
            .parent = kOld};
  }
  bool Exists(const std::string& name) const { return std::filesystem::exists(directory_ / name); }
  RecoveryReport Recovered() {
    auto report = Recover(directory_.path(), {.wait_for_orphans = absl::ZeroDuration()});
    EXPECT_TRUE(report.ok()) << report.status();
    return report.ok() ? *std::move(report) : RecoveryReport{};
  }

  TemporaryDirectory directory_;
  const std::string complete_ = format::PartialName("step-7", kNew);
};

TEST_F(PromotionTest, MakesTheCommitRecordOfWhatItPromotes) {
  const SmallRank rank = Lacking();
  for (const char* mark : {"", "holdfast.commit.json.tmp"}) {
    WriteSmallCheckpoint(directory_ / complete_, rank, /*record=*/false);
    // Of a rank 0 that died while it wrote the record.
    if (*mark != '\0') std::ofstream(directory_ / (complete_ + "/" + mark)) << "{\"format\":";
    EXPECT_THAT(Recovered().promoted, ElementsAre("step-7"));
    const auto made = format::ParseCommitRecord(
        testing::ReadFileBytes(directory_ / "step-7/holdfast.commit.json"));
    ASSERT_TRUE(made.ok()) << made.status();
    const auto wanted = format::ParseCommitRecord(rank.record_text());
    ASSERT_TRUE(wanted.ok()) << wanted.status();
    EXPECT_EQ(made->checkpoint, wanted->checkpoint);
    EXPECT_EQ(made->attempt, kNew);
    EXPECT_EQ(made->parent, kOld);
    EXPECT_EQ(made->step, 7u);
    EXPECT_EQ(made->saved_at_ns, rank.saved_at_ns);
    EXPECT_GT(made->committed_at_ns, rank.saved_at_ns);
    EXPECT_EQ(made->bytes, wanted->bytes);
    ASSERT_THAT(made->manifests, SizeIs(2));
    for (int i : {0, 1}) EXPECT_EQ(made->manifests[i].digest, wanted->manifests[i].digest);
    EXPECT_FALSE(Exists("step-7/holdfast.commit.json.tmp"));
    EXPECT_EQ(Verify(directory_ / "step-7", {})->verdict, Verdict::kSound);
    std::filesystem::remove_all(directory_ / "step-7");
  }
}

TEST_F(PromotionTest, GivesTheNameToTheLatestSave) {
  for (const bool is_first : {true, false}) {
    SmallRank older = Lacking();
    SmallRank later = Lacking();
    older.attempt = is_first ? kNew : kOld;
    later.attempt = is_first ? kOld : kNew;
    later.saved_at_ns += 1;
    for (const SmallRank& rank : {older, later}) {
      WriteSmallCheckpoint(directory_ / format::PartialName("step-7", rank.attempt), rank);
    }
    const RecoveryReport report = Recovered();
    EXPECT_THAT(report.promoted, ElementsAre("step-7"));
    EXPECT_THAT(report.kept_incomplete, ElementsAre(HasSubstr("step-7 exists")));
    EXPECT_EQ(InspectCheckpoint(directory_ / "step-7")->attempt, later.attempt);
    for (const auto& entry : std::filesystem::directory_iterator(directory_.path())) {
      std::filesystem::remove_all(entry.path());
    }
  }
}

TEST_F(PromotionTest, KeepsWhatItCannotRecord) {
  WriteSmallCheckpoint(directory_ / complete_, Lacking(), /*record=*/false);
  sys::g_system.write = [](int, const void*, size_t) -> ssize_t {
    errno = ENOSPC;
    return -1;
  };
  const RecoveryReport report = Recovered();
  EXPECT_THAT(report.promoted, IsEmpty());
  EXPECT_THAT(report.kept_incomplete, ElementsAre(HasSubstr("No space left")));
  sys::g_system = sys::kKernel;
  EXPECT_THAT(Recovered().promoted, ElementsAre("step-7"));
}

}  // namespace
}  // namespace holdfast
