// Selects the checkpoints that retention removes.
#include <algorithm>
#include <string>
#include <vector>

#include "holdfast/recovery.h"
#include "runtime/directory/listing.h"
#include "runtime/format/directory_names.h"

namespace holdfast {

std::vector<std::string> SelectForRemoval(const std::vector<CheckpointInfo>& complete,
                                          const Retention& retention, const std::string& saved) {
  std::vector<std::string> names;
  if (retention.keep_last == 0) return names;
  const std::string series = format::SeriesOf(saved);
  std::vector<CheckpointInfo> oldest_first;
  for (const CheckpointInfo& checkpoint : complete) {
    if (format::SeriesOf(checkpoint.name) == series) oldest_first.push_back(checkpoint);
  }
  std::sort(oldest_first.begin(), oldest_first.end(), directory::OlderThan);
  for (size_t i = 0; i + retention.keep_last < oldest_first.size(); ++i) {
    const CheckpointInfo& checkpoint = oldest_first[i];
    if (checkpoint.name == saved) continue;
    if (retention.keep_every != 0 && checkpoint.step % retention.keep_every == 0) continue;
    names.push_back(checkpoint.name);
  }
  return names;
}

}  // namespace holdfast
