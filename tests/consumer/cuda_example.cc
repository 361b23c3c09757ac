// GPUs from the installed package: starts anywhere, and says whether there is one.
#include <iostream>

#include "holdfast/device.h"

int main() {
  const absl::StatusOr<holdfast::Device*> device = holdfast::CudaDevice(0);
  std::cout << (device.ok() ? (*device)->name() : std::string(device.status().message())) << "\n";
  return device.ok() || absl::IsNotFound(device.status()) ? 0 : 1;
}
