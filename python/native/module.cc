// holdfast._native: the C++ library's public interface for the Python package, and nothing more.
#include <nanobind/nanobind.h>

#include <cstdlib>

#include "bindings.h"

NB_MODULE(_native, module) {
  // At exit the frames of threads may still hold handles; the module leaks nothing then.
  nanobind::set_leak_warnings(false);
  module.doc() =
      "The C++ runtime of holdfast. Use the package; this module has no stable interface.";
  holdfast::python::BindDevice(module);
  holdfast::python::BindPlan(module);
  holdfast::python::BindCheckpointer(module);
  holdfast::python::BindLoad(module);
  holdfast::python::BindRecovery(module);
  holdfast::python::BindVerify(module);
  module.def(
      "fail_at_exit", [] { return Py_AtExit([] { std::exit(1); }) == 0; },
      "Makes 1 the exit status once the interpreter has ended; whether it could.");
  module.attr("__version__") = HOLDFAST_VERSION;
}
