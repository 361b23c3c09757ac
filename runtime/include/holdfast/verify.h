// Verifies a checkpoint on disk.
#ifndef HOLDFAST_VERIFY_H_
#define HOLDFAST_VERIFY_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "holdfast/pod.h"

namespace holdfast {

/// Result of Verify. The values are verify-checkpoint's exit statuses.
enum class Verdict { kSound = 0, kCorrupt = 1, kIncomplete = 2, kUnreadable = 3 };

constexpr const char* WordOf(Verdict verdict) {
  return WordIn({"sound", "corrupt", "incomplete", "unreadable"}, verdict);
}

/// Returns the graver of two verdicts: corrupt, then unreadable, then incomplete, then sound.
/// Proven damage precedes files that could not be judged.
constexpr Verdict Worse(Verdict a, Verdict b) {
  constexpr int kGravity[] = {0, 3, 1, 2};
  return kGravity[static_cast<int>(a)] >= kGravity[static_cast<int>(b)] ? a : b;
}

/// One finding.
struct Fault {
  std::string file;
  std::string tensor;  ///< Empty where the fault concerns no tensor.
  uint64_t begin = 0;  ///< Byte range of the file.
  uint64_t end = 0;
  std::string reason;  ///< "digest", "size", "missing", "structure", "crc32", "read", ...
  std::string expected;
  std::string found;
};

struct VerifyOptions {
  uint32_t threads = 0;  ///< Digesting; 0 is one per CPU, at most 4.
  uint64_t buffer_bytes = uint64_t{64} << 20;
  EngineRung engine = EngineRung::kAuto;
  bool direct_io = true;
  uint64_t faults_max = 1000;  ///< Further faults are only counted.
  /// Called at intervals; may be empty.
  std::function<void(uint64_t bytes_done, uint64_t bytes_total)> progress;
};

struct VerifyReport {
  std::string path;
  Verdict verdict = Verdict::kUnreadable;
  /// Basis of the verdict: "XXH3-128 digests of the seal", "safetensors structure", ...
  std::string checked;
  std::vector<Fault> faults;
  uint64_t faults_total = 0;
  uint64_t bytes = 0;  ///< Read and compared.
  uint32_t files = 0;
  uint32_t tensors = 0;
  double seconds = 0;
  uint64_t step = 0;
  AttemptId attempt;
  EngineRung engine = EngineRung::kAuto;
  DirectIo direct_io = DirectIo::kNo;
  std::string note;  ///< Limits of the proof, and their reason, as text.
};

/// Verifies a checkpoint directory (all ranks), one file of it, or a foreign safetensors or torch
/// zip file. Never throws, executes or unpickles. Faults of the checkpoint are in the report; an
/// unreadable path is Verdict::kUnreadable.
/// \error kInvalidArgument for bad options only.
absl::StatusOr<VerifyReport> Verify(const std::string& path, const VerifyOptions& options);

/// The checkpoints below a directory.
struct FoundCheckpoints {
  std::vector<std::string> checkpoints;  ///< Paths for Verify; at least one.
  /// Directories of saves that were never committed, or of retired checkpoints.
  std::vector<std::string> uncommitted;
};

/// Finds the checkpoints at and below `path`, sorted by name. A directory is one if it holds a
/// manifest, a framework's checkpoint files, or foreign files of tensors. Symbolic links are not
/// followed below `path`. Without any checkpoint the result is `path` itself, as for a file.
FoundCheckpoints FindCheckpoints(const std::string& path);

/// Writes a manifest for foreign files without one, from their bytes on disk. `path` is a file or a
/// directory. Files with an attempt id are refused: a partial Holdfast checkpoint never becomes
/// complete.
/// \error kFailedPrecondition, kAlreadyExists.
absl::Status Adopt(const std::string& path);

}  // namespace holdfast

#endif  // HOLDFAST_VERIFY_H_
