#include "tests/testing/training_state.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <memory>

#include "absl/strings/str_cat.h"
#include "holdfast/load.h"
#include "runtime/base/check.h"
#include "runtime/base/status.h"
#include "tests/testing/random_bytes.h"

namespace holdfast::testing {
namespace {

namespace fs = std::filesystem;

}  // namespace

ScratchDirectory::ScratchDirectory() {
  const char* base = std::getenv("TMPDIR");
  path_ = absl::StrCat(base != nullptr ? base : "/tmp", "/holdfast-test-XXXXXX");
  HOLDFAST_CHECK(mkdtemp(path_.data()) != nullptr, "tests need a directory to write to");
}

ScratchDirectory::~ScratchDirectory() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

std::vector<std::string> ScratchDirectory::Names() const {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(path_))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

TrainingState TrainingState::Uniform(uint32_t count, uint64_t tensor_bytes, uint64_t seed) {
  TrainingState state;
  for (uint32_t i = 0; i < count; ++i) {
    const int64_t elements = static_cast<int64_t>(tensor_bytes / 4 + i % 7);
    state.tensors_.push_back({.name = absl::StrCat("layer.", i, ".weight"),
                              .dtype = "F32",
                              .shape = {elements},
                              .bytes = std::vector<char>(static_cast<size_t>(elements) * 4)});
  }
  state.Step(seed);
  return state;
}

TrainingState TrainingState::Assorted(uint64_t seed) {
  TrainingState state;
  const auto add = [&state](const std::string& name, const std::string& dtype,
                            std::vector<int64_t> shape) {
    uint64_t bytes = std::max<uint32_t>(DtypeBytes(dtype), 1);
    for (const int64_t extent : shape) bytes *= static_cast<uint64_t>(extent);
    state.tensors_.push_back({.name = name,
                              .dtype = dtype,
                              .shape = std::move(shape),
                              .bytes = std::vector<char>(bytes)});
  };
  for (const char* dtype : {"BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "I16", "U16",
                            "F16", "BF16", "I32", "U32", "F32", "F64", "I64", "U64"}) {
    add(absl::StrCat("every.", dtype), dtype, {3, 5, 7});
  }
  add("scalar", "F32", {});
  add("step", "I64", {});
  add("empty", "F32", {0});
  add("empty.matrix", "BF16", {4, 0, 2});
  add("one.byte", "U8", {1});
  add("large", "F32", {3, 1024, 1031});
  add("larger", "BF16", {5000, 1013});
  add("重み.слой.βάρος.🜁", "F32", {17});
  add("quote\"back\\slash\ttab", "I8", {9});
  state.Step(seed);
  return state;
}

void TrainingState::Step(uint64_t seed) {
  for (size_t i = 0; i < tensors_.size(); ++i)
    FillRandom(tensors_[i].bytes.data(), tensors_[i].bytes.size(), Mix(seed) + i);
}

std::vector<TensorSource> TrainingState::Sources() const {
  std::vector<TensorSource> sources;
  for (const Tensor& tensor : tensors_) {
    sources.push_back({.name = tensor.name,
                       .dtype = tensor.dtype,
                       .shape = tensor.shape,
                       .data = tensor.bytes.data(),
                       .bytes = tensor.bytes.size()});
  }
  return sources;
}

uint64_t TrainingState::bytes() const {
  uint64_t bytes = 0;
  for (const Tensor& tensor : tensors_) bytes += tensor.bytes.size();
  return bytes;
}

absl::Status TrainingState::CompareWith(const std::string& path) const {
  HOLDFAST_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointReader> reader,
                            CheckpointReader::Open(path));
  if (reader->tensors().size() != tensors_.size()) {
    return absl::DataLossError(
        absl::StrCat(path, " has ", reader->tensors().size(), " tensors, not ", tensors_.size()));
  }
  std::vector<std::vector<char>> loaded;
  std::vector<TensorTarget> targets;
  for (const Tensor& tensor : tensors_) {
    loaded.emplace_back(tensor.bytes.size());
    targets.push_back(
        {.name = tensor.name, .data = loaded.back().data(), .bytes = loaded.back().size()});
  }
  HOLDFAST_ASSIGN_OR_RETURN(const LoadReport report, reader->Load(targets, LoadOptions()));
  if (!report.verified) return absl::InternalError("loaded without verification");
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (loaded[i] != tensors_[i].bytes) {
      return absl::DataLossError(
          absl::StrCat(path, ": ", tensors_[i].name, " is not what was saved"));
    }
  }
  return absl::OkStatus();
}

CheckpointerOptions SmallOptions(const std::string& directory) {
  CheckpointerOptions options;
  options.directory = directory;
  options.staging.arena_bytes = 64u << 20;
  options.staging.threads = 2;
  options.time_memory_max = absl::Seconds(60);
  options.time_stalled_max = absl::Seconds(60);
  options.time_ranks_max = absl::Seconds(60);
  return options;
}

}  // namespace holdfast::testing
