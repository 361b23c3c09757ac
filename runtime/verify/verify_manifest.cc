#include "runtime/verify/verify_manifest.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "runtime/base/status.h"
#include "runtime/digest/digest.h"
#include "runtime/directory/entries.h"
#include "runtime/load/chunk_stream.h"
#include "runtime/verify/narrow.h"
#include "runtime/verify/read_faults.h"

namespace holdfast::verify {
namespace {

using load::StreamBlock;
using load::StreamVerdict;

class ManifestCheck {
 public:
  ManifestCheck(int directory, FaultLog* log) : directory_(directory), log_(log) {}

  /// Queues the chunks of one file.
  void AddFile(const format::Manifest& manifest, uint32_t index) {
    const format::Manifest::File& file = manifest.files[index];
    const uint32_t at = static_cast<uint32_t>(maps_.size());
    maps_.emplace_back(manifest, index);
    files_.push_back({.directory = directory_, .name = file.name});
    const auto entry = directory::Look(directory_, file.name, /*follow_symlink=*/false);
    // Reading the manifests has reported the fault.
    if (!entry.ok() || entry->kind != directory::EntryKind::kFile) return;
    if (entry->bytes >= file.bytes) {
      load::AppendRanges(at, 0, file.bytes, 0, &ranges_);
    } else {
      // Only complete chunks have a comparable digest.
      const uint64_t whole = entry->bytes / kChunkBytes * kChunkBytes;
      load::AppendRanges(at, 0, whole, 0, &ranges_);
      ReportLost(maps_.back(), entry->bytes);
    }
  }

  absl::Status Run(const VerifyOptions& options, VerifyReport* report) {
    const absl::Status status = StreamAll(
        files_, ranges_, options, [this](const StreamBlock& block) { return Compare(block); },
        report);
    report->bytes += bytes_compared_.load(std::memory_order_relaxed);
    return status;
  }

 private:
  /// Names the tensors that lost bytes in a file cut at `bytes`, with the lost ranges.
  void ReportLost(const FileMap& map, uint64_t bytes) {
    for (const format::Manifest::Tensor* tensor : map.Overlapping(bytes, map.file().bytes)) {
      const uint64_t begin = std::max(tensor->begin, bytes);
      log_->Add(Verdict::kCorrupt, {.file = map.file().name,
                                    .tensor = tensor->name,
                                    .begin = begin,
                                    .end = tensor->end,
                                    .reason = "missing",
                                    .expected = absl::StrCat(tensor->end - begin, " bytes"),
                                    .found = "the file's end"});
    }
  }

  StreamVerdict Compare(const StreamBlock& block) {
    const FileMap& map = maps_[block.range.file];
    if (AddReadFault(block, map.file().name, log_)) return StreamVerdict::kContinue;
    const uint64_t chunk = block.range.offset / kChunkBytes;
    const Digest found = digest::Of(block.data, block.range.bytes);
    bytes_compared_.fetch_add(block.range.bytes, std::memory_order_relaxed);
    if (found == map.file().chunks[chunk]) return StreamVerdict::kContinue;
    for (Fault& fault : Narrow(map, chunk, block.data, block.range.bytes, found)) {
      log_->Add(Verdict::kCorrupt, std::move(fault));
    }
    return StreamVerdict::kContinue;
  }

  const int directory_;
  FaultLog* const log_;
  std::vector<FileMap> maps_;
  std::vector<load::StreamFile> files_;
  std::vector<load::StreamRange> ranges_;
  std::atomic<uint64_t> bytes_compared_{0};
};

}  // namespace

absl::Status VerifyManifests(int directory, const std::vector<format::Manifest>& manifests,
                             const std::string& only, const VerifyOptions& options, FaultLog* log,
                             VerifyReport* report) {
  ManifestCheck check(directory, log);
  for (const format::Manifest& manifest : manifests) {
    for (uint32_t i = 0; i < manifest.files.size(); ++i) {
      if (!only.empty() && manifest.files[i].name != only) continue;
      // The manifests have equal digests for the file: it is read once, by rank 0's.
      if (!manifest.Wrote(manifest.files[i]) && manifests.front().rank == 0) continue;
      check.AddFile(manifest, i);
      ++report->files;
      for (const format::Manifest::Tensor& tensor : manifest.tensors) {
        report->tensors += tensor.file == i ? 1 : 0;
      }
    }
  }
  if (!manifests.empty()) {
    report->step = manifests.front().step;
    report->attempt = manifests.front().attempt;
  }
  return check.Run(options, report);
}

}  // namespace holdfast::verify
