#include "runtime/load/copy_out.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "runtime/base/status.h"
#include "runtime/digest/digest.h"

namespace holdfast::load {
namespace {

// Bound for a copy of at most one chunk to a device; after this time the copy counts as lost.
constexpr absl::Duration kCopyTimeMax = absl::Minutes(10);

}  // namespace

absl::Status ReplacedSince(absl::string_view path) {
  return absl::AbortedError(
      absl::StrCat("load from ", path, ": it was replaced since it was opened; open it anew"));
}

StreamVerdict CopyOut::Sink(const StreamBlock& block) {
  Outcome outcome = Look(block);
  if (outcome.status.ok()) return StreamVerdict::kContinue;
  {
    base::MutexLock lock(&mutex_);
    if (status_.ok()) status_ = std::move(outcome.status);
  }
  return outcome.copy_in_flight ? StreamVerdict::kKeepBuffer : StreamVerdict::kStop;
}

absl::Status CopyOut::status() const {
  base::MutexLock lock(&mutex_);
  return status_;
}

CopyOut::Outcome CopyOut::Look(const StreamBlock& block) const {
  const TensorRead& read = plan_.reads[block.range.tag];
  if (block.error != 0 || block.bytes_read < block.range.bytes) return {ReadError(block)};
  if (verify_) {
    absl::Status proof = Prove(block, read);
    if (!proof.ok()) return {std::move(proof)};
  }
  return Copy(block, read);
}

absl::Status CopyOut::ReadError(const StreamBlock& block) const {
  const std::string& path = paths_[block.range.file];
  if (block.failed_to_open && block.error == ESTALE) return ReplacedSince(path);
  if (block.failed_to_open) return base::ErrnoStatus("open", path, block.error);
  const std::string object = absl::StrCat(path, " @ ", block.range.offset);
  if (block.error != 0) return base::ErrnoStatus("read", object, block.error);
  return absl::DataLossError(absl::StrCat("read ", object, ": the file ends at ",
                                          block.range.offset + block.bytes_read, ", before byte ",
                                          block.range.offset + block.range.bytes));
}

absl::Status CopyOut::Prove(const StreamBlock& block, const TensorRead& read) const {
  for (uint32_t i = read.piece_first; i < read.piece_first + read.piece_count; ++i) {
    const TensorPiece& piece = plan_.pieces[i];
    const Digest found = digest::Of(block.data + (piece.begin - block.range.offset), piece.bytes);
    if (found == piece.digest) continue;
    return absl::DataLossError(absl::StrCat(
        "load tensor \"", targets_[piece.target].name, "\" from ", paths_[piece.file], ": bytes [",
        piece.begin, ", ", piece.begin + piece.bytes, ") are not what was sealed (expected ",
        base::Hex(piece.digest), ", found ", base::Hex(found), ")"));
  }
  return absl::OkStatus();
}

CopyOut::Outcome CopyOut::Copy(const StreamBlock& block, const TensorRead& read) const {
  struct Started {
    Device* device;
    CopyTicket ticket;
  };
  std::vector<Started> started;
  Outcome outcome;
  for (uint32_t i = read.piece_first; i < read.piece_first + read.piece_count; ++i) {
    const TensorPiece& piece = plan_.pieces[i];
    const TensorTarget& target = targets_[piece.target];
    char* destination = static_cast<char*>(target.data) + piece.target_offset;
    const char* source = block.data + (piece.begin - block.range.offset) + piece.copy_from;
    if (target.device == nullptr || target.device->is_host()) {
      std::memcpy(destination, source, piece.copy_bytes);
      continue;
    }
    const auto ticket = target.device->CopyFromHost(destination, source, piece.copy_bytes);
    if (!ticket.ok()) {
      outcome.status = base::Annotate(
          ticket.status(),
          absl::StrCat("copy tensor \"", target.name, "\" to ", target.device->name()));
      break;
    }
    started.push_back({target.device, *ticket});
  }
  // The slot is reused on return: every copy out of the slot must have ended.
  for (const Started& copy : started) {
    absl::Status ended = copy.device->Wait(copy.ticket, kCopyTimeMax);
    if (ended.ok()) continue;
    // Only a lost context says that its copies have ended.
    outcome.copy_in_flight = outcome.copy_in_flight || !absl::IsAborted(ended);
    if (outcome.status.ok()) {
      outcome.status =
          base::Annotate(ended, absl::StrCat("copy a tensor to ", copy.device->name()));
    }
  }
  return outcome;
}

}  // namespace holdfast::load
