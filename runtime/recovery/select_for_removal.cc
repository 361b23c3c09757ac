// Selects the checkpoints that retention removes.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "holdfast/recovery.h"
#include "runtime/directory/listing.h"
#include "runtime/format/directory_names.h"

namespace holdfast {

std::vector<std::string> SelectForRemoval(
    const std::vector<CheckpointInfo>& complete, const Retention& retention,
    const std::string& saved, const std::function<bool(const CheckpointInfo&)>& is_whole) {
  std::vector<std::string> names;
  if (retention.keep_last == 0) return names;
  const std::string series = format::SeriesOf(saved);
  const std::vector<bool> abandoned = FindAbandoned(complete);
  std::vector<size_t> order;  // of removal
  for (size_t i = 0; i < complete.size(); ++i) {
    if (format::SeriesOf(complete[i].name) == series) order.push_back(i);
  }
  const auto older = [&](size_t a, size_t b) {
    return directory::OlderThan(complete[a], complete[b]);
  };
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    if (abandoned[a] != abandoned[b]) return static_cast<bool>(abandoned[a]);
    return older(a, b);
  });
  for (uint32_t kept = 0; kept < retention.keep_last && !order.empty(); order.pop_back()) {
    if (!is_whole || is_whole(complete[order.back()])) ++kept;
  }
  std::sort(order.begin(), order.end(), older);
  for (const size_t i : order) {
    const CheckpointInfo& checkpoint = complete[i];
    if (checkpoint.name == saved) continue;
    if (retention.keep_every != 0 && checkpoint.step % retention.keep_every == 0) continue;
    names.push_back(checkpoint.name);
  }
  return names;
}

}  // namespace holdfast
