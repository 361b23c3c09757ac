// CudaDevice(): whatever holdfast::cuda put in place, or a clear refusal.
#include "runtime/device/cuda_factory.h"

#include <atomic>

#include "absl/status/status.h"

namespace holdfast {
namespace device {
namespace {

// Constant-initialized. Release in SetCudaFactory pairs with acquire in CudaDevice: whoever sees
// the function sees everything that was set up before.
std::atomic<CudaFactory> g_factory{nullptr};

}  // namespace

void SetCudaFactory(CudaFactory factory) { g_factory.store(factory, std::memory_order_release); }

}  // namespace device

absl::StatusOr<Device*> CudaDevice(int ordinal) {
  const device::CudaFactory factory = device::g_factory.load(std::memory_order_acquire);
  if (factory == nullptr) {
    return absl::UnimplementedError(
        "CudaDevice: CUDA is not enabled; link holdfast::cuda and call holdfast::EnableCuda()");
  }
  return factory(ordinal);
}

}  // namespace holdfast
