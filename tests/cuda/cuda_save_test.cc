// Whole checkpoints of GPU memory on a real GPU: saved by every launcher from an arena of every
// kind of page, through a trim, and loaded back into GPU memory. Skipped where there is no GPU.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "holdfast/cuda.h"
#include "holdfast/device.h"
#include "holdfast/load.h"
#include "tests/testing/save_test.h"
#include "tests/testing/training_state.h"

namespace holdfast::testing {
namespace {

/// The tensors of a state on the GPU, written by work that is queued on a stream.
class GpuState {
 public:
  explicit GpuState(Device* device) : device_(device) {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  ~GpuState() {
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    for (void* tensor : tensors_) EXPECT_EQ(cudaFree(tensor), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
  }
  GpuState(const GpuState&) = delete;
  GpuState& operator=(const GpuState&) = delete;

  /// A training step: `state` outlives the work.
  void Write(const TrainingState& state) {
    for (size_t i = 0; i < state.tensors().size(); ++i) {
      const std::vector<char>& bytes = state.tensors()[i].bytes;
      if (i == tensors_.size()) {
        tensors_.push_back(nullptr);
        ASSERT_EQ(cudaMalloc(&tensors_.back(), bytes.size()), cudaSuccess);
      }
      ASSERT_EQ(
          cudaMemcpyAsync(tensors_[i], bytes.data(), bytes.size(), cudaMemcpyHostToDevice, stream_),
          cudaSuccess);
    }
  }
  void Erase(const TrainingState& shapes) {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      ASSERT_EQ(cudaMemsetAsync(tensors_[i], 0xee, shapes.tensors()[i].bytes.size(), stream_),
                cudaSuccess);
    }
  }
  std::vector<TensorSource> Sources(const TrainingState& state) const {
    std::vector<TensorSource> sources = state.Sources();
    for (size_t i = 0; i < sources.size(); ++i) {
      sources[i].data = tensors_[i];
      sources[i].device = device_;
      sources[i].stream = stream_;
    }
    return sources;
  }
  std::vector<TensorTarget> Targets(const TrainingState& state) const {
    std::vector<TensorTarget> targets;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      targets.push_back({.name = state.tensors()[i].name,
                         .data = tensors_[i],
                         .bytes = state.tensors()[i].bytes.size(),
                         .device = device_});
    }
    return targets;
  }
  void Expect(const TrainingState& state) const {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      std::vector<char> bytes(state.tensors()[i].bytes.size());
      ASSERT_EQ(cudaMemcpy(bytes.data(), tensors_[i], bytes.size(), cudaMemcpyDeviceToHost),
                cudaSuccess);
      EXPECT_TRUE(bytes == state.tensors()[i].bytes) << state.tensors()[i].name;
    }
  }
  cudaStream_t stream() const { return stream_; }

 private:
  Device* device_;
  cudaStream_t stream_ = nullptr;
  std::vector<void*> tensors_;
};

class CudaSave : public ::testing::TestWithParam<std::tuple<Launcher, PageRung>> {
 protected:
  void SetUp() override {
    EnableCuda();
    const absl::StatusOr<Device*> device = CudaDevice(0);
    if (!device.ok()) GTEST_SKIP() << "no GPU: " << device.status();
    device_ = *device;
  }

  ScratchDirectory scratch_;
  Device* device_ = nullptr;
};
std::string CaseName(const ::testing::TestParamInfo<std::tuple<Launcher, PageRung>>& setting) {
  static const char* const kPages[] = {"Auto", "Hugetlb", "TmpfsHuge", "MadviseHuge", "Small"};
  return absl::StrCat(NameOf(std::get<0>(setting.param)),
                      kPages[static_cast<int>(std::get<1>(setting.param))]);
}
INSTANTIATE_TEST_SUITE_P(
    All, CudaSave,
    ::testing::Combine(kEveryLauncher, ::testing::Values(PageRung::kHugetlb, PageRung::kTmpfsHuge,
                                                         PageRung::kMadviseHuge, PageRung::kSmall)),
    CaseName);

TEST_P(CudaSave, WhatTheStreamWroteIsSavedAndComesBackToTheGpu) {
  CheckpointerOptions options = SmallOptions(scratch_.path());
  options.launcher = std::get<0>(GetParam());
  options.staging.pages = std::get<1>(GetParam());
  const auto checkpointer = Checkpointer::Create(options);
  if (!checkpointer.ok() && options.staging.pages != PageRung::kSmall) {
    GTEST_SKIP() << checkpointer.status();
  }
  ASSERT_TRUE(checkpointer.ok()) << checkpointer.status();
  TrainingState state = TrainingState::Uniform(5, 7u << 20, 1);
  GpuState gpu(device_);
  for (uint64_t step = 1; step <= 3; ++step) {
    SCOPED_TRACE(step);
    state.Step(step);
    gpu.Write(state);
    const std::vector<TensorSource> sources = gpu.Sources(state);
    const auto handle =
        (*checkpointer)
            ->SaveAsync({.name = absl::StrCat("step-", step), .step = step, .tensors = sources});
    ASSERT_TRUE(handle.ok()) << handle.status();
    // The next step is queued at once, behind the copies.
    ASSERT_TRUE(handle->WaitStagedOn(device_, gpu.stream()).ok());
    gpu.Erase(state);
    const auto report = handle->WaitDurable(kLong);
    ASSERT_TRUE(report.ok()) << report.status();
    ASSERT_EQ(cudaStreamSynchronize(gpu.stream()), cudaSuccess);
    EXPECT_TRUE(state.CompareWith(report->path).ok()) << state.CompareWith(report->path);

    const auto reader = CheckpointReader::Open(report->path);
    ASSERT_TRUE(reader.ok()) << reader.status();
    const auto loaded = (*reader)->Load(gpu.Targets(state), LoadOptions());
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_TRUE(loaded->verified);
    gpu.Expect(state);
    // The registration with the GPU goes before the pages do, and comes back with the next save.
    ASSERT_TRUE((*checkpointer)->Trim().ok());
    EXPECT_FALSE((*checkpointer)->staging().resident);
  }
  EXPECT_EQ((*checkpointer)->staging().pages, options.staging.pages);
  EXPECT_EQ((*checkpointer)->staging().trims, 3u);
  EXPECT_EQ((*checkpointer)->staging().bytes_held, 0u);
}

}  // namespace
}  // namespace holdfast::testing
