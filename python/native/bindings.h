// The parts of the extension module, one per public header.
#ifndef HOLDFAST_PYTHON_NATIVE_BINDINGS_H_
#define HOLDFAST_PYTHON_NATIVE_BINDINGS_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "holdfast/pod.h"

namespace holdfast::python {

void BindDevice(nanobind::module_& module);
void BindPlan(nanobind::module_& module);
void BindCheckpointer(nanobind::module_& module);
void BindLoad(nanobind::module_& module);
void BindRecovery(nanobind::module_& module);
void BindVerify(nanobind::module_& module);

/// Addresses cross as integers: a tensor is never seen here, only where its bytes lie.
template <typename T = void>
T* Pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);  // NOLINT(performance-no-int-to-ptr)
}

/// 32 lower-case hex digits, the text form of an attempt id; empty for none.
std::string AttemptText(const AttemptId& attempt);
/// \throws holdfast.Error for anything but 32 hex digits or "".
AttemptId AttemptOf(const std::string& text);

/// The value that a word of pod.h stands for.
/// \throws holdfast.Error naming the option and what there is.
Launcher LauncherOf(const std::string& word);
EngineRung EngineOf(const std::string& word);
PageRung PagesOf(const std::string& word);

}  // namespace holdfast::python

#endif  // HOLDFAST_PYTHON_NATIVE_BINDINGS_H_
