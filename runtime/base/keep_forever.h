// Objects that may still be used by a thread or a device that cannot be stopped.
#ifndef HOLDFAST_RUNTIME_BASE_KEEP_FOREVER_H_
#define HOLDFAST_RUNTIME_BASE_KEEP_FOREVER_H_

#include <memory>

namespace holdfast::base {

/// Keeps `object` until the process ends. Reachable, so that a leak checker does not take it for a
/// mistake.
void KeepForever(std::shared_ptr<const void> object);

}  // namespace holdfast::base

#endif  // HOLDFAST_RUNTIME_BASE_KEEP_FOREVER_H_
