#include "status.h"

#include <nanobind/stl/string.h>

#include <cmath>
#include <string>

#include "absl/status/status.h"
#include "holdfast/errors.h"
#include "names.h"

namespace nb = nanobind;

namespace holdfast::python {

void Raise(const absl::Status& status) {
  const nb::object make = nb::module_::import_("holdfast.errors").attr("_of_status");
  const nb::object error =
      make(static_cast<int>(status.code()), Message{std::string(status.message())}, ErrnoOf(status),
           IsTimeOut(status));
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

absl::Duration ToDuration(std::optional<double> seconds) {
  if (!seconds.has_value() || std::isinf(*seconds)) return absl::InfiniteDuration();
  return absl::Seconds(*seconds);
}

}  // namespace holdfast::python
