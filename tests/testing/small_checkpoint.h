// Small checkpoints with correct manifests, written directly, for tests of readers.
#ifndef HOLDFAST_TESTS_TESTING_SMALL_CHECKPOINT_H_
#define HOLDFAST_TESTS_TESTING_SMALL_CHECKPOINT_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "holdfast/pod.h"
#include "runtime/digest/digest.h"
#include "runtime/format/commit_record.h"
#include "runtime/format/manifest.h"
#include "runtime/layout/job.h"
#include "runtime/layout/manifest_slots.h"
#include "tests/testing/checkpoint_files.h"
#include "tests/testing/random_bytes.h"

namespace holdfast::testing {

/// A directory that is removed with its contents.
class TemporaryDirectory {
 public:
  explicit TemporaryDirectory(const std::string& below = "/tmp") {
    path_ = absl::StrCat(below, "/holdfast-test-XXXXXX");
    if (mkdtemp(path_.data()) == nullptr) abort();
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return absl::StrCat(path_, "/", name); }

 private:
  std::string path_;
};

/// One rank of a checkpoint with a single file.
struct SmallRank {
  std::string checkpoint;
  AttemptId attempt;
  uint32_t rank = 0;
  uint32_t world_size = 1;
  uint64_t step = 0;
  uint64_t saved_at_ns = 0;
  uint64_t bytes = 5000;
  /// As PyTorch's distributed checkpoints are: the number in its files' names. None: Holdfast's
  /// own.
  std::optional<uint32_t> dcp_generation = std::nullopt;
  std::vector<AttemptId> replaces = {};
  /// False: as an earlier version, whose manifests say nothing of a commit record.
  bool recorded = false;
  AttemptId parent = {};

  std::string file_name() const {
    return dcp_generation.has_value() ? absl::StrCat("__", rank, "_", *dcp_generation, ".distcp")
                                      : format::ModelFileName(rank, world_size);
  }
  std::string manifest_name() const {
    return dcp_generation.has_value() ? format::ManifestName(rank, world_size, attempt)
                                      : format::ManifestName(rank, world_size);
  }

  /// Different for every attempt and rank.
  std::string file_bytes() const { return RandomBytes(bytes, attempt.low * 31 + rank + 1); }

  std::string manifest_text() const {
    SavePlan plan;
    PlannedFile file;
    file.name = file_name();
    file.bytes = bytes;
    Segment segment;
    segment.bytes = bytes;
    segment.literal = file_bytes();
    if (bytes > 0) file.segments.push_back(segment);
    plan.files.push_back(file);
    format::ManifestTemplate made =
        format::BuildManifest({.checkpoint = checkpoint,
                               .attempt = attempt,
                               .rank = rank,
                               .world_size = world_size,
                               .step = step,
                               .saved_at_ns = saved_at_ns,
                               .replaces = replaces,
                               .recorded = recorded,
                               .parent = rank == 0 ? parent : AttemptId{}},
                              plan);
    char* text = made.text.data();
    digest::RootStream root({.attempt = attempt,
                             .rank = rank,
                             .world_size = world_size,
                             .file = 0,
                             .file_bytes = bytes});
    for (size_t i = 0; i < made.chunk_digests[0].size(); ++i) {
      const uint64_t begin = i * kChunkBytes;
      const Digest chunk = digest::Of(segment.literal.data() + begin,
                                      std::min<uint64_t>(kChunkBytes, bytes - begin));
      root.Add(chunk);
      digest::ToHex(chunk, text + made.chunk_digests[0][i]);
    }
    digest::ToHex(root.Finish(), text + made.file_roots[0]);
    layout::FillText(text, made.slots.engine, layout::ManifestWord(EngineRung::kPwrite));
    layout::FillText(text, made.slots.engine_reason, "test");
    layout::FillText(text, made.slots.direct_io, layout::ManifestWord(DirectIo::kNo));
    layout::FillBool(text, made.slots.streamed, false);
    layout::FillNumber(text, made.slots.bytes_written, bytes);
    layout::FillNumber(text, made.slots.time_writing_ns, 1);
    layout::FillNumber(text, made.slots.time_syncing_ns, 1);
    layout::FillNumber(text, made.slots.time_total_ns, 2);
    digest::ToHex(digest::Of(text, made.slots.self_digest.offset),
                  text + made.slots.self_digest.offset);
    return made.text;
  }

  /// Writes rank 0's record after all ranks' manifests.
  std::string record_text() const {
    std::vector<format::CommitRecord::RankManifest> manifests;
    SmallRank each = *this;
    for (each.rank = 0; each.rank < world_size; ++each.rank) {
      const std::string manifest = each.manifest_text();
      manifests.push_back({manifest.size(), digest::Of(manifest.data(), manifest.size())});
    }
    return format::CompleteCommitRecord({.checkpoint = checkpoint,
                                         .attempt = attempt,
                                         .parent = parent,
                                         .world_size = world_size,
                                         .step = step,
                                         .saved_at_ns = saved_at_ns},
                                        saved_at_ns, world_size * bytes, manifests);
  }

  /// Writes file and manifest into an existing or new directory.
  void Write(const std::string& directory) const {
    std::filesystem::create_directories(directory);
    std::ofstream(absl::StrCat(directory, "/", file_name())) << file_bytes();
    std::ofstream(absl::StrCat(directory, "/", manifest_name())) << manifest_text();
  }
};

/// Writes the complete checkpoint of all ranks into `directory`; with `record` also the commit
/// record, where the manifests say that there is one.
inline void WriteSmallCheckpoint(const std::string& directory, SmallRank like, bool record = true) {
  for (uint32_t rank = 0; rank < like.world_size; ++rank) {
    like.rank = rank;
    like.Write(directory);
  }
  if (!record || !like.recorded || like.dcp_generation.has_value()) return;
  std::ofstream(absl::StrCat(directory, "/", layout::kCommitRecordName)) << like.record_text();
}

/// Returns true if every file of the checkpoint in `directory` has the sealed bytes of `like`.
inline bool HasBytesOf(const std::string& directory, SmallRank like) {
  for (uint32_t rank = 0; rank < like.world_size; ++rank) {
    like.rank = rank;
    if (ReadFileBytes(absl::StrCat(directory, "/", like.file_name())) != like.file_bytes())
      return false;
  }
  return true;
}

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_TESTING_SMALL_CHECKPOINT_H_
