// How much memory this process could take now without being killed for it.
#ifndef HOLDFAST_RUNTIME_STAGING_MEMORY_ROOM_H_
#define HOLDFAST_RUNTIME_STAGING_MEMORY_ROOM_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace holdfast::staging {

/// The tightest of what the machine has available (MemAvailable) and what the control groups above
/// this process (version 1 or 2) still allow.
struct MemoryRoom {
  uint64_t bytes = UINT64_MAX;  ///< UINT64_MAX where nothing could be read.
  std::string limit;            ///< What sets it: "MemAvailable", or the control group's file.
};
MemoryRoom FindMemoryRoom();

/// \error kResourceExhausted when taking `bytes` more would leave next to nothing: shared memory is
/// not refused by the kernel in time, it is answered by the OOM killer.
absl::Status CheckMemoryRoom(uint64_t bytes);

}  // namespace holdfast::staging

#endif  // HOLDFAST_RUNTIME_STAGING_MEMORY_ROOM_H_
