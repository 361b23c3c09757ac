// Checks files that no manifest names by their own formats. Such checks prove less than a digest.
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
  /// The handling of a file of unknown structure with a checkpoint's suffix.
  enum class Unknown { kFault, kPassOver };
  ForeignCheck(int directory, FaultLog* log, Unknown unknown)
      : directory_(directory), log_(log), unknown_(unknown) {}

  /// Checks the structure of one file and queues its ranges for reading. `asked_for`: the caller
  /// named the file. Otherwise a file of unknown structure without a checkpoint's suffix is passed
  /// over.
  void AddFile(const std::string& name, bool asked_for);

  /// Reads and compares the queued ranges. Fills the report's counts and the basis of the verdict.
  absl::Status Run(const VerifyOptions& options, VerifyReport* report);

  /// A file of known structure.
  struct Understood {
    std::string name;
    uint64_t bytes = 0;
    bool is_zip = false;
    std::vector<PlannedTensor> tensors;  ///< For a zip: its records, as bytes.
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
  // By range. The thread of a range writes its entry; all entries are read after the threads' end.
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
