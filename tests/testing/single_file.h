// Saves of a single file: the bytes of a torch archive, and their plan.
#ifndef HOLDFAST_TESTS_TESTING_SINGLE_FILE_H_
#define HOLDFAST_TESTS_TESTING_SINGLE_FILE_H_

#include <cstdint>
#include <string>

#include "absl/strings/str_format.h"
#include "holdfast/plan.h"
#include "holdfast/pod.h"
#include "tests/testing/zip_files.h"

namespace holdfast::testing {

/// Returns a torch archive of one storage, with the id of the save `attempt`.
inline std::string SingleFileArchive(const AttemptId& attempt, const std::string& storage) {
  return ZipArchive({{"archive/data.pkl", "pickle"},
                     {"archive/data/0", storage},
                     {"archive/.data/serialization_id",
                      absl::StrFormat("%020d%020d", attempt.high, attempt.low)}},
                    {});
}

/// Plans the file `name` with `contents`, which must outlive the save.
inline SavePlan SingleFilePlan(const std::string& name, const std::string& contents) {
  SavePlan plan;
  plan.files.push_back({.name = name, .bytes = contents.size(), .segments = {}});
  plan.files[0].segments.push_back(
      {.bytes = contents.size(), .tensor = 0, .data = contents.data()});
  plan.tensors.push_back({.name = "all",
                          .dtype = "U8",
                          .shape = {static_cast<int64_t>(contents.size())},
                          .end = contents.size()});
  return plan;
}

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_TESTING_SINGLE_FILE_H_
