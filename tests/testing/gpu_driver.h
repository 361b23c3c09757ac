// The caller's side of a GPU, as in a training framework: memory, streams and work by calls of
// the driver. For tests on a real and on a fake GPU; no toolkit is needed.
#ifndef HOLDFAST_TESTS_TESTING_GPU_DRIVER_H_
#define HOLDFAST_TESTS_TESTING_GPU_DRIVER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "runtime/device/gpu_calls.h"

namespace holdfast::testing {

/// A driver for INSTANTIATE_TEST_SUITE_P.
struct GpuKind {
  const char* name;
  device::GpuApi api;
  bool fake;

  /// The library to load; empty is the machine's.
  std::string library() const;
  std::string device(int ordinal) const;
};
inline constexpr GpuKind kEveryGpu[] = {
    {"Cuda", device::GpuApi::kCuda, false},
    {"Hip", device::GpuApi::kHip, false},
    {"FakeCuda", device::GpuApi::kCuda, true},
    {"FakeHip", device::GpuApi::kHip, true},
};
inline void PrintTo(const GpuKind& kind, std::ostream* out) { *out << kind.name; }

/// A failed call fails the test.
class GpuDriver {
 public:
  /// Makes the device current on this thread; for CUDA its primary context.
  static absl::StatusOr<std::unique_ptr<GpuDriver>> Open(const GpuKind& kind, int ordinal = 0);

  /// Device and version of the driver.
  std::string Describe();
  int devices();
  /// True while this thread's current device is that of Open.
  bool IsCurrent();

  char* Allocate(size_t bytes);
  char* AllocateManaged(size_t bytes);
  void Free(char* memory);

  device::GpuStream MakeStream();
  void EndStream(device::GpuStream stream);
  void Synchronize(device::GpuStream stream);
  /// Queued on the stream.
  void Fill(char* memory, char byte, size_t bytes, device::GpuStream stream);
  void CopyIn(char* memory, const void* host, size_t bytes, device::GpuStream stream);
  /// Done on return.
  void CopyOut(void* host, const char* memory, size_t bytes);
  void BeginCapture(device::GpuStream stream);
  void EndCapture(device::GpuStream stream);

  void Register(void* base, size_t bytes);
  void Unregister(void* base);

  /// Runs a kernel, given as PTX, on one thread. CUDA alone.
  void RunKernel(const char* ptx, const char* name, device::GpuStream stream);
  device::GpuCode TrySynchronize(device::GpuStream stream);

 private:
  explicit GpuDriver(const device::GpuCalls& calls) : calls_(calls) {}
  void Expect(device::GpuCode code, const char* operation);
  /// Calls a symbol that is not in the table.
  template <typename... Arguments>
  device::GpuCode Call(const char* cuda, const char* hip, Arguments... arguments);

  const device::GpuCalls calls_;
  void* library_ = nullptr;
  int ordinal_ = 0;
  device::GpuContext context_ = nullptr;
};

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_TESTING_GPU_DRIVER_H_
