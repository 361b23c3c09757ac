// Adapts a device's registration of the arena to the staging pool.
#ifndef HOLDFAST_RUNTIME_CHECKPOINTER_DEVICE_REGISTRANT_H_
#define HOLDFAST_RUNTIME_CHECKPOINTER_DEVICE_REGISTRANT_H_

#include "holdfast/device.h"
#include "runtime/staging/arena.h"
#include "runtime/staging/staging_pool.h"

namespace holdfast::checkpointer {

class DeviceRegistrant : public staging::Registrant {
 public:
  DeviceRegistrant(Device* device, staging::Arena* arena) : device_(device), arena_(arena) {}

  absl::Status DropRegistration() override {
    const absl::Status dropped = device_->UnregisterMemory(arena_->base(), arena_->bytes());
    registered_ = !dropped.ok();
    return dropped;
  }
  absl::Status RestoreRegistration() override {
    const absl::Status restored = device_->RegisterMemory(arena_->base(), arena_->bytes());
    registered_ = registered_ || restored.ok();
    return restored;
  }

  /// Drops the registration at the end of the arena. Returns false when the device refuses.
  bool Close() { return !registered_ || DropRegistration().ok(); }

 private:
  Device* device_;
  staging::Arena* arena_;
  bool registered_ = false;
};

}  // namespace holdfast::checkpointer

#endif  // HOLDFAST_RUNTIME_CHECKPOINTER_DEVICE_REGISTRANT_H_
