// The cost of each part of a save's call and of the worker: bytes through the digests
// beside memcpy, and what a save of N tensors needs before its first byte is copied.
//
//   parts_bench [--benchmark_filter=REGEX]      (Google Benchmark's own options: --help)
#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "holdfast/plan.h"
#include "runtime/base/check.h"
#include "runtime/digest/digest.h"
#include "runtime/format/manifest.h"
#include "runtime/format/torch_zip.h"
#include "runtime/staging/extent_allocator.h"

namespace holdfast {
namespace {

constexpr AttemptId kAttempt = {.high = 1, .low = 2};

void CountBytes(benchmark::State& state) {
  state.SetBytesProcessed(state.iterations() * state.range(0));
}

void Memcpy(benchmark::State& state) {
  const std::vector<char> from(static_cast<size_t>(state.range(0)), 'x');
  std::vector<char> to(from.size());
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), from.size());
    benchmark::DoNotOptimize(to.data());
    benchmark::ClobberMemory();
  }
  CountBytes(state);
}

void DigestOfBytes(benchmark::State& state) {
  const std::vector<char> bytes(static_cast<size_t>(state.range(0)), 'x');
  for (auto _ : state) benchmark::DoNotOptimize(digest::Of(bytes.data(), bytes.size()));
  CountBytes(state);
}

void Crc32OfBytes(benchmark::State& state) {
  const std::vector<char> bytes(static_cast<size_t>(state.range(0)), 'x');
  for (auto _ : state) benchmark::DoNotOptimize(format::Crc32(0, bytes.data(), bytes.size()));
  CountBytes(state);
}

std::vector<TensorSource> Tensors(int64_t count, std::vector<std::string>* names) {
  for (int64_t i = 0; i < count; ++i) names->push_back(absl::StrCat("layers.", i, ".weight"));
  static const float values[64 * 16] = {};
  std::vector<TensorSource> tensors;
  for (const std::string& name : *names) {
    tensors.push_back(
        {.name = name, .dtype = "F32", .shape = {64, 16}, .data = values, .bytes = sizeof(values)});
  }
  return tensors;
}

void PlanOfTensors(benchmark::State& state) {
  std::vector<std::string> names;
  const std::vector<TensorSource> tensors = Tensors(state.range(0), &names);
  for (auto _ : state) {
    const auto plan = PlanSafetensors("model.safetensors", tensors, {.attempt = kAttempt});
    HOLDFAST_CHECK(plan.ok(), "the plan is sound");
    benchmark::DoNotOptimize(plan->files.data());
  }
}

void ManifestOfTensors(benchmark::State& state) {
  std::vector<std::string> names;
  const auto plan =
      PlanSafetensors("model.safetensors", Tensors(state.range(0), &names), {.attempt = kAttempt});
  HOLDFAST_CHECK(plan.ok(), "the plan is sound");
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        format::BuildManifest({.checkpoint = "step-1", .attempt = kAttempt}, *plan).text.data());
  }
}

void AllocateAndFree(benchmark::State& state) {
  staging::ExtentAllocator allocator(uint64_t{1} << 30, kIoAlignment);
  std::vector<uint64_t> held;
  for (auto _ : state) {
    while (const auto offset = allocator.Allocate(kChunkBytes)) held.push_back(*offset);
    for (const uint64_t offset : held) allocator.Free(offset, kChunkBytes);
    held.clear();
  }
  state.SetItemsProcessed(state.iterations() * ((int64_t{1} << 30) / kChunkBytes));
}

BENCHMARK(Memcpy)->Arg(64 << 10)->Arg(256 << 20);
BENCHMARK(DigestOfBytes)->Arg(64 << 10)->Arg(256 << 20);
BENCHMARK(Crc32OfBytes)->Arg(64 << 10)->Arg(256 << 20);
BENCHMARK(PlanOfTensors)->Arg(300)->Arg(50'000)->Unit(benchmark::kMicrosecond);
BENCHMARK(ManifestOfTensors)->Arg(300)->Arg(50'000)->Unit(benchmark::kMicrosecond);
BENCHMARK(AllocateAndFree)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace holdfast

BENCHMARK_MAIN();
