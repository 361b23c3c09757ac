#include "tools/demo/training_state.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"

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

/// Returns a pseudo-gradient in [-1, 1) of element and step: a cheap multiplicative hash. Elements
/// do not depend on each other, so compilers vectorize the loops.
inline float Gradient(uint64_t element, uint32_t salt) {
  uint32_t hash = (static_cast<uint32_t>(element) ^ salt) * 0x9E3779B1u;
  hash ^= hash >> 15;
  hash *= 0x85EBCA77u;
  return static_cast<float>(static_cast<int32_t>(hash)) * (1.0f / 2147483648.0f);
}

template <typename Float, typename Word>
void FloatStep(char* begin, uint64_t bytes, uint64_t first, uint32_t salt) {
  for (uint64_t i = 0; i < bytes / sizeof(Float); ++i) {
    Float value;
    std::memcpy(&value, begin + i * sizeof(Float), sizeof(Float));
    const auto gradient = Float(Gradient(first + i, salt));
    const Float moved = value * Float(0.999) + Float(0.01) * gradient;
    // A step too small to move the value flips the lowest bit.
    const auto next =
        std::bit_cast<Float>(std::bit_cast<Word>(moved) ^ (moved == value ? Word{1} : Word{0}));
    const Float stored = std::abs(next) <= std::numeric_limits<Float>::max() ? next : gradient;
    std::memcpy(begin + i * sizeof(Float), &stored, sizeof(Float));
  }
}

template <typename Word>
void WordStep(char* begin, uint64_t bytes, Word flip, Word add) {
  for (uint64_t i = 0; i < bytes / sizeof(Word); ++i) {
    Word value;
    std::memcpy(&value, begin + i * sizeof(Word), sizeof(Word));
    value = static_cast<Word>((value ^ flip) + add);
    std::memcpy(begin + i * sizeof(Word), &value, sizeof(Word));
  }
}

/// Changes every element of `dtype` in [begin, begin + bytes), which starts and ends at element
/// borders. Floating-point values stay finite, integers count, BOOL stays 0 or 1.
void StepRun(const std::string& dtype, char* begin, uint64_t bytes, uint64_t first, uint64_t step,
             uint64_t seed) {
  const uint64_t mixed = (seed * 0x9E3779B97F4A7C15ull) ^ (step * 0xD1B54A32D192ED03ull);
  const auto salt = static_cast<uint32_t>(mixed ^ (mixed >> 32));
  if (dtype == "F32") return FloatStep<float, uint32_t>(begin, bytes, first, salt);
  if (dtype == "F64") return FloatStep<double, uint64_t>(begin, bytes, first, salt);
  if (dtype == "BF16" || dtype == "F16") {
    // One of the two lowest bits of the mantissa: a flip never makes a number infinite.
    return WordStep<uint16_t>(begin, bytes, (step & 1) != 0 ? 1 : 2, 0);
  }
  if (dtype == "I64" || dtype == "U64") return WordStep<uint64_t>(begin, bytes, 0, 1);
  if (dtype == "I32" || dtype == "U32") return WordStep<uint32_t>(begin, bytes, 0, 1);
  if (dtype == "I16" || dtype == "U16") return WordStep<uint16_t>(begin, bytes, 0, 1);
  if (dtype == "I8" || dtype == "U8") return WordStep<uint8_t>(begin, bytes, 0, 1);
  WordStep<uint8_t>(begin, bytes, 1, 0);
}

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87ull;
constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4Full;

/// Each step is a bijection of the lane, so no change of one word can vanish in its own lane.
inline uint64_t Mix(uint64_t lane, uint64_t word) {
  return std::rotl((lane ^ word) * kPrime1, 31) + kPrime2;
}

/// Returns 64 bits over a tensor. Any changed bit changes the result, with an error probability of
/// 1 in 2^64.
uint64_t Fingerprint(const TensorSource& tensor) {
  const char* at = Bytes(tensor);
  uint64_t lanes[] = {1, 2, 3, 4};
  size_t left = tensor.bytes;
  for (; left >= sizeof(lanes); left -= sizeof(lanes), at += sizeof(lanes)) {
    uint64_t words[std::size(lanes)];
    std::memcpy(words, at, sizeof(words));
    for (size_t i = 0; i < std::size(lanes); ++i) lanes[i] = Mix(lanes[i], words[i]);
  }
  uint64_t sum = Mix(kPrime2, tensor.bytes);
  for (const uint64_t lane : lanes) sum = Mix(sum, lane);
  for (; left > 0; --left, ++at) sum = Mix(sum, static_cast<unsigned char>(*at));
  return sum ^ (sum >> 29);
}

}  // namespace

absl::StatusOr<std::unique_ptr<TrainingState>> TrainingState::Make(const std::string& file,
                                                                   uint32_t threads,
                                                                   uint64_t seed) {
  if (threads == 0) threads = std::clamp(std::thread::hardware_concurrency(), 1u, kThreadsMax);
  auto state = std::unique_ptr<TrainingState>(new TrainingState(threads, seed));
  if (file.empty()) {
    state->AddGpt2();
    if (const absl::Status status = state->Allocate(); !status.ok()) return status;
    state->Step();  // Touches the memory, and replaces the zeros that no training has.
    return state;
  }
  absl::StatusOr<std::unique_ptr<CheckpointReader>> reader = CheckpointReader::OpenFile(file);
  if (!reader.ok()) return reader.status();
  for (const PlannedTensor& tensor : (*reader)->tensors()) {
    state->Add(tensor.name, tensor.dtype, tensor.shape, tensor.end - tensor.begin);
  }
  if (const absl::Status status = state->Allocate(); !status.ok()) return status;
  state->origin_ = file;
  LoadOptions options;
  options.verify = false;  // A foreign file has no digests to verify against.
  const absl::StatusOr<LoadReport> loaded = (*reader)->Load(state->Targets(), options);
  if (!loaded.ok()) return loaded.status();
  return state;
}

TrainingState::~TrainingState() {
  if (memory_ != nullptr) munmap(memory_, memory_bytes_);
}

void TrainingState::Add(const std::string& name, const std::string& dtype,
                        std::vector<int64_t> shape, uint64_t bytes) {
  TensorSource tensor;
  tensor.name = name;
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  tensor.bytes = bytes;
  tensors_.push_back(std::move(tensor));
}

/// Names and shapes as in Hugging Face's `gpt2` (GPT2LMHeadModel, whose head shares `wte`), with
/// the moments of its Adam optimizer: 3 x 124 million parameters.
void TrainingState::AddGpt2() {
  constexpr int64_t kVocabulary = 50257;
  constexpr int64_t kPositions = 1024;
  constexpr int64_t kWidth = 768;
  constexpr int64_t kInner = 4 * kWidth;
  constexpr int kLayers = 12;
  origin_ = "GPT-2 small with Adam's moments";
  for (const char* prefix : {"", "optimizer.exp_avg.", "optimizer.exp_avg_sq."}) {
    const auto add = [&](const std::string& name, int64_t rows, int64_t columns = 0) {
      std::vector<int64_t> shape = {rows};
      if (columns != 0) shape.push_back(columns);
      Add(absl::StrCat(prefix, "transformer.", name), "F32", std::move(shape),
          sizeof(float) * rows * std::max<int64_t>(columns, 1));
    };
    add("wte.weight", kVocabulary, kWidth);
    add("wpe.weight", kPositions, kWidth);
    for (int layer = 0; layer < kLayers; ++layer) {
      const std::string block = absl::StrCat("h.", layer, ".");
      add(block + "ln_1.weight", kWidth);
      add(block + "ln_1.bias", kWidth);
      // Conv1D stores its weight as (inputs, outputs).
      add(block + "attn.c_attn.weight", kWidth, 3 * kWidth);
      add(block + "attn.c_attn.bias", 3 * kWidth);
      add(block + "attn.c_proj.weight", kWidth, kWidth);
      add(block + "attn.c_proj.bias", kWidth);
      add(block + "ln_2.weight", kWidth);
      add(block + "ln_2.bias", kWidth);
      add(block + "mlp.c_fc.weight", kWidth, kInner);
      add(block + "mlp.c_fc.bias", kInner);
      add(block + "mlp.c_proj.weight", kInner, kWidth);
      add(block + "mlp.c_proj.bias", kWidth);
    }
    add("ln_f.weight", kWidth);
    add("ln_f.bias", kWidth);
  }
  Add("optimizer.step", "I64", {}, sizeof(int64_t));
}

absl::Status TrainingState::Allocate() {
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

std::vector<TensorTarget> TrainingState::Targets() const {
  std::vector<TensorTarget> targets;
  for (const TensorSource& tensor : tensors_) {
    targets.push_back({.name = tensor.name, .data = Bytes(tensor), .bytes = tensor.bytes});
  }
  return targets;
}

void TrainingState::InParallel(uint64_t count, const std::function<void(uint64_t)>& body) const {
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

void TrainingState::Step() {
  ++steps_;
  // Runs small enough that threads share the load evenly.
  struct Run {
    uint64_t tensor;
    uint64_t begin;
  };
  std::vector<Run> runs;
  for (uint64_t i = 0; i < tensors_.size(); ++i) {
    for (uint64_t at = 0; at < tensors_[i].bytes; at += kRunBytes) runs.push_back({i, at});
  }
  InParallel(runs.size(), [this, &runs](uint64_t i) {
    const TensorSource& tensor = tensors_[runs[i].tensor];
    const uint64_t begin = runs[i].begin;
    // Distinct noise per tensor: equal tensors would hide a mix-up.
    const uint64_t first =
        runs[i].tensor * uint64_t{0x9E3779B1} + begin / std::max(1u, DtypeBytes(tensor.dtype));
    StepRun(tensor.dtype, Bytes(tensor) + begin, std::min(kRunBytes, tensor.bytes - begin), first,
            steps_, seed_);
  });
}

std::vector<uint64_t> TrainingState::Fingerprints() const {
  std::vector<uint64_t> prints(tensors_.size());
  InParallel(tensors_.size(), [&](uint64_t i) { prints[i] = Fingerprint(tensors_[i]); });
  return prints;
}

void TrainingState::Poison() {
  for (const TensorSource& tensor : tensors_) {
    if (tensor.bytes != 0) std::memset(Bytes(tensor), kPoison, tensor.bytes);
  }
}

}  // namespace holdfast::demo
