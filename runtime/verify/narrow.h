// From a chunk whose digest is wrong to the tensors that are damaged in it: pure arithmetic.
#ifndef HOLDFAST_RUNTIME_VERIFY_NARROW_H_
#define HOLDFAST_RUNTIME_VERIFY_NARROW_H_

#include <cstdint>
#include <vector>

#include "holdfast/pod.h"
#include "holdfast/verify.h"
#include "runtime/format/manifest.h"

namespace holdfast::verify {

/// One file of a manifest with its tensors in the order of their places.
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

/// The faults of chunk `chunk`, whose bytes `data` have the digest `found` and not the recorded
/// one. Tensors whose own parts are what they should be are not named. At least one fault.
std::vector<Fault> Narrow(const FileMap& map, uint64_t chunk, const char* data, uint64_t bytes,
                          const Digest& found);

}  // namespace holdfast::verify

#endif  // HOLDFAST_RUNTIME_VERIFY_NARROW_H_
