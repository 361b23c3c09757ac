// Turns CUDA on. Needs the CMake target holdfast::cuda; holdfast::holdfast alone knows no CUDA.
#ifndef HOLDFAST_CUDA_H_
#define HOLDFAST_CUDA_H_

namespace holdfast {

/// Makes CudaDevice() hand out the machine's GPUs. Call it once, in main, before the first
/// CudaDevice(); calling it again does nothing. It makes no CUDA call itself, so it is safe (and
/// without effect) on a machine that has no GPU.
///
/// \threadsafety May be called from any thread.
void EnableCuda();

}  // namespace holdfast

#endif  // HOLDFAST_CUDA_H_
