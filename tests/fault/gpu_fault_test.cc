// Saves and loads of GPU memory while the driver fails: every call once with every error that
// CUDA's reference documents for it, and the end of a context amid copies. On the fake driver.
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "holdfast/load.h"
#include "runtime/device/gpu_device.h"
#include "tests/testing/child_process.h"
#include "tests/testing/fake_gpu.h"
#include "tests/testing/save_test.h"
#include "tests/testing/training_state.h"

namespace holdfast::testing {
namespace {

using device::GpuApi;
using device::GpuCode;
using device::GpuDevices;
using device::GpuStream;
using ::testing::AnyOf;
using ::testing::HasSubstr;

// Kept, because a device lives as long as the process.
Device* NewDevice(GpuDevices* devices, int ordinal) {
  const absl::StatusOr<Device*> device = devices->Find(ordinal);
  EXPECT_TRUE(device.ok()) << device.status();
  return device.value_or(nullptr);
}
GpuDevices* NewDevices(GpuApi api) {
  static std::vector<GpuDevices*>* const all = new std::vector<GpuDevices*>;
  return all->emplace_back(new GpuDevices(api, FakeGpu::Path()));
}

class GpuFault : public ::testing::Test {
 protected:
  void SetUp() override { Restart(GpuApi::kCuda); }
  void TearDown() override {
    checkpointer_.reset();
    Fake().Reset();
  }

  static FakeGpu& Fake() { return FakeGpu::Get(); }

  /// A new process, as it were: new driver, devices, Checkpointer.
  void Restart(GpuApi api) {
    checkpointer_.reset();
    Fake().Reset();
    devices_ = NewDevices(api);
    for (int i = 0; i < 2; ++i) gpus_[i] = NewDevice(devices_, i);
    stream_ = Fake().MakeStream();
    tensors_.clear();
    for (const TrainingState::Tensor& tensor : state_.tensors()) {
      const int gpu = static_cast<int>(tensors_.size()) % 2;
      tensors_.push_back(Fake().Allocate(tensor.bytes.size(), two_devices_ ? gpu : 0));
    }
    CheckpointerOptions options = SmallOptions(scratch_.path());
    options.launcher = Launcher::kThread;
    options.staging.arena_bytes = 16u << 20;
    options.staging.pages = PageRung::kSmall;
    options.time_stalled_max = stalled_max_;
    auto checkpointer = Checkpointer::Create(options);
    ASSERT_TRUE(checkpointer.ok()) << checkpointer.status();
    checkpointer_ = *std::move(checkpointer);
  }
  Device* DeviceOf(size_t tensor) const { return gpus_[two_devices_ ? tensor % 2 : 0]; }

  std::vector<TensorSource> Sources() {
    std::vector<TensorSource> sources = state_.Sources();
    for (size_t i = 0; i < sources.size(); ++i) {
      std::memcpy(tensors_[i], state_.tensors()[i].bytes.data(), sources[i].bytes);
      sources[i].data = tensors_[i];
      sources[i].device = DeviceOf(i);
      sources[i].stream = DeviceOf(i) == gpus_[0] ? stream_ : nullptr;
    }
    return sources;
  }
  absl::StatusOr<SaveHandle> Begin() {
    const std::vector<TensorSource> sources = Sources();
    return checkpointer_->SaveAsync(
        {.name = absl::StrCat("step-", ++step_), .step = step_, .tensors = sources});
  }
  /// A training step's save, and the load of the checkpoint back into the GPU's memory. `said`
  /// collects what went wrong without failing either.
  absl::Status SaveAndLoad(std::string* said) {
    state_.Step(step_ + 1);
    const absl::StatusOr<SaveHandle> handle = Begin();
    if (!handle.ok()) return handle.status();
    const absl::Status waits = handle->WaitStagedOn(gpus_[0], stream_);
    if (!waits.ok()) absl::StrAppend(said, waits.message(), "; ");
    const absl::StatusOr<SaveReport> report = handle->WaitDurable(kLong);
    if (!report.ok()) return report.status();
    absl::StrAppend(said, report->unregistered, "; ");
    EXPECT_TRUE(state_.CompareWith(report->path).ok()) << "a reported checkpoint is wrong";
    std::vector<TensorTarget> targets;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const TrainingState::Tensor& tensor = state_.tensors()[i];
      std::memset(tensors_[i], 0, tensor.bytes.size());
      targets.push_back({.name = tensor.name,
                         .data = tensors_[i],
                         .bytes = tensor.bytes.size(),
                         .device = DeviceOf(i)});
    }
    const auto reader = CheckpointReader::Open(report->path);
    if (!reader.ok()) return reader.status();
    const auto loaded = (*reader)->Load(targets, LoadOptions());
    if (!loaded.ok()) return loaded.status();
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const std::vector<char>& bytes = state_.tensors()[i].bytes;
      EXPECT_EQ(std::memcmp(tensors_[i], bytes.data(), bytes.size()), 0) << "a load is wrong";
    }
    const absl::Status trimmed = checkpointer_->Trim();
    if (!trimmed.ok()) absl::StrAppend(said, trimmed.message(), "; ");
    return absl::OkStatus();
  }
  absl::Status SaveHostMemory() {
    const std::vector<TensorSource> sources = state_.Sources();
    const auto handle = checkpointer_->SaveAsync(
        {.name = absl::StrCat("host-", ++step_), .step = step_, .tensors = sources});
    if (!handle.ok()) return handle.status();
    return handle->WaitDurable(kLong).status();
  }
  void ExpectMemoryBack() {
    EXPECT_TRUE(WaitFor([&] { return checkpointer_->staging().bytes_held == 0; }));
  }

  bool two_devices_ = false;
  absl::Duration stalled_max_ = absl::Seconds(60);
  ScratchDirectory scratch_;
  TrainingState state_ = TrainingState::Uniform(3, 200 << 10, 1);
  GpuDevices* devices_ = nullptr;
  Device* gpus_[2] = {};
  GpuStream stream_ = nullptr;
  std::vector<char*> tensors_;
  std::unique_ptr<Checkpointer> checkpointer_;
  uint64_t step_ = 0;
};

// ---- Every call, every error.

// From the CUDA Driver API Reference. A fault of earlier work may come with any call in a context.
struct Documented {
  const char* call;
  std::vector<GpuCode> errors;
  /// False where nothing is lost: on the way out of a context; a buffer that stays registered.
  bool reported = true;
  /// True where the memory may keep a failed registration.
  bool is_for_good = false;
};
const std::vector<Documented>& AllErrors() {
  constexpr GpuCode kDead = GpuCode::kDeinitialized;
  constexpr GpuCode kNot = GpuCode::kNotInitialized;
  constexpr GpuCode kContext = GpuCode::kInvalidContext;
  constexpr GpuCode kValue = GpuCode::kInvalidValue;
  constexpr GpuCode kHandle = GpuCode::kInvalidHandle;
  constexpr GpuCode kMemory = GpuCode::kOutOfMemory;
  constexpr GpuCode kFault = GpuCode::kIllegalAddress;
  static const auto* const all = new std::vector<Documented>{
      {"context_push", {kDead, kNot, kContext, kValue}},
      {"context_pop", {kDead, kNot, kContext}, false},
      {"exchange_capture_mode", {kDead, kNot, kValue}},
      {"stream_is_capturing", {kDead, kNot, kValue, GpuCode::kStreamCaptureImplicit, kFault}},
      {"stream_wait_event", {kDead, kNot, kContext, kHandle, kFault}},
      {"event_record", {kDead, kNot, kContext, kHandle, kValue, kFault}},
      {"event_query", {kDead, kNot, kHandle, kValue, GpuCode::kNotReady, kFault}},
      {"copy_to_host", {kDead, kNot, kContext, kValue, kHandle, kFault}},
      {"copy_from_host", {kDead, kNot, kContext, kValue, kHandle, kFault}},
      {"pointer_attributes", {kDead, kContext, kValue, GpuCode::kInvalidDevice}},
      {"host_register",
       {kDead, kNot, kContext, kValue, kMemory, GpuCode::kHostMemoryAlreadyRegistered,
        GpuCode::kNotPermitted, GpuCode::kNotSupported, kFault},
       true,
       true},
      {"host_unregister",
       {kDead, kNot, kContext, kValue, kMemory, GpuCode::kHostMemoryNotRegistered, kFault},
       false,
       true},
      {"set_device", {kDead, kNot, GpuCode::kInvalidDevice}},  // HIP's
      {"current_device", {GpuCode::kInvalidValue}},
  };
  return *all;
}

class GpuCallFault : public GpuFault, public ::testing::WithParamInterface<size_t> {
 protected:
  static const Documented& Fault() { return AllErrors()[GetParam()]; }
};
INSTANTIATE_TEST_SUITE_P(All, GpuCallFault, ::testing::Range(size_t{0}, AllErrors().size()),
                         [](const ::testing::TestParamInfo<size_t>& fault) -> std::string {
                           std::string name = AllErrors()[fault.param].call;
                           std::erase(name, '_');
                           return name;
                         });

TEST_P(GpuCallFault, IsReportedAndTheNextSaveWorks) {
  const bool is_cuda = FakeGpu::Symbols(GpuApi::kCuda).count(Fault().call) != 0;
  const GpuApi api = is_cuda ? GpuApi::kCuda : GpuApi::kHip;
  // A later use fails with the first errors alone: a fault, and others.
  std::vector<std::pair<GpuCode, int>> cases;
  for (const GpuCode code : Fault().errors) cases.emplace_back(code, 0);
  for (size_t i = 0; i < 2 && i < Fault().errors.size(); ++i)
    cases.emplace_back(Fault().errors[i], 3);
  bool is_fresh = false;
  for (const auto& [code, skip] : cases) {
    SCOPED_TRACE(absl::StrCat(Fault().call, " fails with ", static_cast<int>(code), " after ", skip,
                              " calls"));
    if (!is_fresh) Restart(api);
    is_fresh = !device::IsFatal(code) && !Fault().is_for_good;
    Fake().Fail(Fault().call, code, skip);
    std::string said;
    const absl::Status status = SaveAndLoad(&said);
    absl::StrAppend(&said, status.message());
    const bool fired = !Fake().IsPlanned(Fault().call);
    EXPECT_TRUE(fired || skip > 0);
    // Not ready is a result, and memory that the caller has registered is used.
    const bool is_error =
        code != GpuCode::kNotReady && code != GpuCode::kHostMemoryAlreadyRegistered;
    if (is_error && (skip == 0 ? Fault().reported : !status.ok())) {
      EXPECT_THAT(said, HasSubstr(gpus_[0]->name()));
      EXPECT_THAT(said, AnyOf(HasSubstr(absl::StrCat(", ", static_cast<int>(code), ")")),
                              HasSubstr("capturing a graph")));
    }
    Fake().FailNothing();
    ExpectMemoryBack();
    EXPECT_TRUE(SaveHostMemory().ok());
    const absl::Status next = SaveAndLoad(&said);
    if (device::IsFatal(code) && fired && !next.ok()) {
      EXPECT_THAT(Text(next), HasSubstr("earlier fault"));
    } else {
      EXPECT_TRUE(next.ok()) << next << "; before: " << said;
    }
  }
}

// A call that is added to the table fails here, or is added to `AllErrors`.
TEST_F(GpuFault, EveryCallFailsInTheSetUpOrIsAmongAllErrors) {
  // They tell of the errors of others.
  std::set<std::string> of_saves = {"error_name", "error_text", "last_error"};
  for (const Documented& fault : AllErrors()) of_saves.insert(fault.call);
  for (const GpuApi api : {GpuApi::kCuda, GpuApi::kHip}) {
    for (const auto& [call, symbol] : FakeGpu::Symbols(api)) {
      if (of_saves.count(call) != 0) continue;
      SCOPED_TRACE(symbol);
      Fake().Reset();
      GpuDevices* const devices = NewDevices(api);
      Fake().Fail(call, GpuCode::kUnknown);
      const absl::Status status = devices->Find(0).status();
      EXPECT_FALSE(Fake().IsPlanned(call)) << "the set-up makes no such call";
      EXPECT_THAT(Text(status), HasSubstr(", 999)"));
      Fake().FailNothing();
      EXPECT_TRUE(devices->Find(0).ok());
    }
  }
}

// ---- The end of a context.

TEST_F(GpuFault, AContextLostAmidCopiesFailsTheSaveAndLosesNoMemory) {
  Fake().Hold();
  const absl::StatusOr<SaveHandle> handle = Begin();
  ASSERT_TRUE(handle.ok()) << handle.status();
  ASSERT_TRUE(WaitFor([&] { return Fake().count("copy_to_host") == tensors_.size(); }));
  Fake().LoseContext(0, GpuCode::kIllegalAddress, /*copies=*/2);
  Fake().LetRun();
  const absl::Status lost = handle->WaitDurable(kLong).status();
  EXPECT_THAT(Text(lost), HasSubstr("cuda:0"));
  EXPECT_THAT(Text(lost), HasSubstr(", 700)"));
  ExpectMemoryBack();
  EXPECT_TRUE(scratch_.Names().empty()) << "a lost save was committed";

  std::string said;
  const uint64_t calls = Fake().count("copy_to_host");
  EXPECT_THAT(Text(SaveAndLoad(&said)), HasSubstr("earlier fault"));
  EXPECT_EQ(Fake().count("copy_to_host"), calls) << "the lost context was called again";
  EXPECT_TRUE(SaveHostMemory().ok());
  // The other device is as good as before.
  tensors_.clear();
  for (const auto& tensor : state_.tensors())
    tensors_.push_back(Fake().Allocate(tensor.bytes.size(), 1));
  gpus_[0] = gpus_[1];
  stream_ = Fake().MakeStream(1);
  const absl::Status other = SaveAndLoad(&said);
  EXPECT_TRUE(other.ok()) << other;
}

TEST_F(GpuFault, AContextLostInALoadIsReported) {
  std::string said;
  ASSERT_TRUE(SaveAndLoad(&said).ok());
  Fake().LoseContext(0, GpuCode::kEccUncorrectable,
                     /*copies=*/static_cast<int>(tensors_.size()) + 1);
  const absl::Status status = SaveAndLoad(&said);
  EXPECT_THAT(Text(status), AnyOf(HasSubstr(", 214)"), HasSubstr("earlier fault")));
  EXPECT_TRUE(SaveHostMemory().ok());
  ExpectMemoryBack();
}

TEST_F(GpuFault, MemoryOfCopiesThatHangIsQuarantinedUntilTheyEnd) {
  stalled_max_ = absl::Seconds(2);
  Restart(GpuApi::kCuda);
  Fake().Hold();
  const absl::StatusOr<SaveHandle> handle = Begin();
  ASSERT_TRUE(handle.ok()) << handle.status();
  EXPECT_FALSE(handle->WaitDurable(kLong).ok());
  ASSERT_TRUE(WaitFor([&] { return checkpointer_->staging().bytes_quarantined > 0; }));
  EXPECT_FALSE(checkpointer_->Trim().ok());
  EXPECT_EQ(Fake().registered(), 1u);
  EXPECT_TRUE(SaveHostMemory().ok());
  Fake().LetRun();
  ExpectMemoryBack();
  std::string said;
  const absl::Status next = SaveAndLoad(&said);
  EXPECT_TRUE(next.ok()) << next;
}

TEST_F(GpuFault, AStateOnTwoDevicesIsOneCheckpoint) {
  for (const GpuApi api : {GpuApi::kCuda, GpuApi::kHip}) {
    two_devices_ = true;
    Restart(api);
    for (int step = 0; step < 3; ++step) {
      std::string said;
      const absl::Status status = SaveAndLoad(&said);
      EXPECT_TRUE(status.ok()) << status;
      EXPECT_EQ(said, "; ");
    }
    checkpointer_.reset();
    EXPECT_EQ(Fake().registered(), 0u);
  }
}

}  // namespace
}  // namespace holdfast::testing
