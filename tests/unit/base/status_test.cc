#include "runtime/base/status.h"

#include <cerrno>

#include "gtest/gtest.h"
#include "runtime/base/text.h"

namespace holdfast::base {
namespace {

TEST(Status, ErrnoBecomesCodeMessageAndPayload) {
  const absl::Status status = ErrnoStatus("open", "/x/y", ENOENT);
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(status.message(), "open /x/y: No such file or directory");
  EXPECT_EQ(ErrnoOf(status), ENOENT);
}

TEST(Status, FullDiskNamesFileAndOffset) {
  Failure failure;
  failure.code = FailureCode::kResourceExhausted;
  failure.operation = Operation::kWrite;
  failure.error_number = ENOSPC;
  failure.file = 0;
  failure.offset = 8388608;
  const absl::Status status = ToStatus(failure, {"step-1", {"model-00001.safetensors"}, {}});
  EXPECT_EQ(status.message(),
            "write step-1/model-00001.safetensors @ 8388608: No space left on device");
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
}

TEST(Status, DigestFaultNamesTensorRangeAndBothDigests) {
  Failure failure;
  failure.code = FailureCode::kDataLoss;
  failure.operation = Operation::kDigest;
  failure.file = 0;
  failure.tensor = 1;
  failure.offset = 100;
  failure.bytes = 28;
  failure.expected = {.low = 1, .high = 2};
  const std::string message(ToStatus(failure, {"s", {"f"}, {"a", "layer.1"}}).message());
  EXPECT_NE(message.find("tensor \"layer.1\", bytes [100, 128)"), std::string::npos) << message;
  EXPECT_NE(message.find("00000000000000020000000000000001"), std::string::npos) << message;
}

TEST(Status, AnnotateKeepsCodeAndErrno) {
  const absl::Status status = Annotate(ErrnoStatus("fsync", "f", EIO), "save step-3");
  EXPECT_EQ(status.message(), "save step-3: fsync f: Input/output error");
  EXPECT_EQ(ErrnoOf(status), EIO);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
}

TEST(Status, ATimeOutIsToldFromADeadlineOfTheOperation) {
  const absl::Status status = Annotate(TimeOut("not yet"), "wait");
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(IsTimeOut(status));
  EXPECT_FALSE(IsTimeOut(absl::DeadlineExceededError("stalled")));
  EXPECT_FALSE(IsTimeOut(absl::OkStatus()));
}

TEST(Status, AllZeroFailureIsOk) { EXPECT_TRUE(ToStatus(Failure(), {}).ok()); }

TEST(Counted, HasTheNumberOfTheNoun) {
  EXPECT_EQ(Counted(0, "save"), "0 saves");
  EXPECT_EQ(Counted(1, "save"), "1 save");
  EXPECT_EQ(Counted(2, "save"), "2 saves");
}

}  // namespace
}  // namespace holdfast::base
