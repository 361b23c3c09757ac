#include "runtime/base/keep_forever.h"

#include <utility>
#include <vector>

#include "runtime/base/mutex.h"

namespace holdfast::base {

void KeepForever(std::shared_ptr<const void> object) {
  static Mutex mutex;
  static auto* const kept = new std::vector<std::shared_ptr<const void>>;
  const MutexLock lock(&mutex);
  kept->push_back(std::move(object));
}

}  // namespace holdfast::base
