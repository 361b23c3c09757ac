#include "runtime/writer/sealer.h"

#include <time.h>

#include <cstring>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "runtime/base/clock.h"
#include "runtime/base/planted_bugs.h"
#include "runtime/digest/digest.h"
#include "runtime/sys/system.h"

namespace holdfast::writer {

namespace {

uint64_t ThreadCpuNs() {
  timespec now{};
  sys::Sys().clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<uint64_t>(now.tv_sec * sys::kNsPerSecond + now.tv_nsec);
}

// The manifest of so many tensors takes some tens of microseconds: no longer than to wake a thread.
constexpr size_t kTensorsAtOnce = 256;

}  // namespace

Sealer::Sealer(staging::StagingPool* pool, uint32_t threads,
               std::function<void(const SealedExtent&)> on_sealed)
    : pool_(pool), on_sealed_(std::move(on_sealed)), threads_max_(threads) {}

absl::Status Sealer::Start() {
  while (threads_.size() < threads_max_) {
    auto thread = std::make_unique<base::Thread>();
    const absl::Status started = thread->Start([this] { Run(); });
    if (!started.ok()) return threads_.empty() ? started : absl::OkStatus();
    threads_.push_back(std::move(thread));
  }
  return absl::OkStatus();
}

Sealer::~Sealer() {
  {
    const base::MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  for (const auto& thread : threads_) thread->Join();
}

void Sealer::Enqueue(std::shared_ptr<SaveState> save, uint32_t index) {
  save->AddUser();
  const base::MutexLock lock(&mutex_);
  tasks_.push_back({.save = std::move(save), .index = index});
  changed_.NotifyAll();
}

bool Sealer::TryCopy(std::shared_ptr<SaveState> save, uint32_t index, std::function<bool()> copy) {
  const base::MutexLock lock(&mutex_);
  if (copies_under_way_ >= threads_.size()) return false;
  ++copies_under_way_;
  save->AddUser();
  copies_.push_back({.save = std::move(save), .index = index, .copy = std::move(copy)});
  changed_.NotifyAll();
  return true;
}

Sealer::Task Sealer::Next() {
  const base::MutexLock lock(&mutex_);
  while (copies_.empty() && tasks_.empty() && !stopping_)
    changed_.WaitUntil(&mutex_, base::Now() + absl::Hours(1));
  // A caller waits for the copies.
  std::deque<Task>* queue = copies_.empty() ? &tasks_ : &copies_;
  if (queue->empty()) return {};
  Task task = std::move(queue->front());
  queue->pop_front();
  return task;
}

void Sealer::Run() {
  while (true) {
    Task task = Next();
    if (task.save == nullptr) return;
    const uint64_t begin = ThreadCpuNs();
    bool has_bytes = true;
    if (task.copy != nullptr) {
      has_bytes = task.copy();
      task.copy = nullptr;  // with all of its references
      const base::MutexLock lock(&mutex_);
      --copies_under_way_;
    }
    if (has_bytes && !task.save->StagingFailed()) Do(task);
    task.save->cpu_sealing_ns.fetch_add(ThreadCpuNs() - begin, std::memory_order_relaxed);
    task.save->DropUser();
  }
}

void Sealer::Do(const Task& task) {
  if (task.sealed) {
    PublishLast(task.save.get(), task.index);
  } else if (TakeChecksums(task)) {
    Seal(task.save, task.index);
  }
}

bool Sealer::TakeChecksums(const Task& task) {
  if (task.save->checksums == nullptr) return true;
  std::vector<uint32_t> ready;
  char* memory = pool_->arena().base() + task.save->table->extent(task.index).arena_offset;
  const bool complete = task.save->checksums->Take(task.index, memory, &ready);
  for (const uint32_t index : ready) Enqueue(task.save, index);
  return complete;
}

void Sealer::Seal(const std::shared_ptr<SaveState>& save, uint32_t index) {
  const layout::Extent& extent = save->table->extent(index);
  const StagedPiece* pieces = save->table->pieces(extent);
  const char* memory = pool_->arena().base() + extent.arena_offset;
  if (save->checksums != nullptr) {
    if (const std::unique_ptr<BegunDigest> begun = save->checksums->TakeBegun(index)) {
      for (uint32_t i = 0; i < extent.piece_count; ++i) {
        const StagedPiece& piece = pieces[i];
        if (piece.tensor == Failure::kNoIndex && piece.has_digest)
          *save->table->digest_of(extent, i) = digest::Of(memory + piece.offset, piece.bytes);
      }
      begun->whole.Update(memory + begun->bytes, extent.bytes - begun->bytes);
      return SealDigested(save, index, begun->whole.Finish());
    }
  }
  absl::InlinedVector<digest::Part, 16> parts;
  for (uint32_t i = 0; i < extent.piece_count; ++i) {
    if (!pieces[i].has_digest) continue;
    parts.push_back({.offset = pieces[i].offset,
                     .bytes = pieces[i].bytes,
                     .out = save->table->digest_of(extent, i)});
  }
  SealDigested(save, index, digest::OfChunk(memory, extent.bytes, parts.data(), parts.size()));
}

void Sealer::SealDigested(const std::shared_ptr<SaveState>& save, uint32_t index,
                          const Digest& whole) {
  const layout::Extent& extent = save->table->extent(index);
  char* memory = pool_->arena().base() + extent.arena_offset;
  // The I/O length is a multiple of the alignment: bytes behind the end must not be an older
  // save's.
  std::memset(memory + extent.bytes, 0, AlignUp(extent.bytes) - extent.bytes);
  save->table->SetSealed(index, whole);
  pool_->Seal(save->leases[index]);
  if (on_sealed_) {
    on_sealed_({.memory = memory,
                .bytes = extent.bytes,
                .file = save->plan->files[extent.file].name,
                .file_offset = extent.file_offset,
                .epoch = save->epoch});
  }
  Publish(save, index);
}

void Sealer::Publish(const std::shared_ptr<SaveState>& save, uint32_t index) {
  const uint32_t bytes = save->table->extent(index).bytes;
  pool_->StartWriting(save->leases[index]);
  // Before the append: the worker may finish, and the progress display read, as soon as the index
  // is in the log.
  save->bytes_sealed.fetch_add(bytes, std::memory_order_relaxed);
  // acq_rel: the thread that seals the last extent sees the digests of all extents.
  const bool last = save->extents_to_seal.fetch_sub(1, std::memory_order_acq_rel) == 1;
  if (!last) {
    save->Publish(index);
  } else if (save->plan->tensors.size() <= kTensorsAtOnce) {
    PublishLast(save.get(), index);
  } else {
    // Not by this thread, which may be the caller's.
    save->AddUser();
    const base::MutexLock lock(&mutex_);
    tasks_.push_front({.save = save, .index = index, .copy = nullptr, .sealed = true});
    changed_.NotifyAll();
  }
  if (base::Planted(base::Bug::kReleaseAtSubmit)) pool_->Release(save->leases[index]);
}

// The last extent completes the save. A worker whose trainer dies finishes a complete save, so the
// manifest must be present by then.
void Sealer::PublishLast(SaveState* save, uint32_t index) {
  save->table->WriteManifest();
  save->MarkStaged(index);
}

}  // namespace holdfast::writer
