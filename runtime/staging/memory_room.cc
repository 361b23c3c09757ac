// Sources: proc(5) for MemAvailable; the kernel's admin-guide/cgroup-v2.rst and
// cgroup-v1/memory.rst for the files of a control group.
#include "runtime/staging/memory_room.h"

#include <algorithm>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "holdfast/staging.h"
#include "runtime/sys/text_file.h"

namespace holdfast::staging {
namespace {

// Reserve for other processes, page tables and rings. MemAvailable is an estimate.
constexpr uint64_t kReserveBytes = uint64_t{64} << 20;

// Limits from here up mean "none": version 1 reports 2^63 rounded down to a page.
constexpr uint64_t kNoLimit = uint64_t{1} << 62;

constexpr size_t kFileBytesMax = 64 * 1024;

std::optional<std::string> ReadFile(const std::string& path) {
  std::string text(kFileBytesMax, '\0');
  const ssize_t length = sys::ReadTextFile(path.c_str(), text.data(), text.size());
  if (length < 0) return std::nullopt;
  text.resize(static_cast<size_t>(length));
  return text;
}

std::optional<uint64_t> ReadNumber(const std::string& path) {
  const std::optional<std::string> text = ReadFile(path);
  uint64_t value = 0;
  if (!text.has_value() || !absl::SimpleAtoi(*text, &value)) return std::nullopt;
  return value;  // "max" is no limit.
}

struct GroupFiles {
  const char* limit;
  const char* used;
  const char* reclaimable;  // in memory.stat: file pages, reclaimed first
};
constexpr GroupFiles kVersion2 = {"memory.max", "memory.current", "inactive_file"};
constexpr GroupFiles kVersion1 = {"memory.limit_in_bytes", "memory.usage_in_bytes",
                                  "total_inactive_file"};

// Every group from `path` up to the root limits. Inside a container the path may be the host's
// while the mount shows the container's group as its root: missing levels are skipped.
void LowerByGroups(const std::string& mount, absl::string_view path, const GroupFiles& files,
                   MemoryRoom* room) {
  while (true) {
    while (absl::EndsWith(path, "/")) path.remove_suffix(1);
    const std::string group = absl::StrCat(mount, path, "/");
    const std::optional<uint64_t> limit = ReadNumber(group + files.limit);
    const std::optional<uint64_t> used = ReadNumber(group + files.used);
    if (limit.has_value() && *limit < kNoLimit && used.has_value()) {
      const std::optional<std::string> stat = ReadFile(group + "memory.stat");
      const uint64_t reclaimable =
          stat.has_value() ? sys::FindBytes(stat->c_str(), files.reclaimable) : 0;
      const uint64_t busy = *used - std::min(*used, reclaimable);
      const uint64_t left = *limit - std::min(*limit, busy);
      if (left < room->bytes) *room = {.bytes = left, .limit = group + files.limit};
    }
    if (path.empty()) return;
    const size_t slash = path.rfind('/');
    path = slash == absl::string_view::npos ? absl::string_view() : path.substr(0, slash);
  }
}

std::string MiB(uint64_t bytes) { return absl::StrCat(bytes >> 20, " MiB"); }

}  // namespace

MemoryRoom FindMemoryRoom() {
  MemoryRoom room;
  if (const std::optional<std::string> info = ReadFile("/proc/meminfo"); info.has_value()) {
    const uint64_t bytes = sys::FindBytes(info->c_str(), "MemAvailable", room.bytes);
    if (bytes != room.bytes) room = {.bytes = bytes, .limit = "MemAvailable in /proc/meminfo"};
  }
  const std::string groups = ReadFile("/proc/self/cgroup").value_or("");
  for (const absl::string_view line : absl::StrSplit(groups, '\n', absl::SkipEmpty())) {
    // "hierarchy:controllers:path"; version 2 has no controllers there.
    const std::vector<absl::string_view> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    if (fields[1].empty()) {
      LowerByGroups("/sys/fs/cgroup", fields[2], kVersion2, &room);
      continue;
    }
    for (const absl::string_view controller : absl::StrSplit(fields[1], ',')) {
      if (controller == "memory")
        LowerByGroups("/sys/fs/cgroup/memory", fields[2], kVersion1, &room);
    }
  }
  return room;
}

absl::Status CheckMemoryRoom(uint64_t bytes) {
  const MemoryRoom room = FindMemoryRoom();
  if (room.bytes >= kReserveBytes && room.bytes - kReserveBytes >= bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "take ", MiB(bytes), " of staging memory: only ", MiB(room.bytes), " are left (", room.limit,
      "), of which ", MiB(kReserveBytes),
      " stay free; lower StagingOptions::arena_bytes (saves that are larger stream through it) or "
      "raise the limit"));
}

}  // namespace holdfast::staging

namespace holdfast {

uint64_t MemoryAvailable() { return staging::FindMemoryRoom().bytes; }

uint64_t DefaultArenaBytes(const ArenaNeed& need) {
  // The alignment of every file, and the first chunks of the next save.
  constexpr uint64_t kSlack = uint64_t{64} << 20;
  constexpr uint64_t kShare = 4;
  constexpr uint64_t kGranule = uint64_t{2} << 20;  // a huge page
  const uint64_t available = MemoryAvailable();
  const uint64_t room = std::max(available, available + need.bytes_owned);  // no overflow
  const uint64_t most = room / kShare / std::max(1u, need.processes);
  const uint64_t wanted = std::max(need.state_bytes, need.state_bytes + kSlack);
  return std::max(kArenaBytesMin, std::min(wanted, most) / kGranule * kGranule);
}

}  // namespace holdfast
