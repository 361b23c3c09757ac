// Whole checkpoints of GPU memory: saved by every launcher from an arena of every kind of page,
// through a trim, and loaded back into GPU memory. On a real GPU, or skipped; and on the fake one.
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "holdfast/device.h"
#include "holdfast/load.h"
#include "runtime/device/gpu_device.h"
#include "tests/testing/gpu_driver.h"
#include "tests/testing/save_test.h"
#include "tests/testing/training_state.h"

namespace holdfast::testing {
namespace {

/// The tensors of a state on the GPU, written by work that is queued on a stream.
class GpuState {
 public:
  GpuState(GpuDriver* gpu, Device* device)
      : gpu_(gpu), device_(device), stream_(gpu->MakeStream()) {}
  ~GpuState() {
    gpu_->Synchronize(stream_);
    for (char* tensor : tensors_) gpu_->Free(tensor);
    gpu_->EndStream(stream_);
  }
  GpuState(const GpuState&) = delete;
  GpuState& operator=(const GpuState&) = delete;

  /// A training step: `state` outlives the work.
  void Write(const TrainingState& state) {
    for (size_t i = 0; i < state.tensors().size(); ++i) {
      const std::vector<char>& bytes = state.tensors()[i].bytes;
      if (i == tensors_.size()) {
        tensors_.push_back(gpu_->Allocate(bytes.size()));
      }
      gpu_->CopyIn(tensors_[i], bytes.data(), bytes.size(), stream_);
    }
  }
  void Erase(const TrainingState& shapes) {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      gpu_->Fill(tensors_[i], '\xee', shapes.tensors()[i].bytes.size(), stream_);
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
      gpu_->CopyOut(bytes.data(), tensors_[i], bytes.size());
      EXPECT_TRUE(bytes == state.tensors()[i].bytes) << state.tensors()[i].name;
    }
  }
  device::GpuStream stream() const { return stream_; }

 private:
  GpuDriver* gpu_;
  Device* device_;
  device::GpuStream stream_ = nullptr;
  std::vector<char*> tensors_;
};

using SaveSetting = std::tuple<Launcher, PageRung, GpuKind>;

class CudaSave : public ::testing::TestWithParam<SaveSetting> {
 protected:
  void SetUp() override {
    const GpuKind kind = std::get<2>(GetParam());
    auto gpu = GpuDriver::Open(kind);
    if (!gpu.ok()) GTEST_SKIP() << "no GPU: " << gpu.status();
    gpu_ = *std::move(gpu);
    // Kept: a device lives as long as the process.
    static auto* const all = new std::map<std::string, device::GpuDevices*>;
    device::GpuDevices*& devices = (*all)[kind.name];
    if (devices == nullptr) devices = new device::GpuDevices(kind.api, kind.library());
    const absl::StatusOr<Device*> device = devices->Find(0);
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *device;
  }

  ScratchDirectory scratch_;
  std::unique_ptr<GpuDriver> gpu_;
  Device* device_ = nullptr;
};
std::string CaseName(const ::testing::TestParamInfo<SaveSetting>& setting) {
  static const char* const kPages[] = {"Auto", "Hugetlb", "TmpfsHuge", "MadviseHuge", "Small"};
  return absl::StrCat(NameOf(std::get<0>(setting.param)),
                      kPages[static_cast<int>(std::get<1>(setting.param))],
                      std::get<2>(setting.param).name);
}
INSTANTIATE_TEST_SUITE_P(
    All, CudaSave,
    ::testing::Combine(kEveryLauncher,
                       ::testing::Values(PageRung::kHugetlb, PageRung::kTmpfsHuge,
                                         PageRung::kMadviseHuge, PageRung::kSmall),
                       ::testing::Values(kEveryGpu[0], kEveryGpu[1])),
    CaseName);
// A single kind of page: what the driver changes does not depend on the kind.
INSTANTIATE_TEST_SUITE_P(Fake, CudaSave,
                         ::testing::Combine(kEveryLauncher, ::testing::Values(PageRung::kSmall),
                                            ::testing::Values(kEveryGpu[2], kEveryGpu[3])),
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
  TrainingState state =
      TrainingState::Uniform(5, std::get<2>(GetParam()).fake ? 1u << 20 : 7u << 20, 1);
  GpuState gpu(gpu_.get(), device_);
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
    gpu_->Synchronize(gpu.stream());
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
