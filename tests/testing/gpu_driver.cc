#include "tests/testing/gpu_driver.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"
#include "runtime/base/status.h"

namespace holdfast::testing {

using device::GpuAddress;
using device::GpuApi;
using device::GpuCode;
using device::GpuContext;
using device::GpuStream;

namespace {

constexpr unsigned kAttachGlobal = 1;  // CU_MEM_ATTACH_GLOBAL
constexpr int kCaptureModeGlobal = 0;  // CU_STREAM_CAPTURE_MODE_GLOBAL

GpuAddress AddressOf(const char* memory) { return reinterpret_cast<GpuAddress>(memory); }

}  // namespace

std::string GpuKind::library() const { return fake ? HOLDFAST_FAKE_GPU : ""; }
std::string GpuKind::device(int ordinal) const { return absl::StrCat(NameOf(api), ":", ordinal); }

template <typename... Arguments>
GpuCode GpuDriver::Call(const char* cuda, const char* hip, Arguments... arguments) {
  const char* const name = calls_.api == GpuApi::kCuda ? cuda : hip;
  void* const symbol = name == nullptr ? nullptr : dlsym(library_, name);
  if (symbol == nullptr) {
    ADD_FAILURE() << "the driver has no " << (name == nullptr ? cuda : name);
    return GpuCode::kNotSupported;
  }
  return reinterpret_cast<GpuCode (*)(Arguments...)>(symbol)(arguments...);
}

void GpuDriver::Expect(GpuCode code, const char* operation) {
  EXPECT_TRUE(code == GpuCode::kSuccess) << ToStatus(calls_, operation, "a GPU", code);
}

absl::StatusOr<std::unique_ptr<GpuDriver>> GpuDriver::Open(const GpuKind& kind, int ordinal) {
  HOLDFAST_ASSIGN_OR_RETURN(const device::GpuCalls calls,
                            device::FindGpuCalls(kind.api, kind.library()));
  HOLDFAST_RETURN_IF_ERROR(ToStatus(calls, "start", kind.name, calls.init(0)));
  int count = 0;
  HOLDFAST_RETURN_IF_ERROR(ToStatus(calls, "count", kind.name, calls.device_count(&count)));
  if (ordinal >= count) return absl::NotFoundError(absl::StrCat("there are ", count, " devices"));
  std::unique_ptr<GpuDriver> driver(new GpuDriver(calls));
  driver->ordinal_ = ordinal;
  Dl_info info = {};
  if (dladdr(reinterpret_cast<void*>(calls.init), &info) == 0) return absl::InternalError("dladdr");
  driver->library_ = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  if (kind.api == GpuApi::kCuda) {
    HOLDFAST_RETURN_IF_ERROR(
        ToStatus(calls, "retain", kind.name, calls.context_retain(&driver->context_, ordinal)));
    driver->Expect(driver->Call("cuCtxSetCurrent", nullptr, driver->context_), "make current");
  } else {
    driver->Expect(calls.set_device(ordinal), "make current");
  }
  return driver;
}

std::string GpuDriver::Describe() {
  char name[256] = "?";
  int version = 0;
  Expect(Call("cuDeviceGetName", "hipDeviceGetName", static_cast<char*>(name),
              static_cast<int>(sizeof(name)), ordinal_),
         "name");
  Expect(Call("cuDriverGetVersion", "hipDriverGetVersion", &version), "find the version of");
  return absl::StrCat(NameOf(calls_.api), ":", ordinal_, " is ", name, ", driver version ", version,
                      ", ", devices(), " device(s)");
}

int GpuDriver::devices() {
  int count = 0;
  Expect(calls_.device_count(&count), "count");
  return count;
}

bool GpuDriver::IsCurrent() {
  if (calls_.api == GpuApi::kHip) {
    int current = -1;
    Expect(calls_.current_device(&current), "find the current");
    return current == ordinal_;
  }
  GpuContext current = nullptr;
  Expect(Call("cuCtxGetCurrent", nullptr, &current), "find the current");
  return current == context_;
}

char* GpuDriver::Allocate(size_t bytes) {
  GpuAddress address = 0;
  Expect(Call("cuMemAlloc_v2", "hipMalloc", &address, bytes), "allocate on");
  return reinterpret_cast<char*>(address);
}
char* GpuDriver::AllocateManaged(size_t bytes) {
  GpuAddress address = 0;
  Expect(Call("cuMemAllocManaged", "hipMallocManaged", &address, bytes, kAttachGlobal),
         "allocate managed memory on");
  return reinterpret_cast<char*>(address);
}
void GpuDriver::Free(char* memory) {
  Expect(Call("cuMemFree_v2", "hipFree", AddressOf(memory)), "free on");
}

GpuStream GpuDriver::MakeStream() {
  GpuStream stream = nullptr;
  Expect(calls_.stream_create(&stream, device::kStreamNonBlocking), "make a stream on");
  return stream;
}
void GpuDriver::EndStream(GpuStream stream) {
  Expect(Call("cuStreamDestroy_v2", "hipStreamDestroy", stream), "end a stream of");
}
GpuCode GpuDriver::TrySynchronize(GpuStream stream) {
  return Call("cuStreamSynchronize", "hipStreamSynchronize", stream);
}
void GpuDriver::Synchronize(GpuStream stream) { Expect(TrySynchronize(stream), "wait for"); }
void GpuDriver::Fill(char* memory, char byte, size_t bytes, GpuStream stream) {
  Expect(Call("cuMemsetD8Async", "hipMemsetD8Async", AddressOf(memory),
              static_cast<unsigned char>(byte), bytes, stream),
         "fill on");
}
void GpuDriver::CopyIn(char* memory, const void* host, size_t bytes, GpuStream stream) {
  Expect(calls_.copy_from_host(AddressOf(memory), host, bytes, stream), "copy to");
}
void GpuDriver::CopyOut(void* host, const char* memory, size_t bytes) {
  Expect(Call("cuMemcpyDtoH_v2", "hipMemcpyDtoH", host, AddressOf(memory), bytes), "copy from");
}
void GpuDriver::BeginCapture(GpuStream stream) {
  Expect(Call("cuStreamBeginCapture_v2", "hipStreamBeginCapture", stream, kCaptureModeGlobal),
         "begin a capture on");
}
void GpuDriver::EndCapture(GpuStream stream) {
  void* graph = nullptr;
  Expect(Call("cuStreamEndCapture", "hipStreamEndCapture", stream, &graph), "end a capture on");
  if (graph != nullptr) Expect(Call("cuGraphDestroy", "hipGraphDestroy", graph), "drop a graph of");
}

void GpuDriver::Register(void* base, size_t bytes) {
  Expect(calls_.host_register(base, bytes, device::kHostRegisterPortable), "register with");
}
void GpuDriver::Unregister(void* base) { Expect(calls_.host_unregister(base), "unregister with"); }

void GpuDriver::RunKernel(const char* ptx, const char* name, GpuStream stream) {
  void* module = nullptr;
  void* function = nullptr;
  Expect(Call("cuModuleLoadData", nullptr, &module, ptx), "load a kernel on");
  Expect(Call("cuModuleGetFunction", nullptr, &function, module, name), "find a kernel on");
  Expect(Call("cuLaunchKernel", nullptr, function, 1u, 1u, 1u, 1u, 1u, 1u, 0u, stream,
              static_cast<void**>(nullptr), static_cast<void**>(nullptr)),
         "run a kernel on");
}

}  // namespace holdfast::testing
