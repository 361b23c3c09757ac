#include "runtime/checkpointer/options.h"

#include <cstdint>
#include <iterator>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "holdfast/checkpointer.h"
#include "io_uring/transfer.h"
#include "runtime/format/directory_names.h"
#include "runtime/format/text.h"

namespace holdfast {
namespace {

// ".partial-" and 32 hex digits are appended; the whole must stay below NAME_MAX.
constexpr size_t kNameMax = kNameBytes - 1 - 9 - 32;

struct Range {
  const char* option;
  int64_t value;
  int64_t least;
  int64_t most;
};

absl::Status Refuse(const char* option, const absl::AlphaNum& value,
                    const absl::AlphaNum& allowed) {
  return absl::InvalidArgumentError(
      absl::StrCat("option ", option, " = ", value, ": must be ", allowed));
}

}  // namespace

absl::Status ValidateOptions(const CheckpointerOptions& options) {
  if (options.directory.empty())
    return Refuse("directory", "\"\"", "the path of an existing directory");
  if (options.staging.arena_bytes < kArenaBytesMin) {
    return Refuse("staging.arena_bytes", options.staging.arena_bytes,
                  absl::StrCat("at least ", kArenaBytesMin, " (four chunks)"));
  }
  const Qos& qos = options.qos;
  const Range ranges[] = {{"world_size", options.world_size, 1, 99999},
                          {"queue_depth", options.queue_depth, 1, io::kDepthMax},
                          {"pwrite_threads", options.pwrite_threads, 1, io::kPwriteThreadsMax},
                          {"qos.nice", qos.nice, 0, 19},
                          {"qos.io_priority_class", qos.io_priority_class, 0, 3},
                          {"qos.io_priority_level", qos.io_priority_level, 0, 7},
                          {"qos.cpu_count", qos.cpu_count, 0, std::ssize(qos.cpus)}};
  for (const Range& range : ranges) {
    if (range.value >= range.least && range.value <= range.most) continue;
    return Refuse(range.option, range.value, absl::StrCat(range.least, " to ", range.most));
  }
  if (options.rank >= options.world_size)
    return Refuse("rank", options.rank, "less than world_size");
  const std::pair<const char*, absl::Duration> times[] = {
      {"time_memory_max", options.time_memory_max},
      {"time_stalled_max", options.time_stalled_max},
      {"time_ranks_max", options.time_ranks_max},
      {"time_liveness_max", options.time_liveness_max}};
  for (const auto& [option, time] : times) {
    if (time <= absl::ZeroDuration()) return Refuse(option, absl::FormatDuration(time), "positive");
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

CheckpointerOptions WithShared(CheckpointerOptions options, const CheckpointerOptions& core) {
  options.staging = core.staging;
  options.launcher = core.launcher;
  options.worker_program = core.worker_program;
  options.fused_copy = core.fused_copy;
  options.second_look = core.second_look;
  options.time_memory_max = core.time_memory_max;
  options.time_stalled_max = core.time_stalled_max;
  options.on_sealed = core.on_sealed;
  return options;
}

}  // namespace checkpointer
}  // namespace holdfast
