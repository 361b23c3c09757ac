#include "runtime/base/status.h"

#include <cstddef>
#include <cstring>
#include <iterator>
#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "runtime/sys/errno_code.h"

namespace holdfast {

int ErrnoOf(const absl::Status& status) {
  const auto payload = status.GetPayload(base::kErrnoPayload);
  int value = 0;
  if (!payload.has_value() || !absl::SimpleAtoi(std::string(*payload), &value)) return 0;
  return value;
}

bool IsTimeOut(const absl::Status& status) {
  return status.GetPayload(base::kTimeOutPayload).has_value();
}

}  // namespace holdfast

namespace holdfast::base {

absl::Status TimeOut(absl::string_view message) {
  absl::Status status = absl::DeadlineExceededError(message);
  status.SetPayload(kTimeOutPayload, absl::Cord());
  return status;
}

namespace {

std::string ErrnoText(int error_number) {
  char buffer[128];
  // GNU's strerror_r returns the text, which need not be in `buffer`. strerror is not thread-safe.
  return strerror_r(error_number, buffer, sizeof(buffer));
}

void AttachErrno(int error_number, absl::Status* status) {
  if (error_number != 0) status->SetPayload(kErrnoPayload, absl::Cord(absl::StrCat(error_number)));
}

constexpr const char* kVerbs[] = {
    "save",
    "attach",
    "set up the engine for",
    "open",
    "reserve space for",
    "write",
    "read",
    "truncate",
    "fsync",
    "fsync directory of",
    "rename",
    "remove",
    "digest",
    "write manifest of",
    "wait for the trainer of",
    "wait for the other ranks of",
    "cancel",
    "lock",
    "replace",
    "join the other ranks of",
    "map the worker's memory for",
    "map the read-back buffer for",
};
static_assert(std::size(kVerbs) == static_cast<size_t>(kLastOperation) + 1);

/// The part after "OPERATION OBJECT: " for a failure without errno.
std::string Reason(const Failure& failure) {
  switch (failure.code) {
    case FailureCode::kCancelled:
      return "cancelled; its partial files were removed";
    case FailureCode::kDeadlineExceeded:
      return "no progress within the deadline";
    case FailureCode::kAlreadyExists:
      return "it exists already; choose another name, remove it, or ask to replace it";
    case FailureCode::kAborted:
      if (failure.operation == Operation::kWaitRanks) return "another rank has failed";
      if (failure.operation == Operation::kRename || failure.operation == Operation::kOpen)
        return "another save of the same files, or a recovery, has taken it over";
      if (failure.operation == Operation::kReplace)
        return "a save that began later was completed in the meantime; the younger one stays";
      return "stopped, because the trainer died or staging failed before everything was sealed";
    case FailureCode::kFailedPrecondition:
      if (failure.operation == Operation::kReplace)
        return "it holds an entry that is no part of a checkpoint; move the entry elsewhere, or "
               "save under another name";
      if (failure.operation == Operation::kRemove)
        return "it holds an entry that is no part of a checkpoint; move the entry elsewhere, then "
               "remove the rest";
      return "not in the state that this operation needs";
    case FailureCode::kInvalidArgument:
      return "the job is malformed";
    case FailureCode::kInternal:
      return "internal error";
    case FailureCode::kDataLoss:
      if (failure.operation == Operation::kRename || failure.operation == Operation::kManifest)
        return "another program has replaced or changed it since it was written; nothing was "
               "committed";
      return "its bytes are not what was sealed";
    default:
      return "failed";
  }
}

}  // namespace

std::string Hex(const Digest& digest) {
  return absl::StrFormat("%016x%016x", digest.high, digest.low);
}

std::string Hex(const AttemptId& attempt) {
  return Hex(Digest{.low = attempt.low, .high = attempt.high});
}

FailureCode CodeOf(int error_number) { return sys::CodeOfErrno(error_number); }

absl::Status ErrnoStatus(absl::string_view operation, absl::string_view object, int error_number) {
  absl::Status status(static_cast<absl::StatusCode>(CodeOf(error_number)),
                      absl::StrCat(operation, " ", object, ": ", ErrnoText(error_number)));
  AttachErrno(error_number, &status);
  return status;
}

absl::Status ToStatus(const Failure& failure, const FailureNames& names) {
  if (failure.ok()) return absl::OkStatus();
  std::string object = names.checkpoint;
  if (failure.file < names.files.size())
    object = absl::StrCat(object, "/", names.files[failure.file]);
  std::string message = absl::StrCat(WordIn(kVerbs, failure.operation), " ", object);
  if (failure.operation == Operation::kDigest) {
    // A user must be able to act on a digest error without the source: name file, range and both
    // digests.
    const std::string what = failure.tensor < names.tensors.size()
                                 ? absl::StrCat("tensor \"", names.tensors[failure.tensor], "\"")
                                 : std::string("bytes of the file's own header or framing");
    absl::StrAppend(&message, ": ", what, ", bytes [", failure.offset, ", ",
                    failure.offset + failure.bytes, "), are not what was sealed (expected ",
                    Hex(failure.expected), ", found ", Hex(failure.found),
                    "); nothing was committed");
  } else {
    if (failure.operation == Operation::kWrite || failure.operation == Operation::kRead) {
      absl::StrAppend(&message, " @ ", failure.offset);
    }
    // EEXIST alone does not say what to do.
    const bool says_errno =
        failure.error_number != 0 && failure.code != FailureCode::kAlreadyExists;
    absl::StrAppend(&message, ": ", says_errno ? ErrnoText(failure.error_number) : Reason(failure));
  }
  absl::Status status(static_cast<absl::StatusCode>(failure.code), message);
  AttachErrno(failure.error_number, &status);
  return status;
}

std::string Describe(const layout::RankFailure& failure) {
  const std::string rank = absl::StrCat("rank ", failure.rank);
  switch (static_cast<layout::RankFailureKind>(failure.kind)) {
    case layout::RankFailureKind::kFailed: {
      const std::string text(failure.text, strnlen(failure.text, sizeof(failure.text)));
      if (failure.is_message != 0) return absl::StrCat(rank, " failed: ", text);
      Failure own;
      own.code = static_cast<FailureCode>(failure.code);
      own.operation = static_cast<Operation>(failure.operation);
      return absl::StrCat(
          rank, " failed: ", WordIn(kVerbs, own.operation), " ", text.empty() ? "its part" : text,
          ": ", failure.error_number != 0 ? ErrnoText(failure.error_number) : Reason(own));
    }
    case layout::RankFailureKind::kSilent:
      return absl::StrCat(rank, " has given no sign of life for ", failure.seconds,
                          " s (time_liveness_max): neither its trainer nor its worker runs");
    case layout::RankFailureKind::kAbsent:
      return absl::StrCat(rank, " has not begun this save, and others have waited for it for ",
                          failure.seconds, " s; if ranks call so far apart, raise ",
                          "time_liveness_max; if it has called, it does not see this directory");
    case layout::RankFailureKind::kSlow:
      return absl::StrCat(rank, " lives, but has not ended its part within ", failure.seconds,
                          " s (time_ranks_max)");
    case layout::RankFailureKind::kFenced:
      return "a recovery has taken the save's directory away, because its trainer was dead";
    case layout::RankFailureKind::kDiffers:
      return absl::StrCat(rank, " and rank 0 differ in ",
                          std::string(failure.text, strnlen(failure.text, sizeof(failure.text))),
                          ", which all ranks were to have alike; nothing was committed");
    case layout::RankFailureKind::kUnknown:
      break;
  }
  return absl::StrCat(rank, " failed");
}

absl::Status Annotate(const absl::Status& status, absl::string_view context) {
  if (status.ok()) return status;
  absl::Status annotated(status.code(), absl::StrCat(context, ": ", status.message()));
  status.ForEachPayload([&annotated](absl::string_view url, const absl::Cord& payload) {
    annotated.SetPayload(url, payload);
  });
  return annotated;
}

}  // namespace holdfast::base
