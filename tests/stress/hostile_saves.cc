#include "tests/stress/hostile_saves.h"

#include <atomic>
#include <cstring>
#include <deque>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "holdfast/checkpointer.h"
#include "holdfast/verify.h"
#include "tests/testing/training_state.h"

namespace holdfast::testing {
namespace {

constexpr absl::Duration kLong = absl::Minutes(5);
constexpr size_t kInFlight = 3;
constexpr int kGarbage = 0xe7;

struct InFlight {
  std::string name;
  SaveHandle handle;
  TrainingState state;
};

/// Names the chunk that differs on disk.
std::string WhatVerifySays(const std::string& path) {
  const auto report = Verify(path, VerifyOptions());
  if (!report.ok()) return std::string(report.status().message());
  std::string text;
  for (const Fault& fault : report->faults) {
    absl::StrAppend(&text, " ", fault.file, " [", fault.begin, ", ", fault.end, ") ", fault.tensor,
                    " ", fault.reason);
  }
  return text;
}

}  // namespace

HostileResult RunHostileSaves(const HostileOptions& options) {
  HostileResult result;
  const ScratchDirectory scratch;
  std::atomic<uint64_t> refills{0};
  CheckpointerOptions checkpointer_options = SmallOptions(scratch.path());
  checkpointer_options.launcher = options.launcher;
  checkpointer_options.engine = options.engine;
  checkpointer_options.read_back = options.read_back;
  checkpointer_options.staging.arena_bytes = (options.streamed ? 16u : 48u) << 20;
  checkpointer_options.staging.pages = options.pages;
  checkpointer_options.staging.on_released = [&refills](void* memory, uint64_t bytes) {
    std::memset(memory, kGarbage, bytes);
    refills.fetch_add(1, std::memory_order_relaxed);
  };
  auto checkpointer = Checkpointer::Create(checkpointer_options);
  if (!checkpointer.ok()) {
    result.problems.push_back(checkpointer.status().ToString());
    return result;
  }
  std::deque<InFlight> in_flight;
  const auto finish_oldest = [&] {
    InFlight save = std::move(in_flight.front());
    in_flight.pop_front();
    const std::string path = absl::StrCat(scratch.path(), "/", save.name);
    const auto report = save.handle.WaitDurable(kLong);
    ++result.saves;
    if (!report.ok()) {
      result.problems.push_back(absl::StrCat(save.name, ": ", report.status().ToString()));
      return;
    }
    const absl::Status same = save.state.CompareWith(path);
    if (!same.ok()) {
      result.problems.push_back(
          absl::StrCat(save.name, ": ", same.ToString(), WhatVerifySays(path)));
    }
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  };
  // Five chunks a save: I/O is in flight while other chunks are filled, sealed and released.
  TrainingState state = TrainingState::Uniform(options.streamed ? 12 : 5, 3'400'000, 1);
  for (uint32_t i = 0; i < options.saves; ++i) {
    state.Step(i);
    const std::vector<TensorSource> sources = state.Sources();
    const std::string name = absl::StrCat("save-", i);
    auto handle = (*checkpointer)->SaveAsync({.name = name, .step = i, .tensors = sources});
    if (!handle.ok()) {
      result.problems.push_back(absl::StrCat(name, ": ", handle.status().ToString()));
      continue;
    }
    in_flight.push_back({.name = name, .handle = *handle, .state = state});
    const size_t allowed = options.trim_between ? 0 : kInFlight;
    while (in_flight.size() > allowed) finish_oldest();
    if (options.trim_between) {
      const absl::Status trimmed = (*checkpointer)->Trim();
      if (!trimmed.ok()) result.problems.push_back(trimmed.ToString());
    }
  }
  while (!in_flight.empty()) finish_oldest();
  result.refills = refills.load();
  result.pages = (*checkpointer)->staging().pages;
  return result;
}

}  // namespace holdfast::testing
