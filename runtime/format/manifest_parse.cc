// Parses a rank manifest: self-digest, then syntax, then meaning.
#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "runtime/base/status.h"
#include "runtime/digest/digest.h"
#include "runtime/format/file_names.h"
#include "runtime/format/json_reader.h"
#include "runtime/format/manifest.h"
#include "runtime/format/self_digest.h"
#include "runtime/format/tensor_parts.h"
#include "runtime/format/text.h"

namespace holdfast::format {
namespace {

absl::Status WrongManifest(absl::string_view where, absl::string_view what) {
  return absl::DataLossError(absl::StrCat("manifest: ", where, ": ", what));
}

class ManifestReader {
 public:
  explicit ManifestReader(absl::string_view text) : json_(text) {}

  absl::StatusOr<Manifest> Read() {
    ReadTop();
    json_.AtEnd();
    if (!json_.status().ok()) {
      return base::Annotate(json_.status(), "manifest");
    }
    return std::move(out_);
  }

 private:
  enum Top {
    kFormat,
    kVersion,
    kCheckpoint,
    kAttempt,
    kRank,
    kWorldSize,
    kStep,
    kSavedAt,
    kFilesBytes,
    kReplaces,
    kLauncher,
    kPages,
    kStreamed,
    kReadBack,
    kAdopted,
    kEngine,
    kDirectIo,
    kEngineReason,
    kBytesWritten,
    kTimeWriting,
    kTimeSyncing,
    kTimeTotal,
    kFiles,
    kTensors,
    kSelfDigest,
    kReplicas,
    kParent,
    kWriter,
  };
  static constexpr absl::string_view kTopNames[] = {
      "format",          "version",       "checkpoint",    "attempt",       "rank",
      "world_size",      "step",          "saved_at_ns",   "files_bytes",   "replaces",
      "launcher",        "pages",         "streamed",      "read_back",     "adopted",
      "engine",          "direct_io",     "engine_reason", "bytes_written", "time_writing_ns",
      "time_syncing_ns", "time_total_ns", "files",         "tensors",       "self_digest",
      "replicas",        "parent",        "writer"};

  void ReadTop() {
    uint64_t seen = 0;
    if (!json_.EnterObject()) return;
    constexpr uint64_t kOptional = uint64_t{1} << kSavedAt | uint64_t{1} << kFilesBytes |
                                   uint64_t{1} << kReplaces | uint64_t{1} << kReplicas |
                                   uint64_t{1} << kParent | uint64_t{1} << kWriter;
    for (int field; (field = json_.NextField(kTopNames, kOptional, &seen)) >= 0;) {
      ReadTopField(field);
    }
  }

  void ReadTopField(int field) {
    std::string text;
    Digest ignored;  // Checked before over the raw bytes.
    switch (field) {
      case kFormat:
        if (json_.String(&text) && text != "holdfast.manifest") json_.Fail("unknown format");
        return;
      case kVersion:
        if (json_.Unsigned32(&out_.version) &&
            (out_.version == 0 || out_.version > kManifestVersion)) {
          json_.Fail(absl::StrCat("version ", out_.version, ", only 1 to ", kManifestVersion,
                                  " are known"));
        }
        return;
      case kCheckpoint:
        json_.String(&out_.checkpoint);
        return;
      case kAttempt:
        json_.Hex(&out_.attempt);
        return;
      case kRank:
        json_.Unsigned32(&out_.rank);
        return;
      case kWorldSize:
        json_.Unsigned32(&out_.world_size);
        return;
      case kStep:
        json_.Unsigned(&out_.step);
        return;
      case kSavedAt:
        json_.Unsigned(&out_.saved_at_ns.emplace());
        return;
      case kFilesBytes:
        json_.Unsigned(&out_.files_bytes.emplace());
        return;
      case kReplaces:
        if (!json_.EnterArray()) return;
        while (json_.NextElement()) json_.Hex(&out_.replaces.emplace_back());
        return;
      case kLauncher:
        json_.String(&out_.launcher);
        return;
      case kPages:
        json_.String(&out_.pages);
        return;
      case kStreamed:
        json_.Bool(&out_.streamed);
        return;
      case kReadBack:
        json_.Bool(&out_.read_back);
        return;
      case kAdopted:
        json_.Bool(&out_.adopted);
        return;
      case kEngine:
        json_.String(&out_.engine);
        return;
      case kDirectIo:
        json_.String(&out_.direct_io);
        return;
      case kEngineReason:
        json_.String(&out_.engine_reason);
        return;
      case kBytesWritten:
        json_.Unsigned(&out_.bytes_written);
        return;
      case kTimeWriting:
        json_.Unsigned(&out_.time_writing_ns);
        return;
      case kTimeSyncing:
        json_.Unsigned(&out_.time_syncing_ns);
        return;
      case kTimeTotal:
        json_.Unsigned(&out_.time_total_ns);
        return;
      case kFiles:
        if (!json_.EnterArray()) return;
        while (json_.NextElement()) ReadFile(&out_.files.emplace_back());
        return;
      case kTensors:
        if (!json_.EnterArray()) return;
        while (json_.NextElement()) ReadTensor(&out_.tensors.emplace_back());
        return;
      case kSelfDigest:
        json_.Hex(&ignored);
        return;
      case kReplicas:
        json_.Hex(&out_.replicas.emplace());
        return;
      case kParent:
        json_.Hex(&out_.parent);
        return;
      case kWriter:
        json_.String(&out_.writer);
        return;
      default:
        return;
    }
  }

  void ReadFile(Manifest::File* file) {
    static constexpr absl::string_view kNames[] = {"name", "bytes",   "chunk_bytes",
                                                   "root", "digests", "replicated"};
    constexpr uint64_t kOptional = 1u << 5;
    uint64_t seen = 0;
    if (!json_.EnterObject()) return;
    for (int field; (field = json_.NextField(kNames, kOptional, &seen)) >= 0;) {
      switch (field) {
        case 0:
          json_.String(&file->name);
          break;
        case 1:
          json_.Unsigned(&file->bytes);
          break;
        case 2:
          json_.Unsigned32(&file->chunk_bytes);
          break;
        case 3:
          json_.Hex(&file->root);
          break;
        case 5:
          json_.Bool(&file->replicated);
          break;
        default:
          if (!json_.EnterArray()) return;
          while (json_.NextElement()) {
            Digest chunk;
            if (!json_.Hex(&chunk)) return;
            file->chunks.push_back(chunk);
          }
      }
    }
  }

  void ReadTensor(Manifest::Tensor* tensor) {
    static constexpr absl::string_view kNames[] = {"name",  "dtype", "shape", "file",
                                                   "begin", "end",   "head",  "tail"};
    constexpr uint64_t kOptional = 1u << 6 | 1u << 7;
    uint64_t seen = 0;
    if (!json_.EnterObject()) return;
    for (int field; (field = json_.NextField(kNames, kOptional, &seen)) >= 0;) {
      switch (field) {
        case 0:
          json_.String(&tensor->name);
          break;
        case 1:
          json_.String(&tensor->dtype);
          break;
        case 2:
          json_.Shape(&tensor->shape);
          break;
        case 3:
          json_.Unsigned32(&tensor->file);
          break;
        case 4:
          json_.Unsigned(&tensor->begin);
          break;
        case 5:
          json_.Unsigned(&tensor->end);
          break;
        case 6:
          tensor->has_head = json_.Hex(&tensor->head);
          break;
        default:
          tensor->has_tail = json_.Hex(&tensor->tail);
      }
    }
  }

  JsonReader json_;
  Manifest out_;
};

std::string FileLabel(size_t index, const Manifest::File& file) {
  return absl::StrCat("files[", index, "] ", Quoted(file.name));
}

std::string TensorLabel(size_t index, const Manifest::Tensor& tensor) {
  return absl::StrCat("tensors[", index, "] ", Quoted(tensor.name));
}

absl::Status CheckHead(const Manifest& manifest) {
  if (manifest.rank >= manifest.world_size) {
    return WrongManifest("rank", absl::StrCat("rank ", manifest.rank, " of ", manifest.world_size));
  }
  if (manifest.attempt == AttemptId{}) return WrongManifest("attempt", "no attempt id");
  for (const auto& [key, value] : {std::pair("saved_at_ns", manifest.saved_at_ns),
                                   std::pair("files_bytes", manifest.files_bytes)}) {
    if (value.has_value() != (manifest.version >= 2)) {
      return WrongManifest(key, "version 2 has it, version 1 lacks it");
    }
  }
  if (!manifest.replaces.empty() && manifest.version < 2) {
    return WrongManifest("replaces", "version 1 lacks it");
  }
  if (manifest.parent != AttemptId{} && !manifest.Recorded()) {
    return WrongManifest("parent", "versions below 4 lack it");
  }
  const char* const wrong = WrongComponent(manifest.checkpoint);
  if (wrong != nullptr) return WrongManifest("checkpoint", wrong);
  return absl::OkStatus();
}

absl::Status CheckFiles(const Manifest& manifest) {
  absl::flat_hash_set<absl::string_view> names;
  digest::ReplicaStream replicas(manifest.attempt);
  bool has_replicas = false;
  uint64_t bytes = 0;
  for (size_t i = 0; i < manifest.files.size(); ++i) {
    const Manifest::File& file = manifest.files[i];
    const char* const wrong = WrongDataFileName(file.name);
    if (wrong != nullptr) return WrongManifest(FileLabel(i, file), wrong);
    if (!names.insert(file.name).second)
      return WrongManifest(FileLabel(i, file), "the name occurs twice");
    if (file.chunk_bytes != kChunkBytes) {
      return WrongManifest(FileLabel(i, file), absl::StrCat("chunk_bytes is ", file.chunk_bytes,
                                                            ", only ", kChunkBytes, " is known"));
    }
    if (file.chunks.size() != ChunkCount(file.bytes)) {
      return WrongManifest(FileLabel(i, file),
                           absl::StrCat(file.chunks.size(), " digests for ", file.bytes, " bytes"));
    }
    digest::RootStream root({.attempt = manifest.attempt,
                             .rank = manifest.rank,
                             .world_size = manifest.world_size,
                             .file = static_cast<uint32_t>(i),
                             .file_bytes = file.bytes});
    for (const Digest& chunk : file.chunks) root.Add(chunk);
    if (root.Finish() != file.root) {
      return WrongManifest(FileLabel(i, file), "the root is not that of its digests");
    }
    if (manifest.Wrote(file)) bytes += file.bytes;
    if (!file.replicated) continue;
    has_replicas = true;
    replicas.AddFile(file.name.data(), file.name.size(), file.bytes);
    for (const Digest& chunk : file.chunks) replicas.Add(chunk);
  }
  if (has_replicas != manifest.replicas.has_value() ||
      (has_replicas && *manifest.replicas != replicas.Finish())) {
    return WrongManifest("replicas", "not the digest of the replicated files");
  }
  if (has_replicas && manifest.version < 3) {
    return WrongManifest("replicas", "versions below 3 lack it");
  }
  if (manifest.files_bytes.value_or(bytes) != bytes) {
    return WrongManifest("files_bytes", absl::StrCat("not the ", bytes, " bytes of its files"));
  }
  return absl::OkStatus();
}

/// Returns the fault of one tensor; empty for a valid tensor.
std::string WrongTensor(const Manifest& manifest, const Manifest::Tensor& tensor) {
  if (tensor.name.empty()) return "the name is empty";
  if (tensor.file >= manifest.files.size()) {
    return absl::StrCat("file ", tensor.file, " of ", manifest.files.size());
  }
  const uint64_t file_bytes = manifest.files[tensor.file].bytes;
  if (tensor.begin > tensor.end || tensor.end > file_bytes) {
    return absl::StrCat("bytes ", tensor.begin, " to ", tensor.end, " of a file of ", file_bytes);
  }
  const TensorParts parts = PartsOf(tensor.begin, tensor.end, file_bytes);
  if (parts.has_head != tensor.has_head || parts.has_tail != tensor.has_tail) {
    return "head and tail do not fit its place";
  }
  return "";
}

absl::Status CheckTensors(const Manifest& manifest) {
  absl::flat_hash_set<absl::string_view> names;
  names.reserve(manifest.tensors.size());
  std::vector<uint32_t> order;
  order.reserve(manifest.tensors.size());
  for (size_t i = 0; i < manifest.tensors.size(); ++i) {
    const Manifest::Tensor& tensor = manifest.tensors[i];
    const std::string wrong = WrongTensor(manifest, tensor);
    if (!wrong.empty()) return WrongManifest(TensorLabel(i, tensor), wrong);
    if (!names.insert(tensor.name).second) {
      return WrongManifest(TensorLabel(i, tensor), "the name occurs twice");
    }
    if (tensor.begin != tensor.end) order.push_back(static_cast<uint32_t>(i));
  }
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    const Manifest::Tensor& left = manifest.tensors[a];
    const Manifest::Tensor& right = manifest.tensors[b];
    return left.file != right.file ? left.file < right.file : left.begin < right.begin;
  });
  for (size_t i = 1; i < order.size(); ++i) {
    const Manifest::Tensor& before = manifest.tensors[order[i - 1]];
    const Manifest::Tensor& tensor = manifest.tensors[order[i]];
    if (before.file == tensor.file && before.end > tensor.begin) {
      return WrongManifest(TensorLabel(order[i], tensor),
                           absl::StrCat("overlaps tensor ", Quoted(before.name)));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Manifest> ParseManifest(absl::string_view text) {
  HOLDFAST_RETURN_IF_ERROR(CheckSelfDigest("manifest", text, kManifestBytesMax));
  HOLDFAST_ASSIGN_OR_RETURN(Manifest manifest, ManifestReader(text).Read());
  HOLDFAST_RETURN_IF_ERROR(CheckHead(manifest));
  HOLDFAST_RETURN_IF_ERROR(CheckFiles(manifest));
  HOLDFAST_RETURN_IF_ERROR(CheckTensors(manifest));
  return manifest;
}

}  // namespace holdfast::format
