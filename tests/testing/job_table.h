// A sound job table, for tests and fuzzers that damage it.
#ifndef HOLDFAST_TESTS_TESTING_JOB_TABLE_H_
#define HOLDFAST_TESTS_TESTING_JOB_TABLE_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "runtime/layout/job.h"

namespace holdfast::testing {

/// A sound table of two files: a file of two chunks with three pieces, and an empty file.
class JobTable {
 public:
  JobTable() {
    uint64_t at = AlignUp(sizeof(layout::Job), 64);
    const auto take = [&at](uint64_t bytes) {
      const layout::Range range{.offset = at, .bytes = bytes};
      at = AlignUp(at + bytes, 64);
      return range;
    };
    const layout::Range files = take(2 * sizeof(layout::File));
    const layout::Range extents = take(2 * sizeof(layout::Extent));
    const layout::Range pieces = take(3 * sizeof(layout::Piece));
    const layout::Range published = take(2 * sizeof(layout::SharedU32));
    const layout::Range acknowledged = take(2 * sizeof(layout::SharedU32));
    const layout::Range manifest = take(1000);
    commit_ = take(400);
    bytes_ = at;
    // Exactly as long as the table, so that a sanitizer finds every access outside.
    memory_.reset(new (std::align_val_t{64}) char[bytes_]());
    job_ = new (memory_.get()) layout::Job();
    job_->table_bytes = bytes_;
    job_->flags = layout::kWriteManifest;
    job_->file_count = 2;
    job_->extent_count = 2;
    job_->piece_count = 3;
    job_->tensor_count = 2;
    job_->files = files;
    job_->extents = extents;
    job_->pieces = pieces;
    job_->published = published;
    job_->acknowledged = acknowledged;
    job_->manifest_template = manifest;
    job_->slots.self_digest = {.offset = 960, .width = 32};
    std::strcpy(job_->target, "step-1");
    std::strcpy(job_->partial, "step-1.partial-00");
    std::strcpy(job_->manifest, "rank-00000-of-00001.manifest.json");
    std::strcpy(job_->manifest_prefix, "rank-");
    std::strcpy(job_->manifest_suffix, "-of-00001.manifest.json");
    layout::File* const file = layout::Files(job_);
    std::strcpy(file[0].name, "model.bin");
    file[0].bytes = kChunkBytes + 100;
    file[0].extent_count = 2;
    file[0].root_slot = 32;
    std::strcpy(file[1].name, "empty.bin");
    file[1].extent_first = 2;
    layout::Extent* const extent = layout::Extents(job_);
    extent[0] = {.bytes = kChunkBytes, .piece_count = 1, .digest_slot = 64};
    extent[1] = {.file_offset = kChunkBytes,
                 .bytes = 100,
                 .piece_first = 1,
                 .piece_count = 2,
                 .digest_slot = 96};
    layout::Piece* const piece = layout::Pieces(job_);
    piece[0] = {.tensor = 0, .bytes = kChunkBytes};
    piece[1] = {.tensor = 0, .bytes = 60, .has_digest = 1};
    piece[2] = {.tensor = 1, .offset = 60, .bytes = 40, .has_digest = 1};
  }

  /// Makes a table of one rank or two.
  JobTable& WithCommitRecord() {
    job_->commit_template = commit_;
    job_->commit_slots = {.committed_at_ns = {.offset = 100, .width = 20},
                          .bytes = {.offset = 130, .width = 20},
                          .manifest_bytes = {.offset = 160, .width = 20},
                          .manifest_digest = 200,
                          .row_bytes = 80,
                          .self_digest = {.offset = 360, .width = 32}};
    return *this;
  }

  /// Makes the table of a file that is saved by itself.
  JobTable& AsSingleFile() {
    job_->flags = layout::kFilesOnly | layout::kSingleFile | layout::kWriteManifest;
    job_->file_count = 1;
    job_->files.bytes = sizeof(layout::File);
    std::strcpy(job_->target, ".");
    std::strcpy(job_->manifest, ".last.pt.holdfast-00000000000000010000000000000009.json");
    return *this;
  }

  /// Makes the table of a job that removes two directories.
  JobTable& AsRemoval() {
    job_->kind = layout::JobKind::kDelete;
    job_->target[0] = '\0';
    job_->trash = {.offset = job_->manifest_template.offset, .bytes = 2 * kNameBytes};
    job_->manifest_template = {};
    char* const names = layout::At<char>(job_, job_->trash);
    std::memset(names, 0, 2 * kNameBytes);
    std::strcpy(names, "step-1");
    std::strcpy(names + kNameBytes, "step-2");
    return *this;
  }

  /// Makes the table of rank 0 of two, with a commit record.
  JobTable& AsOfTwoRanks() {
    WithCommitRecord();
    job_->world_size = 2;
    std::strcpy(job_->manifest, "rank-00000-of-00002.manifest.json");
    std::strcpy(job_->manifest_suffix, "-of-00002.manifest.json");
    return *this;
  }

  layout::Job& job() { return *job_; }
  uint64_t bytes() const { return bytes_; }
  std::string Verdict() const {
    const char* const wrong = layout::ValidateJob(job_, bytes_);
    return wrong == nullptr ? "sound" : wrong;
  }

 private:
  struct Free {
    void operator()(char* memory) const { ::operator delete[](memory, std::align_val_t{64}); }
  };
  std::unique_ptr<char[], Free> memory_;
  uint64_t bytes_ = 0;
  layout::Job* job_ = nullptr;
  layout::Range commit_;
};

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_TESTING_JOB_TABLE_H_
