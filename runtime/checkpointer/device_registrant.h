// Adapts a device's registration of the arena to the staging pool.
#ifndef HOLDFAST_RUNTIME_CHECKPOINTER_DEVICE_REGISTRANT_H_
#define HOLDFAST_RUNTIME_CHECKPOINTER_DEVICE_REGISTRANT_H_

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "holdfast/device.h"
#include "runtime/base/mutex.h"
#include "runtime/base/status.h"
#include "runtime/staging/arena.h"
#include "runtime/staging/staging_pool.h"

namespace holdfast::checkpointer {

/// A device that refuses the registration still copies, slower: a refusal fails no save.
class DeviceRegistrant : public staging::Registrant {
 public:
  DeviceRegistrant(Device* device, staging::Arena* arena) : device_(device), arena_(arena) {}

  absl::Status DropRegistration() override {
    if (!registered_) return absl::OkStatus();
    const absl::Status dropped = device_->UnregisterMemory(arena_->base(), arena_->bytes());
    registered_ = !dropped.ok();
    return dropped;
  }
  absl::Status RestoreRegistration() override {
    const absl::Status restored = device_->RegisterMemory(arena_->base(), arena_->bytes());
    registered_ = registered_ || restored.ok();
    const base::MutexLock lock(&mutex_);
    refusal_ = base::Annotate(restored, absl::StrCat("register with ", device_->name()));
    return absl::OkStatus();
  }

  /// Returns why the last registration failed, or OK. \threadsafety Any thread.
  absl::Status refusal() {
    const base::MutexLock lock(&mutex_);
    return refusal_;
  }

  /// Drops the registration at the end of the arena. Returns false when the device refuses.
  bool Close() { return !registered_ || DropRegistration().ok(); }

 private:
  Device* device_;
  staging::Arena* arena_;
  bool registered_ = false;
  base::Mutex mutex_;
  absl::Status refusal_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace holdfast::checkpointer

#endif  // HOLDFAST_RUNTIME_CHECKPOINTER_DEVICE_REGISTRANT_H_
