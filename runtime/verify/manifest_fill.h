// A manifest made of digests that arrive one by one, in any order, from any thread. For files on
// disk, the equivalent of a save's sealers and worker in shared memory.
#ifndef HOLDFAST_RUNTIME_VERIFY_MANIFEST_FILL_H_
#define HOLDFAST_RUNTIME_VERIFY_MANIFEST_FILL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "holdfast/plan.h"
#include "holdfast/pod.h"
#include "runtime/format/manifest.h"

namespace holdfast::verify {

class ManifestFill {
 public:
  /// `plan` must outlive the object; its segments are not read.
  ManifestFill(const format::ManifestInput& input, const SavePlan& plan);

  /// Digests chunk `chunk` of a file and all parts of tensors in it. \threadsafety Any thread, each
  /// chunk once.
  void AddChunk(uint32_t file, uint64_t chunk, const char* data, uint64_t bytes);

  /// Returns the manifest, once every chunk was added.
  std::string Finish(EngineRung engine, const char* reason, DirectIo direct_io);

 private:
  void PutDigest(uint64_t place, const Digest& digest);

  const format::ManifestInput input_;
  const SavePlan& plan_;
  format::ManifestTemplate template_;
  std::vector<std::vector<Digest>> chunks_;     // by file and chunk
  std::vector<std::vector<uint32_t>> tensors_;  // by file: indices, by place
};

}  // namespace holdfast::verify

#endif  // HOLDFAST_RUNTIME_VERIFY_MANIFEST_FILL_H_
