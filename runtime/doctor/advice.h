// Advice derived from the findings of the probe.
#ifndef HOLDFAST_RUNTIME_DOCTOR_ADVICE_H_
#define HOLDFAST_RUNTIME_DOCTOR_ADVICE_H_

#include <string>
#include <vector>

#include "holdfast/probe.h"

namespace holdfast::doctor {

/// Returns advice, the most useful first: missing features, then lost safety, then lost speed.
/// `local`: see FileSystem. `worker_why`: why the worker program was not found.
std::vector<std::string> Advise(const ProbeReport& report, bool local,
                                const std::string& worker_why);

}  // namespace holdfast::doctor

#endif  // HOLDFAST_RUNTIME_DOCTOR_ADVICE_H_
