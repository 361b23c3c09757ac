#include "callback.h"

#include <pthread.h>

#include <atomic>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "bindings.h"
#include "status.h"

namespace nb = nanobind;

namespace holdfast::python {
namespace {

// A call that lasts longer is one that hangs.
constexpr absl::Duration kTimeCallsMax = absl::Seconds(10);

std::atomic<bool> g_ending{false};
std::atomic<int> g_calls{0};

/// Counts the call before it looks: `EndCalls` waits for every call that has not seen the end.
bool Enter() {
  ++g_calls;
  if (!g_ending) return true;
  --g_calls;
  return false;
}

/// Refuses calls from here on, and waits for those in progress. Modules are torn down afterwards.
void EndCalls() {
  g_ending = true;
  const GilReleased released;
  const absl::Time deadline = absl::Now() + kTimeCallsMax;
  while (g_calls > 0 && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
}

}  // namespace

Callback::Callback() : may_(Enter()) {
  if (may_) gil_ = PyGILState_Ensure();
}

Callback::~Callback() {
  if (!may_) return;
  PyGILState_Release(gil_);
  --g_calls;
}

void BindCallbacks() {
  // The threads of the parent, and their calls, are not there in a forked child.
  pthread_atfork(nullptr, nullptr, [] { g_calls = 0; });
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&EndCalls));
}

}  // namespace holdfast::python
