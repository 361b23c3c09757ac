// A fake CUDA runtime, linked in place of the real one: streams run on the test's command, any call
// can fail on demand, and misuse that a real GPU does not report (a call outside the device's
// context, an error left latched) is counted.
#ifndef HOLDFAST_TESTS_UNIT_DEVICE_FAKE_CUDA_H_
#define HOLDFAST_TESTS_UNIT_DEVICE_FAKE_CUDA_H_

#include <cuda_runtime_api.h>

#include <map>
#include <string>
#include <vector>

namespace holdfast::testing {

struct FakeCuda {
  static constexpr int kDevices = 64;  ///< Each test uses a new device.

  struct Operation {
    enum Kind { kCopy, kRecord, kWait } kind = kCopy;
    char* destination = nullptr;
    const char* source = nullptr;
    size_t bytes = 0;
    cudaEvent_t event = nullptr;
    uint64_t generation = 0;  ///< Of the event's record.
  };
  struct Stream {
    bool capturing = false;
    std::vector<Operation> operations;
    size_t done = 0;
  };
  struct Event {
    uint64_t recorded = 0;
    uint64_t done = 0;
  };
  struct Failure {
    cudaError_t error = cudaSuccess;
    int skip = 0;
    int times = 0;
  };

  /// Runs `stream` until a wait for an event.
  void Run(cudaStream_t stream);
  /// Runs all streams until no stream can continue.
  void RunAll();
  /// Makes `times` calls of `function` return `error`, after `skip` more calls.
  void Fail(const std::string& function, cudaError_t error, int skip = 0, int times = 1);
  uint64_t count(const std::string& function) const;

  int device_count = kDevices;
  std::map<std::string, Failure> failures;
  std::map<std::string, uint64_t> counts;
  std::map<cudaStream_t, Stream> streams;  ///< Null is the default stream.
  std::map<cudaEvent_t, Event> events;
  std::map<const char*, std::pair<size_t, int>> device_memory;  ///< Size and ordinal.
  std::map<const void*, size_t> registered;
  uint64_t calls_outside_context = 0;
  uint64_t calls_not_relaxed = 0;
  cudaError_t latched = cudaSuccess;
  size_t contexts_pushed = 0;
};

/// Returns the state behind the runtime's functions. Not thread-safe.
FakeCuda& Fake();

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_UNIT_DEVICE_FAKE_CUDA_H_
