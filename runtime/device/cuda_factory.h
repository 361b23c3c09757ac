// The seam between the library, which knows no CUDA, and holdfast::cuda, which adds it.
//
// An explicit call rather than a static constructor: a linker drops the object files of an archive
// that nobody refers to, and their constructors with them.
#ifndef HOLDFAST_RUNTIME_DEVICE_CUDA_FACTORY_H_
#define HOLDFAST_RUNTIME_DEVICE_CUDA_FACTORY_H_

#include "absl/status/statusor.h"
#include "holdfast/device.h"

namespace holdfast::device {

using CudaFactory = absl::StatusOr<Device*> (*)(int ordinal);

/// What CudaDevice() calls from now on; null takes CUDA away again (tests).
void SetCudaFactory(CudaFactory factory);

}  // namespace holdfast::device

#endif  // HOLDFAST_RUNTIME_DEVICE_CUDA_FACTORY_H_
