// Plans whose files need checksums of their tensors, as zip archives do, and the proof with zlib
// that the right ones were written.
#ifndef HOLDFAST_TESTS_TESTING_FRAMED_PLAN_H_
#define HOLDFAST_TESTS_TESTING_FRAMED_PLAN_H_

#include <cstdint>
#include <string>

#include "absl/types/span.h"
#include "holdfast/plan.h"

namespace holdfast::testing {

struct Framing {
  std::string file_name = "data.zip";
  /// Of the literal behind each tensor, with a place for its checksum at its end.
  uint32_t behind_bytes = 7;
  /// Of the literal that pads the file before each tensor to a multiple of this; 0: none.
  uint64_t alignment = 0;
  /// Places for all checksums once more at the end of the file, each after this many bytes; 0:
  /// none.
  uint32_t directory_bytes = 11;
};

/// One file: the tensors in order, and between and behind them literals with places for their
/// checksums. Tensors of no bytes are left out.
SavePlan FramedPlan(absl::Span<const TensorSource> tensors, const Framing& framing);

/// What is wrong with the bytes of file `file` of the plan; empty if its literals are the plan's,
/// apart from the checksums, and these are those of the tensors in it, by zlib's crc32.
std::string WrongFraming(const SavePlan& plan, const PlannedFile& file, const std::string& bytes);

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_TESTING_FRAMED_PLAN_H_
