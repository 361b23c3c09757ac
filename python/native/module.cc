// holdfast._native: the C++ library's public interface for the Python package, and nothing more.
#include <nanobind/nanobind.h>

#include <cstdlib>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "bindings.h"
#include "holdfast/checkpointer.h"
#include "holdfast/load.h"
#include "holdfast/pod.h"
#include "holdfast/version.h"

namespace {

/// Python code cannot see the status that sys.exit was given; the handlers of the C library can.
/// glibc lets such a handler call exit again: the remaining handlers run, with the new status.
bool FailAtExit() {
  return on_exit(
             [](int status, void*) {
               if (status == 0) std::exit(1);
             },
             nullptr) == 0;
}

}  // namespace

NB_MODULE(_native, module) {
  // At exit the frames of threads may still hold handles; the module leaks nothing then.
  nanobind::set_leak_warnings(false);
  module.doc() =
      "The C++ runtime of holdfast. Use the package; this module has no stable interface.";
  holdfast::python::BindCallbacks();
  holdfast::python::BindDevice(module);
  holdfast::python::BindPlan(module);
  holdfast::python::BindTensors(module);
  holdfast::python::BindCheckpointer(module);
  holdfast::python::BindLoad(module);
  holdfast::python::BindRanks(module);
  holdfast::python::BindRecovery(module);
  holdfast::python::BindVerify(module);
  holdfast::python::BindWatch(module);
  module.def("fail_at_exit", &FailAtExit,
             "Makes the exit status 1 where it would be 0; returns whether the system allows it.");
  // Constants and defaults of the public headers that the package computes with.
  module.attr("CHUNK_BYTES") = holdfast::kChunkBytes;
  module.attr("LOAD_BUFFER_BYTES") = holdfast::LoadOptions{}.buffer_bytes;
  const holdfast::CheckpointerOptions options;
  module.attr("TIME_LIVENESS_MAX") = absl::ToDoubleSeconds(options.time_liveness_max);
  module.attr("TIME_RANKS_MAX") = absl::ToDoubleSeconds(options.time_ranks_max);
  const absl::string_view version = holdfast::Version();
  module.attr("__version__") = nanobind::str(version.data(), version.size());
}
