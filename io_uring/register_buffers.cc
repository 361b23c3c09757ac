// Registers the staging region with a ring, so that its pages are pinned once and not per request.
#include <linux/capability.h>
#include <sys/resource.h>

#include <cerrno>

#include "io_uring/uring_engine.h"
#include "runtime/sys/assert.h"
#include "runtime/sys/system.h"

namespace holdfast::io {
namespace {

// Registered memory is charged to RLIMIT_MEMLOCK unless the process has CAP_IPC_LOCK
// (io_uring_register(2)). The kernel pins all pages before the check (some 30 ms per GiB), so a
// region over the limit is not tried. The kernel may still refuse: other users of the limit count
// too.
bool ExceedsLockLimit(uint64_t region_bytes, uint64_t* limit) {
  struct rlimit locked = {};
  if (sys::Sys().getrlimit(RLIMIT_MEMLOCK, &locked) != 0) return false;
  *limit = locked.rlim_cur;
  if (locked.rlim_cur == RLIM_INFINITY || region_bytes <= locked.rlim_cur) return false;
  struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
  struct __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3] = {};
  if (sys::Sys().capget(&header, data) != 0) return false;
  return (data[0].effective & 1u << CAP_IPC_LOCK) == 0;
}

}  // namespace

int UringEngine::Register(void* region, size_t region_bytes, Text* why) {
  HOLDFAST_ASSERT(registered_bytes_ == 0);
  const uint64_t count = (region_bytes + kRegisteredBufferBytes - 1) / kRegisteredBufferBytes;
  if (region == nullptr || count == 0) {
    why->Add("no region to register");
    return EINVAL;
  }
  if (count > kBuffersMax) {
    why->Add("region of more than ").Add(kBuffersMax).Add(" GiB not registered");
    return E2BIG;
  }
  uint64_t limit = 0;
  int error = ExceedsLockLimit(region_bytes, &limit) ? ENOMEM : 0;
  if (error == 0) {
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t first = i * kRegisteredBufferBytes;
      HOLDFAST_ASSERT(first < region_bytes);
      const uint64_t left = region_bytes - first;
      buffers_[i] = {.iov_base = static_cast<char*>(region) + first,
                     .iov_len = left < kRegisteredBufferBytes ? left : kRegisteredBufferBytes};
    }
    error = -sys::Sys().uring_register_buffers(&ring_, buffers_, static_cast<unsigned>(count));
  }
  if (error != 0) {
    why->Add("buffers not registered: ").AddError(error);
    if (error == ENOMEM) why->Add(" (locked memory limit ").Add(limit).Add(" bytes)");
    return error;
  }
  registered_ = reinterpret_cast<uintptr_t>(region);
  registered_bytes_ = region_bytes;
  return 0;
}

}  // namespace holdfast::io
