#include "runtime/verify/verify_foreign.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "runtime/base/status.h"
#include "runtime/directory/entries.h"
#include "runtime/sys/system.h"
#include "runtime/verify/read_faults.h"

namespace holdfast::verify {
namespace {

using load::StreamBlock;
using load::StreamVerdict;

constexpr char kDistributedSuffix[] = ".distcp";

bool HasTensorSuffix(const std::string& name) {
  constexpr std::array<const char*, 5> kSuffixes = {".pt", ".pth", ".ckpt", ".bin",
                                                    kDistributedSuffix};
  return std::any_of(kSuffixes.begin(), kSuffixes.end(),
                     [&name](const char* suffix) { return absl::EndsWith(name, suffix); });
}

Fault StructureFault(const std::string& file, uint64_t begin, uint64_t end, std::string expected,
                     std::string found) {
  return {.file = file,
          .begin = begin,
          .end = end,
          .reason = "structure",
          .expected = std::move(expected),
          .found = std::move(found)};
}

absl::StatusOr<uint64_t> FileBytes(int fd, const std::string& name) {
  struct stat status = {};
  if (sys::Sys().fstat(fd, &status) != 0) return base::ErrnoStatus("stat", name, errno);
  return static_cast<uint64_t>(status.st_size);
}

/// Returns a record's name. An empty name becomes "record N", because a manifest needs names.
std::string NameOf(const format::ZipRecord& record, size_t index) {
  return record.name.empty() ? absl::StrCat("record ", index) : record.name;
}

}  // namespace

void ForeignCheck::AddFile(const std::string& name, bool asked_for) {
  const bool is_safetensors = absl::EndsWith(name, ".safetensors");
  const bool expected = asked_for || is_safetensors || HasTensorSuffix(name);
  const auto add_error = [&](const absl::Status& status) {
    if (expected) log_->Add(directory::FindingOf(status, name, "structure"));
    if (!expected) passed_over_.push_back(name);
  };
  const auto fd = directory::OpenFile(directory_, name, /*follow_symlink=*/true);
  if (!fd.ok()) return add_error(fd.status());
  const auto bytes = FileBytes(fd->get(), name);
  if (!bytes.ok()) return add_error(bytes.status());
  const auto first = directory::ReadRange(fd->get(), name, 0, std::min<uint64_t>(*bytes, 4));
  if (!first.ok()) return add_error(first.status());
  if (*first == kZipSignature || absl::EndsWith(name, kDistributedSuffix)) {
    auto archives = FindZipArchives(fd->get(), name, *bytes);
    if (!archives.ok()) return add_error(archives.status());
    if (*first == kZipSignature || archives->archives > 0) {
      return AddZip(name, *bytes, *std::move(archives));
    }
  }
  auto file = load::ReadSafetensorsFile(fd->get(), name);
  if (file.ok()) return AddSafetensors(name, *std::move(file));
  if (is_safetensors) return add_error(file.status());
  if (!expected || unknown_ == Unknown::kPassOver) {
    passed_over_.push_back(name);
    return;
  }
  // A pickle or another unknown structure: not damage, but not checkable.
  log_->Add(Verdict::kUnreadable, StructureFault(name, 0, *bytes, "safetensors or a torch zip",
                                                 "a structure that is not known here"));
}

void ForeignCheck::AddSafetensors(const std::string& name, load::SafetensorsFile file) {
  if (!file.attempt().empty()) {
    orphans_.push_back(name);
    log_->Add(Verdict::kIncomplete,
              {.file = name,
               .reason = "manifest",
               .expected = "a manifest beside it that names it",
               .found = absl::StrCat("none; a save wrote it, attempt ", file.attempt())});
  }
  understood_.push_back({name, file.bytes, false, std::move(file.header.tensors)});
}

void ForeignCheck::AddZip(const std::string& name, uint64_t bytes, ZipArchives archives) {
  const bool several = absl::EndsWith(name, kDistributedSuffix);
  for (const ZipGap& gap : archives.gaps) AddGap(name, gap, several);
  const uint32_t index = static_cast<uint32_t>(files_.size());
  files_.push_back({.directory = directory_, .name = name, .follow_symlink = true});
  Understood understood{name, bytes, true, {}};
  for (const format::ZipRecord& record : archives.records) {
    understood.tensors.push_back({.name = NameOf(record, understood.tensors.size()),
                                  .dtype = "U8",
                                  .shape = {static_cast<int64_t>(record.bytes)},
                                  .begin = record.begin,
                                  .end = record.begin + record.bytes});
    QueueRecord(index, record);
  }
  understood_.push_back(std::move(understood));
}

void ForeignCheck::AddGap(const std::string& name, const ZipGap& gap, bool several_archives) {
  if (gap.why.code() == absl::StatusCode::kUnimplemented) {
    log_->Add(Verdict::kUnreadable, StructureFault(name, gap.begin, gap.end, "stored records",
                                                   std::string(gap.why.message())));
  } else if (several_archives && !gap.begins_as_zip && !absl::IsResourceExhausted(gap.why)) {
    // Such files may hold items without any framing between the archives.
    bytes_unframed_ += gap.end - gap.begin;
  } else {
    log_->Add(Verdict::kCorrupt, StructureFault(name, gap.begin, gap.end, "a zip archive",
                                                std::string(gap.why.message())));
  }
}

void ForeignCheck::QueueRecord(uint32_t file, const format::ZipRecord& record) {
  Record queued{.file = file, .record = record, .range_first = ranges_.size()};
  load::AppendRanges(file, queued.record.begin, queued.record.begin + queued.record.bytes, 0,
                     &ranges_);
  queued.range_count = ranges_.size() - queued.range_first;
  for (size_t i = queued.range_first; i < ranges_.size(); ++i) ranges_[i].tag = i;
  records_.push_back(std::move(queued));
}

StreamVerdict ForeignCheck::Sum(const StreamBlock& block) {
  if (!AddReadFault(block, files_[block.range.file].name, log_)) {
    parts_[block.range.tag] = {format::Crc32(0, block.data, block.range.bytes), true};
  }
  return StreamVerdict::kContinue;
}

void ForeignCheck::CompareRecord(const Record& record, VerifyReport* report) {
  uint32_t crc32 = 0;
  for (size_t i = record.range_first; i < record.range_first + record.range_count; ++i) {
    if (!parts_[i].read) return;  // already reported as unreadable
    crc32 = format::Crc32Combine(crc32, parts_[i].crc32, ranges_[i].bytes);
  }
  report->bytes += record.record.bytes;
  if (crc32 == record.record.crc32) return;
  if (record.record.crc32 == 0) {
    // torch.serialization.set_crc32_options(False) leaves it 0.
    ++records_without_crc32_;
    return;
  }
  log_->Add(Verdict::kCorrupt, {.file = files_[record.file].name,
                                .tensor = record.record.name,
                                .begin = record.record.begin,
                                .end = record.record.begin + record.record.bytes,
                                .reason = "crc32",
                                .expected = absl::StrFormat("%08x", record.record.crc32),
                                .found = absl::StrFormat("%08x", crc32)});
}

absl::Status ForeignCheck::Run(const VerifyOptions& options, VerifyReport* report) {
  parts_.resize(ranges_.size());
  HOLDFAST_RETURN_IF_ERROR(StreamAll(
      files_, ranges_, options, [this](const StreamBlock& block) { return Sum(block); }, report));
  for (const Record& record : records_) CompareRecord(record, report);
  bool any_zip = false;
  bool any_safetensors = false;
  for (const Understood& file : understood_) {
    ++report->files;
    any_zip = any_zip || file.is_zip;
    any_safetensors = any_safetensors || !file.is_zip;
    report->tensors += static_cast<uint32_t>(file.tensors.size());
  }
  const std::string before = report->checked;
  report->checked = any_zip && any_safetensors ? "safetensors structure, torch zip CRC32s"
                    : any_zip                  ? "torch zip CRC32s"
                    : any_safetensors          ? "safetensors structure"
                                               : "nothing";
  // Files with manifests were checked before.
  const bool some = !before.empty() && before != "nothing";
  if (some) report->checked = absl::StrCat(before, "; ", report->checked);
  AddNote(
      some ? "Of other files only what the format allows was checked, which is less than a digest "
             "of every byte."
           : "No manifest: only what the format allows was checked, which is less than a digest of "
             "every byte.",
      report);
  if (any_safetensors) {
    AddNote("safetensors carries no checksum: changed tensor bytes would not be seen.", report);
  }
  if (bytes_unframed_ > 0) {
    AddNote(absl::StrCat(bytes_unframed_,
                         " bytes of .distcp files belong to no zip archive and "
                         "were not checked."),
            report);
  }
  if (records_without_crc32_ > 0) {
    AddNote(absl::StrCat(records_without_crc32_, " records carry no CRC32 and were not checked."),
            report);
  }
  if (!passed_over_.empty()) {
    AddNote(absl::StrCat("Not looked at: ", Enumerate(passed_over_), "."), report);
  }
  return absl::OkStatus();
}

}  // namespace holdfast::verify
