// CudaDevice(): calls the factory of holdfast::cuda, or fails without one.
#include "runtime/device/cuda_factory.h"

#include <atomic>

#include "absl/status/status.h"

namespace holdfast {
namespace device {
namespace {

// Constant-initialized. Release in SetCudaFactory pairs with acquire in CudaDevice: a reader of the
// function also sees its earlier setup.
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
