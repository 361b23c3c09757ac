// The parts of the extension module, one per public header.
#ifndef HOLDFAST_PYTHON_NATIVE_BINDINGS_H_
#define HOLDFAST_PYTHON_NATIVE_BINDINGS_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "holdfast/pod.h"

namespace holdfast::python {

/// The handler of atexit that ends calls into Python, see callback.h.
void BindCallbacks();
void BindDevice(nanobind::module_& module);
void BindPlan(nanobind::module_& module);
void BindTensors(nanobind::module_& module);
void BindCheckpointer(nanobind::module_& module);
void BindLoad(nanobind::module_& module);
void BindRanks(nanobind::module_& module);
void BindRecovery(nanobind::module_& module);
void BindVerify(nanobind::module_& module);
void BindWatch(nanobind::module_& module);

/// Addresses cross as integers: the module handles only the addresses of tensor bytes.
template <typename T = void>
T* Pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);  // NOLINT(performance-no-int-to-ptr)
}

/// Returns the text form of an attempt id: 32 lower-case hex digits; empty for the null id.
std::string AttemptText(const AttemptId& attempt);
/// \throws holdfast.Error for anything but 32 hex digits or "".
AttemptId AttemptOf(const std::string& text);

/// Return the value of a word of pod.h.
/// \throws holdfast.Error naming the option and the valid words.
Launcher LauncherOf(const std::string& word);
EngineRung EngineOf(const std::string& word);
PageRung PagesOf(const std::string& word);

}  // namespace holdfast::python

#endif  // HOLDFAST_PYTHON_NATIVE_BINDINGS_H_
