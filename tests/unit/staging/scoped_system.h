// Replaces entries of the table of system calls until the end of a test.
#ifndef HOLDFAST_TESTS_UNIT_STAGING_SCOPED_SYSTEM_H_
#define HOLDFAST_TESTS_UNIT_STAGING_SCOPED_SYSTEM_H_

#include "runtime/sys/system.h"

namespace holdfast::staging {

class ScopedSystem {
 public:
  ScopedSystem() : before_(sys::g_system) {}
  ~ScopedSystem() { sys::g_system = before_; }
  ScopedSystem(const ScopedSystem&) = delete;
  ScopedSystem& operator=(const ScopedSystem&) = delete;
  sys::SystemCalls* operator->() { return &sys::g_system; }

 private:
  sys::SystemCalls before_;
};

}  // namespace holdfast::staging

#endif  // HOLDFAST_TESTS_UNIT_STAGING_SCOPED_SYSTEM_H_
