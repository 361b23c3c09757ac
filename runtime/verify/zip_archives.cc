#include "runtime/verify/zip_archives.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "runtime/base/status.h"
#include "runtime/directory/entries.h"

namespace holdfast::verify {
namespace {

constexpr uint64_t kEndRecordBytes = 22;
constexpr uint64_t kEndRecordsBytes = 22 + 20 + 56;  // with the zip64 end record and its locator
constexpr uint64_t kSignatureBytes = 4;
constexpr uint64_t kWindowBytesMin = 64 << 10;
constexpr uint64_t kWindowBytesMax = 1 << 20;
// A directory is read into memory. A sparse file may name one of any length.
constexpr uint64_t kDirectoryBytesMax = 1 << 30;
constexpr char kEndSignature[] = "PK\x05\x06";
constexpr char kRecordSignature[] = "PK\x01\x02";
// The reads of a sound file: its directories and local headers once, and each byte once in a
// window.
constexpr uint64_t kWorkPerByte = 4;
constexpr uint64_t kWorkMin = 64 << 10;
constexpr uint64_t kWorkPerRead = 64;  // a system call costs at least as much as 64 bytes

struct Archive {
  uint64_t begin = 0;
  uint64_t end = 0;
  std::vector<format::ZipRecord> records;
};

class ArchiveWalk {
 public:
  ArchiveWalk(int file, const std::string& name, uint64_t file_bytes)
      : file_(file),
        name_(name),
        file_bytes_(file_bytes),
        work_left_(kWorkMin + kWorkPerByte * file_bytes) {}

  absl::StatusOr<ZipArchives> Walk() {
    ZipArchives out;
    uint64_t end = file_bytes_;
    while (end > 0) {
      absl::Status why;
      auto archive = LastBefore(end, &why);
      if (!archive.ok() && IsReadError(archive.status())) return archive.status();
      if (!archive.ok() || archive->end < end) {
        ZipGap gap{.begin = archive.ok() ? archive->end : 0, .end = end, .why = why};
        // Without work left the search ended early, and the structure of the bytes is suspect.
        if (absl::IsResourceExhausted(archive.status())) gap.why = archive.status();
        HOLDFAST_ASSIGN_OR_RETURN(gap.begins_as_zip, IsLocalHeader(gap.begin, gap.end));
        out.gaps.push_back(std::move(gap));
      }
      if (!archive.ok()) break;
      end = archive->begin;
      ++out.archives;
      for (format::ZipRecord& record : archive->records) out.records.push_back(std::move(record));
    }
    std::sort(out.records.begin(), out.records.end(),
              [](const auto& a, const auto& b) { return a.begin < b.begin; });
    return out;
  }

 private:
  static bool IsReadError(const absl::Status& status) { return base::ErrnoOf(status) != 0; }

  /// Bounds the walk: crafted end records may all lead to the same bytes.
  absl::Status Spend(uint64_t bytes) {
    if (bytes > work_left_) {
      work_left_ = 0;
      return absl::ResourceExhaustedError(
          absl::StrCat("zip: its end records lead to more than ", kWorkPerByte,
                       " times the file's bytes; torch.save writes one for each archive"));
    }
    work_left_ -= bytes;
    return absl::OkStatus();
  }

  /// Reads bytes anywhere in the file.
  absl::StatusOr<std::string> Read(uint64_t begin, uint64_t bytes) {
    HOLDFAST_RETURN_IF_ERROR(Spend(std::max(bytes, kWorkPerRead)));
    if (begin >= window_begin_ && begin - window_begin_ <= window_.size() &&
        bytes <= window_.size() - (begin - window_begin_)) {
      return window_.substr(begin - window_begin_, bytes);
    }
    return directory::ReadRange(file_, name_, begin, bytes);
  }

  /// Moves the window over these bytes and preceding bytes.
  absl::Status Show(uint64_t begin, uint64_t end) {
    if (begin >= window_begin_ && end <= window_begin_ + window_.size()) return absl::OkStatus();
    const uint64_t bytes = std::min(end, std::max(end - begin, window_bytes_));
    HOLDFAST_RETURN_IF_ERROR(Spend(bytes));
    HOLDFAST_ASSIGN_OR_RETURN(window_, directory::ReadRange(file_, name_, end - bytes, bytes));
    window_begin_ = end - bytes;
    return absl::OkStatus();
  }

  absl::string_view Shown(uint64_t begin, uint64_t end) const {
    return absl::string_view(window_).substr(begin - window_begin_, end - begin);
  }

  /// Returns the last whole archive that ends at `limit` or before. `why`: why no archive ends at
  /// `limit`.
  absl::StatusOr<Archive> LastBefore(uint64_t limit, absl::Status* why) {
    *why = format::ZipLength("").status();  // no end record
    bool ends_at_limit = false;
    window_bytes_ = kWindowBytesMin;
    uint64_t high = limit;
    while (high >= kSignatureBytes) {
      HOLDFAST_RETURN_IF_ERROR(Show(high - kSignatureBytes, high));
      const size_t at = Shown(window_begin_, high).rfind(kEndSignature);
      if (at == absl::string_view::npos) {
        if (window_begin_ == 0) break;
        high = window_begin_ + kSignatureBytes - 1;  // a signature may lie across the border
        window_bytes_ = std::min(2 * window_bytes_, kWindowBytesMax);
        continue;
      }
      const uint64_t place = window_begin_ + at;
      uint64_t end = 0;
      auto archive = WithEndRecordAt(place, limit, &end);
      if (archive.ok() || IsReadError(archive.status()) ||
          absl::IsResourceExhausted(archive.status())) {
        return archive;
      }
      if (end == limit && !ends_at_limit) *why = archive.status();
      ends_at_limit = ends_at_limit || end == limit;
      high = place + kSignatureBytes - 1;
    }
    return absl::NotFoundError("zip: no archive ends here or before");
  }

  absl::StatusOr<Archive> WithEndRecordAt(uint64_t at, uint64_t limit, uint64_t* end) {
    if (limit - at < kEndRecordBytes) return absl::DataLossError("zip: cut in its end record");
    HOLDFAST_RETURN_IF_ERROR(Show(at, at + kEndRecordBytes));
    const absl::string_view record = Shown(at, at + kEndRecordBytes);
    const uint64_t comment_bytes = static_cast<unsigned char>(record[20]) |
                                   static_cast<uint64_t>(static_cast<unsigned char>(record[21]))
                                       << 8;
    *end = at + kEndRecordBytes + comment_bytes;
    if (*end > limit) return absl::DataLossError("zip: cut in its comment");
    return EndingAt(*end, std::min(*end, kEndRecordsBytes + comment_bytes));
  }

  /// Returns the archive that ends at byte `end`. Its end records are within the last `tail_bytes`.
  absl::StatusOr<Archive> EndingAt(uint64_t end, uint64_t tail_bytes) {
    HOLDFAST_RETURN_IF_ERROR(Spend(tail_bytes));
    HOLDFAST_RETURN_IF_ERROR(Show(end - tail_bytes, end));
    absl::string_view tail = Shown(end - tail_bytes, end);
    HOLDFAST_ASSIGN_OR_RETURN(const uint64_t length, format::ZipLength(tail));
    if (length > end) return absl::DataLossError("zip: its begin is missing");
    if (tail.size() > length) tail.remove_prefix(tail.size() - length);
    HOLDFAST_ASSIGN_OR_RETURN(const format::ZipDirectory where,
                              format::FindZipDirectory(tail, length));
    Archive archive{.begin = end - length, .end = end, .records = {}};
    HOLDFAST_RETURN_IF_ERROR(ReadRecords(where, length, &archive));
    return archive;
  }

  absl::Status ReadRecords(const format::ZipDirectory& where, uint64_t length, Archive* archive) {
    const uint64_t begin = archive->begin + where.begin;
    if (where.bytes > kDirectoryBytesMax) {
      return absl::DataLossError(absl::StrCat("zip: a directory of ", where.bytes,
                                              " bytes, at most ", kDirectoryBytesMax));
    }
    if (where.bytes > 0) {
      // Rejects most false end records before a directory is read into memory.
      HOLDFAST_ASSIGN_OR_RETURN(const std::string first,
                                Read(begin, std::min(where.bytes, kSignatureBytes)));
      if (first != kRecordSignature) {
        return absl::DataLossError(absl::StrCat("zip: no directory record at byte ", begin));
      }
    }
    HOLDFAST_ASSIGN_OR_RETURN(const std::string directory, Read(begin, where.bytes));
    HOLDFAST_ASSIGN_OR_RETURN(archive->records,
                              format::ParseZipDirectory(directory, where, length));
    for (format::ZipRecord& record : archive->records) {
      const uint64_t place = archive->begin + record.begin;
      // The directory's parser has checked that header and name lie in front of the directory.
      HOLDFAST_ASSIGN_OR_RETURN(const std::string local,
                                Read(place, format::kZipLocalHeaderBytes + record.name.size()));
      const auto header = format::LocalHeaderBytes(local, record.name);
      if (!header.ok()) return base::Annotate(header.status(), absl::StrCat("byte ", place));
      record.begin += *header;
    }
    HOLDFAST_RETURN_IF_ERROR(format::CheckZipLayout(archive->records, where));
    for (format::ZipRecord& record : archive->records) record.begin += archive->begin;
    return absl::OkStatus();
  }

  absl::StatusOr<bool> IsLocalHeader(uint64_t begin, uint64_t end) {
    if (end - begin < kSignatureBytes) return false;
    HOLDFAST_ASSIGN_OR_RETURN(const std::string first,
                              directory::ReadRange(file_, name_, begin, kSignatureBytes));
    return absl::StartsWith(first, kZipSignature);
  }

  const int file_;
  const std::string& name_;
  const uint64_t file_bytes_;
  uint64_t work_left_;
  std::string window_;
  uint64_t window_begin_ = 0;
  uint64_t window_bytes_ = kWindowBytesMin;
};

}  // namespace

absl::StatusOr<ZipArchives> FindZipArchives(int file, const std::string& name,
                                            uint64_t file_bytes) {
  return ArchiveWalk(file, name, file_bytes).Walk();
}

}  // namespace holdfast::verify
