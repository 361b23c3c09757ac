// holdfast._native: the C++ library's public interface for the Python package, and nothing more.
#include <nanobind/nanobind.h>

#include "bindings.h"

NB_MODULE(_native, module) {
  module.doc() =
      "The C++ runtime of holdfast. Use the package; this module has no stable interface.";
  holdfast::python::BindDevice(module);
  holdfast::python::BindPlan(module);
  holdfast::python::BindCheckpointer(module);
  holdfast::python::BindLoad(module);
  holdfast::python::BindRecovery(module);
  holdfast::python::BindVerify(module);
  module.attr("__version__") = HOLDFAST_VERSION;
}
