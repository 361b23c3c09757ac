// Calls into Python from threads of the runtime, until the interpreter's end.
#ifndef HOLDFAST_PYTHON_NATIVE_CALLBACK_H_
#define HOLDFAST_PYTHON_NATIVE_CALLBACK_H_

#include <nanobind/nanobind.h>

namespace holdfast::python {

/// Holds the GIL while it lives, for a call into Python; tests false when the interpreter is
/// ending, and then holds nothing. A thread that is in such a call when the interpreter is
/// finalized is unwound by pthread_exit, which aborts the process: so the end waits for it.
class Callback {
 public:
  Callback();
  ~Callback();
  Callback(const Callback&) = delete;
  Callback& operator=(const Callback&) = delete;

  explicit operator bool() const { return may_; }

 private:
  const bool may_;
  PyGILState_STATE gil_;
};

}  // namespace holdfast::python

#endif  // HOLDFAST_PYTHON_NATIVE_CALLBACK_H_
