// Turns CUDA on. Needs the CMake target holdfast::cuda; holdfast::holdfast has no CUDA code.
#ifndef HOLDFAST_CUDA_H_
#define HOLDFAST_CUDA_H_

namespace holdfast {

/// Makes CudaDevice() return the machine's GPUs. Call EnableCuda once, in main, before the first
/// CudaDevice(); a second call does nothing. EnableCuda makes no CUDA call, so the call is safe
/// (and without effect) on a machine without a GPU.
///
/// \threadsafety May be called from any thread.
void EnableCuda();

}  // namespace holdfast

#endif  // HOLDFAST_CUDA_H_
