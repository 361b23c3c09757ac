#include "holdfast/version.h"

namespace holdfast {

absl::string_view Version() { return HOLDFAST_VERSION; }

}  // namespace holdfast
