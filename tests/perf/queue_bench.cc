// What each rung of the queue costs: GB/s and CPU time per GiB, overwriting one file.
//
//   queue_bench FILE [GiB]
//
// FILE is made and removed. Pages: "4K" is shared memory as a staging arena without huge pages has
// it, "2M" is memory on transparent huge pages.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>

#include "io_uring/queue.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"

namespace holdfast::io {
namespace {

constexpr size_t kRegionBytes = 256u << 20;
constexpr size_t kHugePage = 2u << 20;
constexpr uint32_t kDepth = 4;
constexpr int kRounds = 5;

struct Cost {
  double seconds = 0;
  double cpu_seconds = 0;
};

double CpuSeconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

char* Allocate(bool huge) {
  const int sharing = huge ? MAP_PRIVATE : MAP_SHARED;
  void* memory = mmap(nullptr, kRegionBytes + kHugePage, PROT_READ | PROT_WRITE,
                      sharing | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  const auto address = (reinterpret_cast<uintptr_t>(memory) + kHugePage - 1) & ~(kHugePage - 1);
  char* const region = reinterpret_cast<char*>(address);
  if (huge) madvise(region, kRegionBytes, MADV_HUGEPAGE);
  memset(region, 7, kRegionBytes);
  return region;
}

// One pass over the file, fsync included; false if anything went wrong.
bool Pass(Queue* queue, int fd, char* region, uint64_t bytes, Cost* cost) {
  const uint64_t begun = sys::NowNs();
  const double cpu_begun = CpuSeconds();
  uint64_t next = 0;
  while (next < bytes || queue->in_flight() > 0) {
    while (next < bytes && queue->CanSubmit()) {
      const Request request = {
          .fd = fd, .buffer = region + next % kRegionBytes, .offset = next, .bytes = kChunkBytes};
      if (queue->Submit(request) != 0) return false;
      next += kChunkBytes;
    }
    Completion ends[kDepth];
    const int count = queue->Wait(ends, kDepth, 60'000, nullptr);
    if (count <= 0) return false;
    for (int i = 0; i < count; ++i) {
      if (ends[i].error != 0) return false;
    }
  }
  if (fsync(fd) != 0) return false;
  cost->seconds = static_cast<double>(sys::NowNs() - begun) * 1e-9;
  cost->cpu_seconds = CpuSeconds() - cpu_begun;
  return true;
}

int Measure(const char* name, bool huge, QueueOptions options, int fd, uint64_t bytes) {
  char* const region = Allocate(huge);
  if (region == nullptr) return 1;
  options.depth = kDepth;
  options.region = region;
  options.region_bytes = kRegionBytes;
  auto queue = std::make_unique<Queue>();
  if (queue->Open(options) != 0) {
    printf("%-10s %s  not here: %s\n", name, huge ? "2M" : "4K", queue->reason());
    munmap(region, kRegionBytes);
    return 0;
  }
  Cost costs[kRounds];
  for (Cost& cost : costs) {
    if (!Pass(queue.get(), fd, region, bytes, &cost)) return 1;
  }
  queue->Close();
  munmap(region, kRegionBytes);
  double seconds[kRounds];
  double cpu[kRounds];
  for (int i = 0; i < kRounds; ++i) {
    seconds[i] = costs[i].seconds;
    cpu[i] = costs[i].cpu_seconds;
  }
  std::sort(seconds, seconds + kRounds);
  std::sort(cpu, cpu + kRounds);
  const double gib = static_cast<double>(bytes) / (1u << 30);
  printf("%-10s %s  %5.2f GB/s  %6.1f CPU ms/GiB\n", name, huge ? "2M" : "4K",
         static_cast<double>(bytes) * 1e-9 / seconds[kRounds / 2], cpu[kRounds / 2] * 1e3 / gib);
  return 0;
}

int Main(int argc, char** argv) {
  if (argc < 2) {
    fprintf(stderr, "usage: queue_bench FILE [GiB]\n");
    return 64;
  }
  const uint64_t gib = argc > 2 ? strtoull(argv[2], nullptr, 10) : 1;
  const uint64_t bytes = std::max<uint64_t>(gib, 1) << 30;
  DirectOpen file;
  const int error = OpenDirect(AT_FDCWD, argv[1], O_CREAT | O_EXCL | O_RDWR, 0600, true, &file);
  if (error != 0) {
    fprintf(stderr, "%s: %s\n", argv[1], strerror(error));
    return 1;
  }
  printf("direct I/O: %s; %llu GiB, %u KiB requests, %u in flight, median of %d\n",
         file.direct == DirectIo::kProven ? "proven" : "not proven",
         static_cast<unsigned long long>(gib), kChunkBytes >> 10, kDepth, kRounds);
  int failed = fallocate(file.fd, 0, 0, static_cast<off_t>(bytes));
  // The first pass turns reserved blocks into written ones; it is thrown away.
  if (char* region = Allocate(false); region != nullptr) {
    Queue queue;
    Cost ignored;
    failed |= queue.Open({.depth = kDepth}) != 0 || !Pass(&queue, file.fd, region, bytes, &ignored);
    queue.Close();
    munmap(region, kRegionBytes);
  }
  for (const bool huge : {false, true}) {
    failed |= Measure("fixed", huge, {.rung = EngineRung::kUringFixed}, file.fd, bytes);
    failed |= Measure("uring", huge, {.rung = EngineRung::kUring}, file.fd, bytes);
    failed |=
        Measure("pwrite 4", huge, {.rung = EngineRung::kPwrite, .threads = 4}, file.fd, bytes);
    failed |=
        Measure("pwrite 2", huge, {.rung = EngineRung::kPwrite, .threads = 2}, file.fd, bytes);
    failed |=
        Measure("pwrite 0", huge, {.rung = EngineRung::kPwrite, .threads = 0}, file.fd, bytes);
  }
  sys::CloseOwned(file.fd);
  unlink(argv[1]);
  return failed != 0;
}

}  // namespace
}  // namespace holdfast::io

int main(int argc, char** argv) { return holdfast::io::Main(argc, argv); }
