// ValidateOptions: the bounds of single options.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "holdfast/checkpointer.h"

namespace holdfast {
namespace {

using ::testing::HasSubstr;

CheckpointerOptions Sound() {
  CheckpointerOptions options;
  options.directory = "/";
  return options;
}

TEST(ValidateOptions, AcceptsBounds) {
  CheckpointerOptions options = Sound();
  EXPECT_TRUE(ValidateOptions(options).ok());
  options.staging.arena_bytes = kArenaBytesMin;
  options.world_size = 99999;
  options.rank = 99998;
  options.queue_depth = 64;
  options.pwrite_threads = 16;
  options.qos.nice = 19;
  EXPECT_TRUE(ValidateOptions(options).ok());
}

TEST(ValidateOptions, NamesTheOptionAndItsRange) {
  const struct {
    std::function<void(CheckpointerOptions*)> spoil;
    std::string message;
  } cases[] = {
      {[](auto* o) { o->directory = ""; }, "option directory"},
      {[](auto* o) { o->staging.arena_bytes = kArenaBytesMin - 1; },
       "staging.arena_bytes = 16777215: must be at least 16777216"},
      {[](auto* o) { o->world_size = 0; }, "world_size = 0: must be 1 to 99999"},
      {[](auto* o) { o->rank = 1; }, "rank = 1: must be less than world_size"},
      {[](auto* o) { o->queue_depth = 65; }, "queue_depth = 65: must be 1 to 64"},
      {[](auto* o) { o->pwrite_threads = 0; }, "pwrite_threads = 0: must be 1 to 16"},
      {[](auto* o) { o->qos.nice = -1; }, "qos.nice = -1: must be 0 to 19"},
      {[](auto* o) { o->qos.cpu_count = 65; }, "qos.cpu_count = 65: must be 0 to 64"},
      {[](auto* o) { o->time_stalled_max = absl::ZeroDuration(); }, "time_stalled_max = 0"},
      {[](auto* o) { o->staging.idle_trim = absl::Seconds(-1); }, "staging.idle_trim = -1s"}};
  for (const auto& each : cases) {
    CheckpointerOptions options = Sound();
    each.spoil(&options);
    const absl::Status status = ValidateOptions(options);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << each.message;
    EXPECT_THAT(status.message(), HasSubstr(each.message));
  }
}

}  // namespace
}  // namespace holdfast
