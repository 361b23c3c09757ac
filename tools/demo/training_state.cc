#include "tools/demo/training_state.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "holdfast/load.h"
#include "tools/demo/fingerprint.h"
#include "tools/demo/gpt2_shapes.h"

namespace holdfast::demo {
namespace {

constexpr uint32_t kThreadsMax = 8;
constexpr uint64_t kTensorAlignment = 64;
constexpr uint64_t kRunBytes = uint64_t{1} << 20;  // A multiple of every element size.
constexpr int kPoison = 0xA5;

uint64_t AlignUp(uint64_t bytes) {
  return (bytes + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
}

char* Bytes(const TensorSource& tensor) {
  // The state owns the memory that its tensors point into.
  return static_cast<char*>(const_cast<void*>(tensor.data));
}

}  // namespace

TrainingState::TrainingState(uint32_t threads, uint64_t seed)
    : threads_(threads != 0 ? threads
                            : std::clamp(std::thread::hardware_concurrency(), 1u, kThreadsMax)),
      noise_{.step = 0, .seed = seed} {}

TrainingState::~TrainingState() {
  if (memory_ != nullptr) munmap(memory_, memory_bytes_);
}

absl::Status TrainingState::Allocate() {
  bytes_ = 0;
  memory_bytes_ = kTensorAlignment;
  for (const TensorSource& tensor : tensors_) {
    bytes_ += tensor.bytes;
    memory_bytes_ += AlignUp(tensor.bytes);
  }
  void* const memory =
      mmap(nullptr, memory_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "allocate ", memory_bytes_, " bytes of training state: ", std::strerror(errno)));
  }
  memory_ = static_cast<char*>(memory);
  uint64_t offset = 0;
  for (TensorSource& tensor : tensors_) {
    tensor.data = memory_ + offset;
    offset += AlignUp(tensor.bytes);
  }
  return absl::OkStatus();
}

void TrainingState::CutWork() {
  // Adam's runs carry their moments with them.
  const size_t count = adam_ != 0 ? adam_ : tensors_.size();
  for (uint32_t i = 0; i < count; ++i) {
    for (uint64_t begin = 0; begin < tensors_[i].bytes; begin += kRunBytes) {
      work_.push_back({i, begin, std::min(kRunBytes, tensors_[i].bytes - begin)});
    }
  }
  for (uint32_t i = 3 * adam_; adam_ != 0 && i < tensors_.size(); ++i) {
    work_.push_back({i, 0, tensors_[i].bytes});
  }
}

absl::StatusOr<std::unique_ptr<TrainingState>> TrainingState::FromFile(const std::string& path,
                                                                       uint32_t threads,
                                                                       uint64_t seed) {
  absl::StatusOr<std::unique_ptr<CheckpointReader>> reader = CheckpointReader::OpenFile(path);
  if (!reader.ok()) return reader.status();
  auto state = std::unique_ptr<TrainingState>(new TrainingState(threads, seed));
  for (const PlannedTensor& planned : (*reader)->tensors()) {
    TensorSource tensor;
    tensor.name = planned.name;
    tensor.dtype = planned.dtype;
    tensor.shape = planned.shape;
    tensor.bytes = planned.end - planned.begin;
    state->tensors_.push_back(std::move(tensor));
  }
  if (const absl::Status status = state->Allocate(); !status.ok()) return status;
  std::vector<TensorTarget> targets;
  for (const TensorSource& tensor : state->tensors_) {
    targets.push_back({.name = tensor.name, .data = Bytes(tensor), .bytes = tensor.bytes});
  }
  LoadOptions options;
  options.verify = false;  // A foreign file has no digests to verify against.
  const absl::StatusOr<LoadReport> loaded = (*reader)->Load(targets, options);
  if (!loaded.ok()) return loaded.status();
  state->origin_ = path;
  state->CutWork();
  return state;
}

absl::StatusOr<std::unique_ptr<TrainingState>> TrainingState::Gpt2(uint32_t threads,
                                                                   uint64_t seed) {
  auto state = std::unique_ptr<TrainingState>(new TrainingState(threads, seed));
  const std::vector<Shape> shapes = Gpt2Parameters();
  state->adam_ = static_cast<uint32_t>(shapes.size());
  for (const char* prefix : {"", "optimizer.exp_avg.", "optimizer.exp_avg_sq."}) {
    for (const Shape& shape : shapes) {
      TensorSource tensor;
      tensor.name = absl::StrCat(prefix, shape.name);
      tensor.dtype = "F32";
      tensor.shape = shape.dimensions;
      tensor.bytes = sizeof(float);
      for (const int64_t dimension : shape.dimensions) tensor.bytes *= dimension;
      state->tensors_.push_back(std::move(tensor));
    }
  }
  TensorSource step;
  step.name = "optimizer.step";
  step.dtype = "I64";
  step.bytes = sizeof(int64_t);
  state->tensors_.push_back(std::move(step));
  if (const absl::Status status = state->Allocate(); !status.ok()) return status;
  state->origin_ = "GPT-2 small with Adam's moments";
  state->CutWork();
  state->Step();  // Touches the memory, and leaves the zeros that no training has.
  return state;
}

template <typename Body>
void TrainingState::InParallel(uint64_t count, const Body& body) const {
  std::atomic<uint64_t> next{0};
  const auto run = [&next, &body, count] {
    for (uint64_t i = next.fetch_add(1, std::memory_order_relaxed); i < count;
         i = next.fetch_add(1, std::memory_order_relaxed)) {
      body(i);
    }
  };
  std::vector<std::thread> others;
  for (uint32_t i = 1; i < threads_; ++i) others.emplace_back(run);
  run();
  for (std::thread& other : others) other.join();
}

void TrainingState::StepRun(const Work& work) {
  const TensorSource& tensor = tensors_[work.tensor];
  char* const begin = Bytes(tensor) + work.begin;
  if (work.tensor >= adam_) {
    const uint32_t element = std::max(1u, DtypeBytes(tensor.dtype));
    return PlainStep(tensor.dtype, begin, work.bytes, work.begin / element, noise_);
  }
  const auto moment = [this, &work](uint32_t which) {
    return reinterpret_cast<float*>(Bytes(tensors_[work.tensor + which * adam_]) + work.begin);
  };
  // Distinct noise per tensor: equal tensors would hide a mix-up.
  const uint64_t first = work.tensor * uint64_t{0x9E3779B1} + work.begin / sizeof(float);
  AdamStep(reinterpret_cast<float*>(begin), moment(1), moment(2), first, work.bytes / sizeof(float),
           noise_);
}

void TrainingState::Step() {
  ++noise_.step;
  InParallel(work_.size(), [this](uint64_t i) { StepRun(work_[i]); });
}

std::vector<uint64_t> TrainingState::Fingerprints() const {
  std::vector<uint64_t> prints(tensors_.size());
  InParallel(tensors_.size(), [this, &prints](uint64_t i) {
    prints[i] = Fingerprint(tensors_[i].data, tensors_[i].bytes);
  });
  return prints;
}

void TrainingState::Poison() {
  for (const TensorSource& tensor : tensors_) {
    if (tensor.bytes != 0) std::memset(Bytes(tensor), kPoison, tensor.bytes);
  }
}

}  // namespace holdfast::demo
