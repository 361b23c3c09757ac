// The version of the library. Its one home is project() in CMakeLists.txt.
#ifndef HOLDFAST_VERSION_H_
#define HOLDFAST_VERSION_H_

#include "absl/strings/string_view.h"

namespace holdfast {

/// The version of the library that the program runs with, as "0.1.0". Manifests name it as their
/// `writer`.
absl::string_view Version();

}  // namespace holdfast

#endif  // HOLDFAST_VERSION_H_
