// Narrows a chunk with a wrong digest to its damaged tensors: pure arithmetic.
#ifndef HOLDFAST_RUNTIME_VERIFY_NARROW_H_
#define HOLDFAST_RUNTIME_VERIFY_NARROW_H_

#include <cstdint>
#include <vector>

#include "holdfast/pod.h"
#include "holdfast/verify.h"
#include "runtime/format/manifest.h"

namespace holdfast::verify {

/// One file of a manifest with its tensors, sorted by place.
class FileMap {
 public:
  FileMap(const format::Manifest& manifest, uint32_t file);

  const format::Manifest::File& file() const { return manifest_->files[file_]; }

  /// Tensors (not of zero size) that have bytes in [begin, end), by place.
  std::vector<const format::Manifest::Tensor*> Overlapping(uint64_t begin, uint64_t end) const;

 private:
  const format::Manifest* manifest_;
  uint32_t file_;
  std::vector<const format::Manifest::Tensor*> tensors_;
};

/// Returns the faults of chunk `chunk`, whose bytes `data` have the digest `found` instead of the
/// recorded digest. Tensors whose own parts are right are not named. At least one fault.
std::vector<Fault> Narrow(const FileMap& map, uint64_t chunk, const char* data, uint64_t bytes,
                          const Digest& found);

}  // namespace holdfast::verify

#endif  // HOLDFAST_RUNTIME_VERIFY_NARROW_H_
