#include "runtime/checkpointer/options.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "runtime/format/directory_names.h"
#include "runtime/format/text.h"

namespace holdfast {
namespace {

// ".partial-" and 32 hex digits are appended; the whole must stay below NAME_MAX.
constexpr size_t kNameMax = kNameBytes - 1 - 9 - 32;
constexpr uint64_t kArenaMin = 4ull * kChunkBytes;
constexpr uint32_t kDepthMax = 64;
constexpr uint32_t kPwriteThreadsMax = 16;
constexpr int kNiceMax = 19;
constexpr int kIoPriorityClassMax = 3;
constexpr int kIoPriorityLevelMax = 7;

template <typename Value>
absl::Status Refuse(const char* option, const Value& value, const char* allowed) {
  return absl::InvalidArgumentError(
      absl::StrCat("option ", option, " = ", value, ": must be ", allowed));
}

}  // namespace

absl::Status ValidateOptions(const CheckpointerOptions& options) {
  if (options.directory.empty())
    return Refuse("directory", "\"\"", "the path of an existing directory");
  if (options.staging.arena_bytes < kArenaMin) {
    return Refuse("staging.arena_bytes", options.staging.arena_bytes,
                  "at least 16777216 (four chunks)");
  }
  if (options.world_size == 0) return Refuse("world_size", options.world_size, "at least 1");
  if (options.rank >= options.world_size)
    return Refuse("rank", options.rank, "less than world_size");
  if (options.world_size > 99999) return Refuse("world_size", options.world_size, "at most 99999");
  if (options.queue_depth == 0 || options.queue_depth > kDepthMax) {
    return Refuse("queue_depth", options.queue_depth, "1 to 64");
  }
  if (options.pwrite_threads == 0 || options.pwrite_threads > kPwriteThreadsMax) {
    return Refuse("pwrite_threads", options.pwrite_threads, "1 to 16");
  }
  const Qos& qos = options.qos;
  if (qos.nice < 0 || qos.nice > kNiceMax) return Refuse("qos.nice", qos.nice, "0 to 19");
  if (qos.io_priority_class < 0 || qos.io_priority_class > kIoPriorityClassMax) {
    return Refuse("qos.io_priority_class", qos.io_priority_class, "0 (none) to 3 (idle)");
  }
  if (qos.io_priority_level < 0 || qos.io_priority_level > kIoPriorityLevelMax) {
    return Refuse("qos.io_priority_level", qos.io_priority_level, "0 to 7");
  }
  if (qos.cpu_count > sizeof(qos.cpus) / sizeof(qos.cpus[0]))
    return Refuse("qos.cpu_count", qos.cpu_count, "at most 64");
  if (options.time_memory_max <= absl::ZeroDuration()) {
    return Refuse("time_memory_max", absl::FormatDuration(options.time_memory_max), "positive");
  }
  if (options.time_stalled_max <= absl::ZeroDuration()) {
    return Refuse("time_stalled_max", absl::FormatDuration(options.time_stalled_max), "positive");
  }
  if (options.time_ranks_max <= absl::ZeroDuration()) {
    return Refuse("time_ranks_max", absl::FormatDuration(options.time_ranks_max), "positive");
  }
  if (options.time_liveness_max <= absl::ZeroDuration()) {
    return Refuse("time_liveness_max", absl::FormatDuration(options.time_liveness_max), "positive");
  }
  if (options.staging.idle_trim < absl::ZeroDuration()) {
    return Refuse("staging.idle_trim", absl::FormatDuration(options.staging.idle_trim),
                  "not negative");
  }
  return absl::OkStatus();
}

namespace checkpointer {

absl::Status ValidateName(const std::string& name) {
  const auto refuse = [&name](const char* why) {
    return absl::InvalidArgumentError(absl::StrCat("checkpoint name \"", name, "\": ", why));
  };
  if (name.empty()) return refuse("is empty");
  if (name == "." || name == "..") return refuse("is not the name of a directory of its own");
  if (name.find('/') != std::string::npos)
    return refuse("has a '/': it must be one path component");
  if (name.find('\0') != std::string::npos) return refuse("has a zero byte");
  if (!format::IsUtf8(name)) return refuse("is not UTF-8, as its manifest must be");
  if (name.size() > kNameMax) return refuse("is longer than 214 bytes");
  if (format::ParseDirectoryName(name).kind != format::DirectoryKind::kFinal) {
    return refuse("looks like the name of a partial checkpoint");
  }
  return absl::OkStatus();
}

}  // namespace checkpointer
}  // namespace holdfast
