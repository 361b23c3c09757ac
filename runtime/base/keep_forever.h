// Keeps objects that an unstoppable thread or device may still use.
#ifndef HOLDFAST_RUNTIME_BASE_KEEP_FOREVER_H_
#define HOLDFAST_RUNTIME_BASE_KEEP_FOREVER_H_

#include <memory>

namespace holdfast::base {

/// Keeps `object` until the process ends. Reachable, so that a leak checker reports no leak.
void KeepForever(std::shared_ptr<const void> object);

}  // namespace holdfast::base

#endif  // HOLDFAST_RUNTIME_BASE_KEEP_FOREVER_H_
