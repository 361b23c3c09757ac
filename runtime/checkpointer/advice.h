// What to change, from what the probe has found.
#ifndef HOLDFAST_RUNTIME_CHECKPOINTER_ADVICE_H_
#define HOLDFAST_RUNTIME_CHECKPOINTER_ADVICE_H_

#include <string>
#include <vector>

#include "holdfast/probe.h"

namespace holdfast::checkpointer {

/// Most useful first: what does not work, then what costs safety, then what costs speed.
/// `local`: see FileSystem. `worker_why`: why the worker program was not found.
std::vector<std::string> Advise(const ProbeReport& report, bool local,
                                const std::string& worker_why);

}  // namespace holdfast::checkpointer

#endif  // HOLDFAST_RUNTIME_CHECKPOINTER_ADVICE_H_
