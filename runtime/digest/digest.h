// XXH3-128 over chunks with the widest vector unit of the running CPU, in one pass over memory,
// optionally fused with the copy. Below the fork line: pure functions, no heap.
#ifndef HOLDFAST_RUNTIME_DIGEST_DIGEST_H_
#define HOLDFAST_RUNTIME_DIGEST_DIGEST_H_

#include <cstddef>
#include <cstdint>

#include "holdfast/pod.h"

namespace holdfast::digest {

/// XXH3-128 of `bytes` at `data`.
Digest Of(const void* data, size_t bytes);

/// A part of a chunk with its own digest, in the same pass over memory.
struct Part {
  uint32_t offset = 0;  ///< Within the chunk.
  uint32_t bytes = 0;
  Digest* out = nullptr;  ///< Null: the part is not digested (but still copied by CopyAndDigest).
};

/// Digest of a chunk and of its parts (ascending, not overlapping), each byte read from memory
/// once.
Digest OfChunk(const void* chunk, size_t bytes, const Part* parts, size_t part_count);

/// Copies `bytes` from `source` to `destination` in blocks that stay in the first-level cache, and
/// adds the destination's bytes to a running digest.
class Stream {
 public:
  Stream() { Reset(); }
  void Reset();
  void Update(const void* data, size_t bytes);
  Digest Finish() const;

 private:
  alignas(64) unsigned char state_[640];  // an XXH3_state_t; its size is asserted in digest.cc
};

/// A consumer of the copied bytes, block by block, in order.
struct Tap {
  void (*take)(void* state, const void* data, size_t bytes) = nullptr;
  void* state = nullptr;
};

/// memcpy with digests of the destination's bytes: `whole` (the chunk's running digest, may be
/// null) and `part` (may be null). `tap` gets each block.
void CopyAndDigest(void* destination, const void* source, size_t bytes, Stream* whole, Stream* part,
                   Tap tap = {});

/// Returns the root of a file: XXH3-128 over a fixed binding of attempt, rank, world size, file
/// index, file length and chunk size, followed by the chunk digests in canonical (big-endian, high
/// first) order. FORMAT.md gives the bytes.
struct RootInput {
  AttemptId attempt;
  uint32_t rank = 0;
  uint32_t world_size = 1;
  uint32_t file = 0;
  uint64_t file_bytes = 0;
};
class RootStream {
 public:
  explicit RootStream(const RootInput& input);
  void Add(const Digest& chunk);
  Digest Finish() const { return stream_.Finish(); }

 private:
  Stream stream_;
};

/// Returns the digest of a rank's replicated files: equal on two ranks of an attempt if names,
/// lengths and chunk digests are equal. FORMAT.md gives the bytes.
class ReplicaStream {
 public:
  explicit ReplicaStream(const AttemptId& attempt);
  /// Begins a file; the digests of its chunks follow in order.
  void AddFile(const char* name, size_t name_bytes, uint64_t file_bytes);
  void Add(const Digest& chunk);
  Digest Finish() const { return stream_.Finish(); }

 private:
  Stream stream_;
};

/// Digits of a digest or an attempt id.
inline constexpr size_t kHexDigits = 32;

/// Writes kHexDigits lower-case digits, `high` first, without a terminator.
void ToHex(const Digest& digest, char* out);
void ToHex(const AttemptId& id, char* out);

/// Reads exactly kHexDigits lower-case digits.
bool FromHex(const char* text, Digest* out);
bool FromHex(const char* text, AttemptId* out);

/// Returns the vector unit in use, for reports: "avx512", "avx2", "sse2", "neon", "scalar".
const char* VectorUnit();

}  // namespace holdfast::digest

#endif  // HOLDFAST_RUNTIME_DIGEST_DIGEST_H_
