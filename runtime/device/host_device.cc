// The host as a device: copies are plain memory copies, done when the call returns.
#include <cstring>

#include "holdfast/device.h"

namespace holdfast {
namespace {

class Host final : public Device {
 public:
  std::string name() const override { return "host"; }
  bool is_host() const override { return true; }

  // The CPU reaches the arena without registration.
  absl::Status RegisterMemory(void*, size_t) override { return absl::OkStatus(); }
  absl::Status UnregisterMemory(void*, size_t) override { return absl::OkStatus(); }

  // The host has no streams: the caller's work and the copies are done on return.
  absl::Status OrderAfter(StreamHandle) override { return absl::OkStatus(); }
  absl::Status MakeStreamWait(StreamHandle) override { return absl::OkStatus(); }

  absl::StatusOr<CopyTicket> CopyToHost(void* destination, const void* source,
                                        size_t bytes) override {
    return Copy(destination, source, bytes);
  }
  absl::StatusOr<CopyTicket> CopyFromHost(void* destination, const void* source,
                                          size_t bytes) override {
    return Copy(destination, source, bytes);
  }

  absl::StatusOr<bool> IsDone(CopyTicket ticket) override {
    if (ticket != kDone) return absl::InvalidArgumentError("host: no such copy ticket");
    return true;
  }
  absl::Status Wait(CopyTicket ticket, absl::Duration) override { return IsDone(ticket).status(); }

 private:
  static constexpr CopyTicket kDone = 0;

  static absl::StatusOr<CopyTicket> Copy(void* destination, const void* source, size_t bytes) {
    if (bytes == 0) return kDone;  // An empty tensor may have no address at all.
    if (destination == nullptr || source == nullptr) {
      return absl::InvalidArgumentError("host: copy from or to a null pointer");
    }
    std::memcpy(destination, source, bytes);
    return kDone;
  }
};

}  // namespace

Device* HostDevice() {
  // Never destroyed: the device outlives every static that uses it.
  static Host* const host = new Host;
  return host;
}

}  // namespace holdfast
