#include "tests/crash/real_writer.h"

#include <stdio.h>

#include <cerrno>
#include <utility>
#include <vector>

#include "runtime/sys/system.h"

namespace holdfast::testing {
namespace {

decltype(sys::SystemCalls::renameat2) g_renameat2 = nullptr;

int RenameOnly(int a, const char* from, int b, const char* to, unsigned flags) {
  if ((flags & RENAME_EXCHANGE) == 0) return g_renameat2(a, from, b, to, flags);
  errno = EINVAL;
  return -1;
}

constexpr absl::Duration kEnd = absl::Seconds(120);

}  // namespace

WithoutExchange::WithoutExchange(bool active)
    : active_(active && sys::g_system.renameat2 != RenameOnly), outer_(g_renameat2) {
  if (active_) g_renameat2 = std::exchange(sys::g_system.renameat2, RenameOnly);
}

WithoutExchange::~WithoutExchange() {
  if (active_) sys::g_system.renameat2 = std::exchange(g_renameat2, outer_);
}

RealRank::RealRank(const std::string& directory, const SmallRank& like, uint32_t rank, bool replace,
                   absl::Duration time_liveness_max) {
  CheckpointerOptions options;
  options.directory = directory;
  options.staging.arena_bytes = 16u << 20;
  options.launcher = Launcher::kThread;
  options.engine = EngineRung::kPwrite;
  options.pwrite_threads = 1;
  options.rank = rank;
  options.world_size = like.world_size;
  options.time_liveness_max = time_liveness_max;
  auto made = Checkpointer::Create(options);
  if (!made.ok()) {
    save_ = made.status();
    return;
  }
  checkpointer_ = *std::move(made);
  SmallRank mine = like;
  mine.rank = rank;
  SavePlan plan;
  plan.files.push_back({.name = mine.file_name(), .bytes = mine.bytes, .segments = {}});
  plan.files[0].segments.push_back({.bytes = mine.bytes, .literal = mine.file_bytes()});
  save_ = checkpointer_->SaveAsync({.name = mine.checkpoint,
                                    .step = mine.step,
                                    .plan = &plan,
                                    .replace = replace,
                                    .attempt = mine.attempt});
}

bool RealRank::Wait() { return save_.ok() && save_->WaitDurable(kEnd).ok(); }

void RealRank::Flush() {
  if (checkpointer_ != nullptr) checkpointer_->Flush(kEnd).IgnoreError();
}

void SaveRanks(const RealSave& save) {
  const WithoutExchange without(!save.exchange);
  std::vector<std::unique_ptr<RealRank>> ranks;
  for (uint32_t rank = 0; rank < save.like.world_size; ++rank) {
    ranks.push_back(std::make_unique<RealRank>(save.directory, save.like, rank, save.replace,
                                               save.time_liveness_max));
  }
  if (ranks[0]->Wait() && save.acknowledge) save.acknowledge();
  for (const auto& rank : ranks) rank->Wait();
  for (const auto& rank : ranks) rank->Flush();
}

}  // namespace holdfast::testing
