// Devices: real devices, and devices that a test writes in Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/trampoline.h>

#include <string>

#include "bindings.h"
#include "callback.h"
#include "holdfast/device.h"
#include "status.h"

namespace nb = nanobind;

namespace holdfast::python {
namespace {

/// A device whose methods are Python's. An exception becomes a status. A registration keeps the
/// Python object alive: staging memory may outlive every module at the interpreter's end.
class PythonDevice : public Device {
 public:
  NB_TRAMPOLINE(Device, 9);

  std::string name() const override { NB_OVERRIDE_PURE(name); }
  bool is_host() const override { return false; }

  absl::Status RegisterMemory(void* base, size_t bytes) override {
    return Call([&] {
      Method("register_memory")(Address(base), bytes);
      nb_trampoline.base().inc_ref();
    });
  }
  absl::Status UnregisterMemory(void* base, size_t bytes) override {
    return Call([&] {
      Method("unregister_memory")(Address(base), bytes);
      nb_trampoline.base().dec_ref();
    });
  }
  absl::Status OrderAfter(StreamHandle stream) override {
    return Call([&] { Method("order_after")(Address(stream)); });
  }
  absl::StatusOr<CopyTicket> CopyToHost(void* destination, const void* source,
                                        size_t bytes) override {
    return Ticket("copy_to_host", destination, source, bytes);
  }
  absl::StatusOr<CopyTicket> CopyFromHost(void* destination, const void* source,
                                          size_t bytes) override {
    return Ticket("copy_from_host", destination, source, bytes);
  }
  absl::StatusOr<bool> IsDone(CopyTicket ticket) override {
    bool done = false;
    const absl::Status status = Call([&] { done = nb::cast<bool>(Method("is_done")(ticket)); });
    if (!status.ok()) return status;
    return done;
  }
  absl::Status Wait(CopyTicket ticket, absl::Duration timeout) override {
    bool done = false;
    const absl::Status status = Call(
        [&] { done = nb::cast<bool>(Method("wait")(ticket, absl::ToDoubleSeconds(timeout))); });
    if (!status.ok() || done) return status;
    return absl::DeadlineExceededError("wait for a copy: not done yet");
  }
  absl::Status MakeStreamWait(StreamHandle stream) override {
    return Call([&] { Method("make_stream_wait")(Address(stream)); });
  }

 private:
  static uintptr_t Address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

  nb::object Method(const char* name) const { return nb_trampoline.base().attr(name); }

  template <typename Do>
  absl::Status Call(Do act) const {
    const Callback call;
    if (!call)
      return absl::FailedPreconditionError("call a device of Python: the interpreter is ending");
    try {
      act();
      return absl::OkStatus();
    } catch (const std::exception& error) {
      return absl::InternalError(error.what());
    }
  }

  absl::StatusOr<CopyTicket> Ticket(const char* method, void* destination, const void* source,
                                    size_t bytes) {
    CopyTicket ticket = 0;
    const absl::Status status = Call([&] {
      ticket = nb::cast<CopyTicket>(Method(method)(Address(destination), Address(source), bytes));
    });
    if (!status.ok()) return status;
    return ticket;
  }
};

}  // namespace

void BindDevice(nb::module_& module) {
  nb::class_<Device, PythonDevice>(module, "Device", nb::is_weak_referenceable(),
                                   "A place that tensors live in; a test's stand-in derives from "
                                   "it.")
      .def(nb::init<>())
      .def("name", &Device::name)
      .def(
          "order_after",
          [](Device& device, uintptr_t stream) {
            ThrowIfError(device.OrderAfter(Pointer<void>(stream)));
          },
          nb::arg("stream"), "Later copies come after what the stream has queued so far.");
  module.def(
      "cuda_device", [](int ordinal) { return ValueOrThrow(CudaDevice(ordinal)); },
      nb::arg("ordinal"), nb::rv_policy::reference,
      "The CUDA device, kept for the life of the process.");
  module.def(
      "hip_device", [](int ordinal) { return ValueOrThrow(HipDevice(ordinal)); },
      nb::arg("ordinal"), nb::rv_policy::reference,
      "The HIP device, kept for the life of the process.");
}

}  // namespace holdfast::python
