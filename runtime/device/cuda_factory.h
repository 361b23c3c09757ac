// The link between the library, which has no CUDA code, and holdfast::cuda.
//
// An explicit call rather than a static constructor: a linker drops unreferenced object files of an
// archive with their constructors.
#ifndef HOLDFAST_RUNTIME_DEVICE_CUDA_FACTORY_H_
#define HOLDFAST_RUNTIME_DEVICE_CUDA_FACTORY_H_

#include "absl/status/statusor.h"
#include "holdfast/device.h"

namespace holdfast::device {

using CudaFactory = absl::StatusOr<Device*> (*)(int ordinal);

/// Sets the function behind CudaDevice(); null removes CUDA again (tests).
void SetCudaFactory(CudaFactory factory);

}  // namespace holdfast::device

#endif  // HOLDFAST_RUNTIME_DEVICE_CUDA_FACTORY_H_
