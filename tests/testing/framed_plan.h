// Plans whose files need checksums of their tensors, as zip archives do, and a check of these
// checksums with zlib.
#ifndef HOLDFAST_TESTS_TESTING_FRAMED_PLAN_H_
#define HOLDFAST_TESTS_TESTING_FRAMED_PLAN_H_

#include <cstdint>
#include <string>

#include "absl/types/span.h"
#include "holdfast/plan.h"

namespace holdfast::testing {

struct Framing {
  std::string file_name = "data.zip";
  /// Bytes of the literal behind each tensor; the last four are the place of its checksum.
  uint32_t behind_bytes = 7;
  /// Alignment of each tensor, padded by a literal; 0: no padding.
  uint64_t alignment = 0;
  /// Distances of second places for all checksums, at the end of the file; 0: none.
  uint32_t directory_bytes = 11;
};

/// Plans one file: the tensors in order, with literals between and behind them that have places for
/// their checksums. Tensors without bytes are left out.
SavePlan FramedPlan(absl::Span<const TensorSource> tensors, const Framing& framing);

/// Returns the fault in the bytes of file `file`; empty if the literals equal the plan's, apart
/// from the checksums, and each checksum is zlib's crc32 of its tensor.
std::string WrongFraming(const SavePlan& plan, const PlannedFile& file, const std::string& bytes);

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_TESTING_FRAMED_PLAN_H_
