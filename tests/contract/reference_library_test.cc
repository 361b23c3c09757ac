// Files made here load in the reference safetensors library with every byte, and its files load
// here.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "holdfast/load.h"
#include "holdfast/recovery.h"
#include "runtime/format/torch_zip.h"
#include "tests/testing/training_state.h"

namespace holdfast {
namespace {

using testing::ScratchDirectory;
using testing::SmallOptions;
using testing::TrainingState;

class ReferenceLibrary : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* python = std::getenv("HOLDFAST_REFERENCE_PYTHON");
    if (python == nullptr || !std::filesystem::exists(python)) {
      GTEST_SKIP()
          << "no Python with the safetensors library; tools/test.sh makes one in build/venv";
    }
    python_ = python;
  }

  /// Runs the script; its standard output, or a failure.
  std::string Run(const std::string& what, const std::string& file) {
    const std::string command =
        absl::StrCat("'", python_, "' '", HOLDFAST_REFERENCE_SCRIPT, "' ", what, " '", file, "'");
    FILE* pipe = popen(command.c_str(), "r");
    std::string out;
    char buffer[65536];
    for (size_t got = 0; (got = fread(buffer, 1, sizeof(buffer), pipe)) > 0;)
      out.append(buffer, got);
    EXPECT_EQ(pclose(pipe), 0) << command;
    return out;
  }

  /// What `read` is to print for a state.
  static std::string Expected(const TrainingState& state) {
    std::vector<const TrainingState::Tensor*> sorted;
    for (const auto& tensor : state.tensors()) sorted.push_back(&tensor);
    std::sort(sorted.begin(), sorted.end(),
              [](const auto* a, const auto* b) { return a->name < b->name; });
    std::string text;
    for (const auto* tensor : sorted) {
      absl::StrAppend(&text, absl::BytesToHexString(tensor->name), " ", tensor->dtype, " ",
                      tensor->shape.empty() ? "-" : absl::StrJoin(tensor->shape, "x"), " ",
                      tensor->bytes.size(), " ",
                      format::Crc32(0, tensor->bytes.data(), tensor->bytes.size()), "\n");
    }
    return text;
  }

  void ExpectReadBack(const TrainingState& state) { ExpectReadBack(state, state); }
  /// Saves one state, expects the library to read the other, and returns the checkpoint's path.
  std::string ExpectReadBack(const TrainingState& state, const TrainingState& read_as) {
    auto checkpointer = Checkpointer::Create(SmallOptions(scratch_.path()));
    EXPECT_TRUE(checkpointer.ok()) << checkpointer.status();
    if (!checkpointer.ok()) return "";
    const std::vector<TensorSource> sources = state.Sources();
    auto handle = (*checkpointer)->SaveAsync({.name = "saved", .step = 1, .tensors = sources});
    EXPECT_TRUE(handle.ok()) << handle.status();
    if (!handle.ok()) return "";
    const auto report = handle->WaitDurable(absl::Minutes(2));
    EXPECT_TRUE(report.ok()) << report.status();
    if (!report.ok()) return "";
    const std::string read =
        Run("read", absl::StrCat(report->path, "/model-00000-of-00001.safetensors"));
    EXPECT_TRUE(read == Expected(read_as)) << read.substr(0, 4000);
    return report->path;
  }

  std::string python_;
  ScratchDirectory scratch_;
};

TEST_F(ReferenceLibrary, ReadsEveryDtypeShapeAndName) {
  ExpectReadBack(TrainingState::Assorted(11));
}

TEST_F(ReferenceLibrary, ReadsTheBytesOfDtypesThatItMayNotKnow) {
  TrainingState state;
  const auto add = [&state](const std::string& dtype, std::vector<int64_t> shape, size_t bytes) {
    state.tensors().push_back({.name = absl::StrCat("rare.", dtype),
                               .dtype = dtype,
                               .shape = std::move(shape),
                               .bytes = std::vector<char>(bytes)});
  };
  add("C64", {3, 5}, 120);
  // Several elements share a byte.
  add("F4", {3, 6}, 9);
  add("F6_E2M3", {5, 4}, 15);
  add("F6_E3M2", {8}, 6);
  add("F8_E4M3FNUZ", {7}, 7);
  state.Step(13);
  TrainingState as_bytes = state;
  for (auto& tensor : as_bytes.tensors()) {
    tensor.dtype = "U8";
    tensor.shape = {static_cast<int64_t>(tensor.bytes.size())};
  }
  const std::string path = ExpectReadBack(state, as_bytes);
  // Here the bytes are unchanged.
  const auto reader = CheckpointReader::Open(path);
  ASSERT_TRUE(reader.ok()) << reader.status();
  for (const PlannedTensor& tensor : (*reader)->tensors()) {
    const auto saved = std::find_if(state.tensors().begin(), state.tensors().end(),
                                    [&](const auto& other) { return other.name == tensor.name; });
    ASSERT_NE(saved, state.tensors().end());
    EXPECT_EQ(tensor.dtype, saved->dtype);
    EXPECT_EQ(tensor.shape, saved->shape);
  }
  EXPECT_TRUE(state.CompareWith(path).ok()) << state.CompareWith(path);
}

TEST_F(ReferenceLibrary, ReadsFiftyThousandTensorsOfOneFile) {
  constexpr uint32_t kMany = 50'000;
  ExpectReadBack(TrainingState::Uniform(kMany, 40, 12));
}

TEST_F(ReferenceLibrary, WritesWhatIsLoadedHere) {
  const std::string path = absl::StrCat(scratch_.path(), "/theirs.safetensors");
  Run("write", path);
  auto reader = CheckpointReader::OpenFile(path);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ((*reader)->tensors().size(), 15u);
  TrainingState loaded;
  for (const PlannedTensor& tensor : (*reader)->tensors()) {
    loaded.tensors().push_back({.name = tensor.name,
                                .dtype = tensor.dtype,
                                .shape = tensor.shape,
                                .bytes = std::vector<char>(tensor.end - tensor.begin)});
  }
  std::vector<TensorTarget> targets;
  for (auto& tensor : loaded.tensors()) {
    targets.push_back(
        {.name = tensor.name, .data = tensor.bytes.data(), .bytes = tensor.bytes.size()});
  }
  const auto report = (*reader)->Load(targets, LoadOptions());
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_FALSE(report->verified) << "a foreign file has no digests";
  EXPECT_EQ(Run("read", path), Expected(loaded));
}

/// The lines of `read` without their last column, the bytes' checksum.
std::string NamesAndShapes(const std::string& read) {
  std::string text;
  for (const absl::string_view line : absl::StrSplit(read, '\n', absl::SkipEmpty()))
    absl::StrAppend(&text, line.substr(0, line.rfind(' ')), "\n");
  return text;
}

TEST_F(ReferenceLibrary, TheDemoTrainsOnAModelsStateWithItsOptimizer) {
  const std::string path = absl::StrCat(scratch_.path(), "/trained.safetensors");
  Run("train", path);
  const std::string directory = absl::StrCat(scratch_.path(), "/demo");
  const std::string command =
      absl::StrCat("'", HOLDFAST_DEMO_PROGRAM, "' '", path, "' --dir '", directory,
                   "' --saves 2 --steps-between 1 --json >/dev/null");
  // 0: both were saved and verified, and the newest is equal to the state at its call.
  ASSERT_EQ(std::system(command.c_str()), 0);
  const auto newest = FindNewest(directory);
  ASSERT_TRUE(newest.ok()) << newest.status();
  const std::string saved = absl::StrCat(newest->path, "/model-00000-of-00001.safetensors");
  const std::string trained = NamesAndShapes(Run("read", path));
  EXPECT_THAT(trained, ::testing::HasSubstr(absl::BytesToHexString("optimizer.0.exp_avg_sq")));
  EXPECT_EQ(NamesAndShapes(Run("read", saved)), trained);
}

}  // namespace
}  // namespace holdfast
