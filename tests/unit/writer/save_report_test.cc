// The table of a report's fields, from which Python's reports and JSON documents are made.
#include "holdfast/save.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace holdfast {
namespace {

TEST(SaveReport, TableHasEveryFieldOnce) {
  const SaveReport report;
  std::set<std::string> names;
  std::vector<std::pair<size_t, size_t>> places;  // Offset and end.
  ForEachField(report, [&](const char* name, const auto& value) {
    EXPECT_TRUE(names.insert(name).second) << name;
    const size_t offset =
        reinterpret_cast<const char*>(&value) - reinterpret_cast<const char*>(&report);
    places.push_back({offset, offset + sizeof(value)});
  });
  std::sort(places.begin(), places.end());
  places.push_back({sizeof(report), sizeof(report)});
  size_t end = 0;
  for (const auto& [offset, next] : places) {
    // What lies between two fields is padding, and the next field's alignment explains it.
    EXPECT_GE(offset, end) << "a field is in the table twice";
    EXPECT_LT(offset - end, sizeof(uint64_t)) << "a field before byte " << offset << " is missing";
    end = next;
  }
}

}  // namespace
}  // namespace holdfast
