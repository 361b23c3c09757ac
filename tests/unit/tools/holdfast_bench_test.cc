// holdfast-bench as scripts meet it: keys, not values. The first argument is the program.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/testing/training_state.h"
#include "tests/unit/tools/program_run.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;
using testing::ProgramRun;
using testing::ScratchDirectory;

class BenchProgram : public ::testing::Test {
 protected:
  void SetUp() override {
    if (testing::ProgramUnderTest().empty()) GTEST_SKIP() << "the program's path is not given";
    std::filesystem::create_directory(directory_);
  }
  ProgramRun Run(const std::string& arguments) const {
    return testing::RunProgram("--dir " + directory_ + " " + arguments, scratch_.path());
  }

  ScratchDirectory scratch_;
  const std::string directory_ = scratch_.path() + "/bench";
};

TEST_F(BenchProgram, HasAllItsKeysAndLeavesNothingBehind) {
  const ProgramRun run =
      Run("--quick --json --bytes 64M --pairs 1 --calls 2 --ballast 128M --settle-ms 1");
  ASSERT_EQ(run.status, 0) << run.error;
  const nlohmann::json json = nlohmann::json::parse(run.out);
  for (const char* key : {"write.ratio_to_raw.pwrite",
                          "worker.cpu_seconds_per_gib",
                          "total.cpu_seconds_per_gib",
                          "copy.ratio_to_memcpy.plain",
                          "copy.ratio_to_memcpy.fused",
                          "handoff.median_us.spawn",
                          "handoff.median_us.fork",
                          "handoff.median_us.persistent",
                          "handoff.median_us.thread",
                          "handoff.growth_ratio.spawn",
                          "handoff.growth_ratio.fork",
                          "handoff.growth_ratio.persistent",
                          "handoff.growth_ratio.thread",
                          "handoff.median_us.device",
                          "handoff.device_ratio",
                          "verify.ratio_to_raw",
                          "load.ratio_to_raw",
                          "worker.private_bytes",
                          "arena.bytes_peak",
                          "arena.bytes_cap",
                          "buffered.write_fsync_seconds_per_gib",
                          "buffered.ratio_to_raw"}) {
    ASSERT_TRUE(json.contains(key)) << key;
    EXPECT_TRUE(json[key].is_number()) << key << ": " << json[key];
    EXPECT_TRUE(json.contains(std::string(key) + ".min")) << key;
    EXPECT_TRUE(json.contains(std::string(key) + ".max")) << key;
  }
  // Where io_uring is forbidden these say so.
  for (const char* key : {"write.ratio_to_raw.fixed", "write.ratio_to_raw.plain"}) {
    ASSERT_TRUE(json.contains(key)) << key;
    EXPECT_TRUE(json[key].is_number() || json.contains(std::string(key) + ".reason")) << key;
  }
  EXPECT_LE(json["arena.bytes_peak"], json["arena.bytes_cap"]);
  EXPECT_TRUE(std::filesystem::is_empty(directory_));
}

TEST_F(BenchProgram, SaysWhichKeysASectionThatWasNotRunLeavesOpen) {
  const ProgramRun run = Run("--only memory --json --bytes 64M --pairs 1 --settle-ms 1");
  ASSERT_EQ(run.status, 0) << run.error;
  const nlohmann::json json = nlohmann::json::parse(run.out);
  EXPECT_TRUE(json["arena.bytes_peak"].is_number());
  EXPECT_TRUE(json["verify.ratio_to_raw"].is_null());
  EXPECT_THAT(json["verify.ratio_to_raw.reason"], HasSubstr("not run"));
}

TEST_F(BenchProgram, ExitsWith64ForAWrongCommandLine) {
  for (const char* arguments : {"--no-such-option", "--bytes 1K", "--pairs 0", "--only nothing"}) {
    EXPECT_EQ(Run(arguments).status, 64) << arguments;
  }
}

TEST_F(BenchProgram, ExplainsItself) {
  const ProgramRun run = Run("--help");
  EXPECT_EQ(run.status, 0);
  for (const char* word : {"--bytes", "--json", "--quick", "Exit status", "Examples"}) {
    EXPECT_THAT(run.out, HasSubstr(word));
  }
}

}  // namespace
}  // namespace holdfast
