#include "runtime/verify/zip_archives.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "runtime/base/status.h"
#include "runtime/load/directory.h"

namespace holdfast::verify {
namespace {

constexpr uint64_t kEndRecordBytes = 22;
constexpr uint64_t kEndRecordsBytes = 22 + 20 + 56;  // with the zip64 end record and its locator
constexpr uint64_t kLocalHeaderBytes = 30;
constexpr uint64_t kScanBytes = 1 << 20;
constexpr uint64_t kDirectoryBytesMax = uint64_t{1} << 30;
constexpr char kEndSignature[] = "PK\x05\x06";
constexpr char kLocalSignature[] = "PK\x03\x04";

struct Archive {
  uint64_t begin = 0;
  uint64_t end = 0;
  std::vector<format::ZipRecord> records;
};

class ArchiveWalk {
 public:
  ArchiveWalk(int file, const std::string& name) : file_(file), name_(name) {}

  absl::StatusOr<ZipArchives> Walk(uint64_t file_bytes) {
    ZipArchives out;
    uint64_t end = file_bytes;
    while (end > 0) {
      auto archive = EndingAt(end, std::min(end, format::kZipTailBytes));
      if (archive.ok()) {
        end = archive->begin;
        Take(*std::move(archive), &out);
        continue;
      }
      if (IsReadError(archive.status())) return archive.status();
      ZipGap gap{.begin = 0, .end = end, .why = archive.status()};
      auto before = LastBefore(end);
      if (!before.ok() && IsReadError(before.status())) return before.status();
      if (before.ok()) gap.begin = before->end;
      HOLDFAST_ASSIGN_OR_RETURN(gap.begins_as_zip, IsLocalHeader(gap.begin, gap.end));
      out.gaps.push_back(std::move(gap));
      if (!before.ok()) break;
      end = before->begin;
      Take(*std::move(before), &out);
    }
    std::sort(out.records.begin(), out.records.end(),
              [](const auto& a, const auto& b) { return a.begin < b.begin; });
    return out;
  }

 private:
  static bool IsReadError(const absl::Status& status) { return base::ErrnoOf(status) != 0; }

  static void Take(Archive archive, ZipArchives* out) {
    ++out->archives;
    for (format::ZipRecord& record : archive.records) out->records.push_back(std::move(record));
  }

  /// The archive that ends at byte `end`; its end records are within the last `tail_bytes`.
  absl::StatusOr<Archive> EndingAt(uint64_t end, uint64_t tail_bytes) {
    HOLDFAST_ASSIGN_OR_RETURN(std::string tail,
                              load::ReadRange(file_, name_, end - tail_bytes, tail_bytes));
    HOLDFAST_ASSIGN_OR_RETURN(const uint64_t length, format::ZipLength(tail));
    if (length > end) return absl::DataLossError("zip: its begin is missing");
    Archive archive{.begin = end - length, .end = end, .records = {}};
    absl::string_view own = tail;
    if (own.size() > length) own.remove_prefix(own.size() - length);
    HOLDFAST_ASSIGN_OR_RETURN(const format::ZipDirectory where,
                              format::FindZipDirectory(own, length));
    if (where.bytes > kDirectoryBytesMax) {
      return absl::DataLossError(absl::StrCat("zip: a directory of ", where.bytes, " bytes"));
    }
    HOLDFAST_ASSIGN_OR_RETURN(
        const std::string directory,
        load::ReadRange(file_, name_, archive.begin + where.begin, where.bytes));
    HOLDFAST_ASSIGN_OR_RETURN(archive.records, format::ParseZipDirectory(directory, where, length));
    for (format::ZipRecord& record : archive.records) {
      HOLDFAST_ASSIGN_OR_RETURN(
          const std::string local,
          load::ReadRange(file_, name_, archive.begin + record.begin, kLocalHeaderBytes));
      const auto header = format::LocalHeaderBytes(local);
      if (!header.ok()) {
        return base::Annotate(header.status(), absl::StrCat("byte ", archive.begin + record.begin));
      }
      record.begin += *header;
    }
    HOLDFAST_RETURN_IF_ERROR(format::CheckZipLayout(archive.records, where));
    for (format::ZipRecord& record : archive.records) record.begin += archive.begin;
    return archive;
  }

  /// The last whole archive that ends at `limit` or before. \error kNotFound when there is none.
  absl::StatusOr<Archive> LastBefore(uint64_t limit) {
    uint64_t high = limit;
    while (high >= kEndRecordBytes) {
      const uint64_t low = high > kScanBytes ? high - kScanBytes : 0;
      HOLDFAST_ASSIGN_OR_RETURN(const std::string block,
                                load::ReadRange(file_, name_, low, high - low));
      size_t at = block.rfind(kEndSignature);
      while (at != std::string::npos) {
        auto archive = WithEndRecordAt(low + at, limit);
        if (archive.ok() || IsReadError(archive.status())) return archive;
        at = at == 0 ? std::string::npos : block.rfind(kEndSignature, at - 1);
      }
      if (low == 0) break;
      high = low + sizeof(kEndSignature) - 2;  // a signature may lie across the border
    }
    return absl::NotFoundError("zip: no archive ends here or before");
  }

  absl::StatusOr<Archive> WithEndRecordAt(uint64_t at, uint64_t limit) {
    if (limit - at < kEndRecordBytes) return absl::DataLossError("zip: cut in its end record");
    HOLDFAST_ASSIGN_OR_RETURN(const std::string record,
                              load::ReadRange(file_, name_, at, kEndRecordBytes));
    const uint64_t comment_bytes = static_cast<unsigned char>(record[20]) |
                                   static_cast<uint64_t>(static_cast<unsigned char>(record[21]))
                                       << 8;
    const uint64_t end = at + kEndRecordBytes + comment_bytes;
    if (end > limit) return absl::DataLossError("zip: cut in its comment");
    return EndingAt(end, std::min(end, kEndRecordsBytes + comment_bytes));
  }

  absl::StatusOr<bool> IsLocalHeader(uint64_t begin, uint64_t end) {
    if (end - begin < 4) return false;
    HOLDFAST_ASSIGN_OR_RETURN(const std::string first, load::ReadRange(file_, name_, begin, 4));
    return absl::StartsWith(first, kLocalSignature);
  }

  const int file_;
  const std::string& name_;
};

}  // namespace

absl::StatusOr<ZipArchives> FindZipArchives(int file, const std::string& name,
                                            uint64_t file_bytes) {
  return ArchiveWalk(file, name).Walk(file_bytes);
}

}  // namespace holdfast::verify
