// Errors of the library as Python exceptions, calls without the GIL, and waits that Ctrl-C ends.
#ifndef HOLDFAST_PYTHON_NATIVE_STATUS_H_
#define HOLDFAST_PYTHON_NATIVE_STATUS_H_

#include <nanobind/nanobind.h>

#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "holdfast/errors.h"
#include "python/native/restore_thread.h"

namespace holdfast::python {

/// Raises holdfast.Error with code, message and errno. The GIL must be held.
[[noreturn]] void Raise(const absl::Status& status);

inline void ThrowIfError(const absl::Status& status) {
  if (!status.ok()) Raise(status);
}

template <typename T>
T ValueOrThrow(absl::StatusOr<T> value) {
  if (!value.ok()) Raise(value.status());
  return *std::move(value);
}

/// Converts Python's seconds; None or infinity becomes an infinite duration.
absl::Duration ToDuration(std::optional<double> seconds);

/// Releases the GIL, as nanobind::gil_scoped_release does, for any thread at any time. Before
/// CPython 3.14 a thread that takes the GIL while the interpreter is finalized is unwound by
/// pthread_exit: in a destructor, or through nanobind's noexcept frames, that aborts the process,
/// and the C++ library of a wheel does not know the C library's unwinding. Here such a thread
/// stops, until the process has ended.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() { RestoreThreadOrStop(state_); }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* const state_;
};

/// Calls `call` without the GIL, for calls that are slow or wait for a thread that needs the GIL.
template <typename Call>
auto WithoutGil(Call call) {
  const GilReleased released;
  return call();
}

/// Calls `wait(slice)` without the GIL, in slices. Returns when `wait` returns a status that is no
/// time-out, or when `timeout` has passed. Handles signals between slices, so that Ctrl-C ends the
/// wait.
template <typename Wait>
auto WaitInterruptibly(absl::Duration timeout, Wait wait) {
  constexpr absl::Duration kSlice = absl::Milliseconds(100);
  while (true) {
    const absl::Duration slice = timeout < kSlice ? timeout : kSlice;
    auto result = WithoutGil([&] { return wait(slice); });
    absl::Status status;
    if constexpr (std::is_same_v<decltype(result), absl::Status>) {
      status = result;
    } else {
      status = result.status();
    }
    timeout -= slice;
    if (!IsTimeOut(status) || timeout <= absl::ZeroDuration()) return result;
    if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
  }
}

}  // namespace holdfast::python

#endif  // HOLDFAST_PYTHON_NATIVE_STATUS_H_
