// Memory that this process can allocate without waking the OOM killer.
#ifndef HOLDFAST_RUNTIME_STAGING_MEMORY_ROOM_H_
#define HOLDFAST_RUNTIME_STAGING_MEMORY_ROOM_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace holdfast::staging {

/// The least of MemAvailable and the room in the control groups (version 1 or 2) above this
/// process.
struct MemoryRoom {
  uint64_t bytes = UINT64_MAX;  ///< UINT64_MAX where no limit could be read.
  std::string limit;  ///< Source of the limit: "MemAvailable" or the control group's file.
};
MemoryRoom FindMemoryRoom();

/// \error kResourceExhausted when `bytes` more would leave next to no memory: the kernel does not
/// refuse shared memory in time, the OOM killer ends a process.
absl::Status CheckMemoryRoom(uint64_t bytes);

}  // namespace holdfast::staging

#endif  // HOLDFAST_RUNTIME_STAGING_MEMORY_ROOM_H_
