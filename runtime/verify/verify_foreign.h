// Files that no manifest names: what their own formats allow to check, which is less than a digest.
#ifndef HOLDFAST_RUNTIME_VERIFY_VERIFY_FOREIGN_H_
#define HOLDFAST_RUNTIME_VERIFY_VERIFY_FOREIGN_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "holdfast/verify.h"
#include "runtime/format/torch_zip.h"
#include "runtime/load/chunk_stream.h"
#include "runtime/load/safetensors_file.h"
#include "runtime/verify/fault_log.h"
#include "runtime/verify/zip_archives.h"

namespace holdfast::verify {

/// Checks foreign files: the structure of safetensors, the CRC32s of torch zips.
class ForeignCheck {
 public:
  /// What a file of unknown structure is, whose name promises tensors.
  enum class Unknown { kFault, kPassOver };
  ForeignCheck(int directory, FaultLog* log, Unknown unknown)
      : directory_(directory), log_(log), unknown_(unknown) {}

  /// Looks at the structure of one file and queues what is to be read of it. `asked_for`: the file
  /// was named by the caller; other files are only looked at if they look like a checkpoint's.
  void AddFile(const std::string& name, bool asked_for);

  /// Reads and compares what was queued; fills the report's counts and what the verdict rests on.
  absl::Status Run(const VerifyOptions& options, VerifyReport* report);

  /// What was understood so far.
  struct Understood {
    std::string name;
    uint64_t bytes = 0;
    bool is_zip = false;
    std::vector<PlannedTensor> tensors;  ///< Of a zip: its records, as bytes.
  };
  const std::vector<Understood>& understood() const { return understood_; }
  /// Files that were passed over.
  const std::vector<std::string>& passed_over() const { return passed_over_; }
  /// Files of a Holdfast save whose manifest is missing.
  const std::vector<std::string>& orphans() const { return orphans_; }

 private:
  struct Record {
    uint32_t file = 0;
    format::ZipRecord record;
    size_t range_first = 0;
    size_t range_count = 0;
  };
  void AddSafetensors(const std::string& name, load::SafetensorsFile file);
  void AddZip(const std::string& name, uint64_t bytes, ZipArchives archives);
  void AddGap(const std::string& name, const ZipGap& gap, bool several_archives);
  void QueueRecord(uint32_t file, const format::ZipRecord& record);
  load::StreamVerdict Sum(const load::StreamBlock& block);
  void CompareRecord(const Record& record, VerifyReport* report);

  const int directory_;
  FaultLog* const log_;
  const Unknown unknown_;
  std::vector<Understood> understood_;
  std::vector<std::string> passed_over_;
  std::vector<std::string> orphans_;
  std::vector<Record> records_;
  std::vector<load::StreamFile> files_;
  std::vector<load::StreamRange> ranges_;
  // By range, each written by the thread that was handed it, read after all have ended.
  struct Part {
    uint32_t crc32 = 0;
    bool read = false;
  };
  std::vector<Part> parts_;
  uint64_t bytes_unframed_ = 0;
  uint64_t records_without_crc32_ = 0;
};

}  // namespace holdfast::verify

#endif  // HOLDFAST_RUNTIME_VERIFY_VERIFY_FOREIGN_H_
