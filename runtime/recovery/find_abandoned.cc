// Finds the checkpoints of abandoned branches.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "holdfast/recovery.h"
#include "runtime/directory/listing.h"
#include "runtime/format/directory_names.h"

namespace holdfast {
namespace {

using Key = std::pair<uint64_t, uint64_t>;
using ByAttempt = std::map<Key, const CheckpointInfo*>;

Key KeyOf(const AttemptId& attempt) { return {attempt.high, attempt.low}; }

/// Checkpoints of one series, the newest first, and the indices of them in the caller's list.
struct Series {
  std::vector<const CheckpointInfo*> checkpoints;
  std::vector<size_t> indices;
};

/// Returns the attempts of the newest checkpoint and its recorded ancestors, of any series.
std::set<Key> LineOf(const CheckpointInfo& newest, const ByAttempt& by_attempt) {
  std::set<Key> line;
  Key at = KeyOf(newest.attempt);
  while (line.insert(at).second) {
    const auto found = by_attempt.find(at);
    if (found == by_attempt.end()) break;
    at = KeyOf(found->second->parent);
  }
  line.erase(Key());
  return line;
}

/// Marks the abandoned checkpoints of a series in `*abandoned`, by their indices.
void Mark(const Series& series, const ByAttempt& by_attempt, std::vector<bool>* abandoned) {
  const std::vector<const CheckpointInfo*>& checkpoints = series.checkpoints;
  const std::set<Key> line = LineOf(*checkpoints.front(), by_attempt);
  if (line.empty()) return;  // nothing is recorded
  const auto is_on_line = [&](const AttemptId& attempt) { return line.contains(KeyOf(attempt)); };
  std::set<Key> gone;
  uint64_t lowest = 0;  // step of the line so far; 0: none recorded
  for (size_t i = 0; i < checkpoints.size(); ++i) {
    const CheckpointInfo& checkpoint = *checkpoints[i];
    if (lowest != 0 && checkpoint.step > lowest) {
      (*abandoned)[series.indices[i]] = true;
      gone.insert(KeyOf(checkpoint.attempt));
    } else if (checkpoint.step != 0 && is_on_line(checkpoint.attempt)) {
      lowest = checkpoint.step;
    }
  }
  gone.erase(Key());
  // The oldest first, so that a parent is judged before its children.
  for (size_t i = checkpoints.size(); i-- > 0;) {
    const CheckpointInfo& checkpoint = *checkpoints[i];
    if (is_on_line(checkpoint.attempt)) continue;
    if (!is_on_line(checkpoint.parent) && !gone.contains(KeyOf(checkpoint.parent))) continue;
    (*abandoned)[series.indices[i]] = true;
    if (checkpoint.attempt != AttemptId{}) gone.insert(KeyOf(checkpoint.attempt));
  }
}

}  // namespace

std::vector<bool> FindAbandoned(const std::vector<CheckpointInfo>& complete) {
  std::vector<size_t> newest_first(complete.size());
  for (size_t i = 0; i < complete.size(); ++i) newest_first[i] = i;
  std::sort(newest_first.begin(), newest_first.end(),
            [&](size_t a, size_t b) { return directory::OlderThan(complete[b], complete[a]); });
  ByAttempt by_attempt;
  std::map<std::string, Series> all;
  for (const size_t i : newest_first) {
    Series& series = all[format::SeriesOf(complete[i].name)];
    series.checkpoints.push_back(&complete[i]);
    series.indices.push_back(i);
    if (complete[i].attempt != AttemptId{})
      by_attempt.emplace(KeyOf(complete[i].attempt), &complete[i]);
  }
  std::vector<bool> abandoned(complete.size());
  for (const auto& [name, series] : all) Mark(series, by_attempt, &abandoned);
  return abandoned;
}

}  // namespace holdfast
