// The root digest of a file binds its chunks to one attempt, rank, file and length: sound chunks in
// the wrong place do not pass for a sound file.
//
// XXH3-128 over these 56 bytes, integers little-endian,
//
//   offset  bytes  field
//        0     16  "holdfast-root-v1" (ASCII, no terminator)
//       16      8  attempt id, high half
//       24      8  attempt id, low half
//       32      4  rank
//       36      4  world size
//       40      4  index of the file in its rank's manifest
//       44      4  chunk size (4194304)
//       48      8  length of the file in bytes
//
// followed by 16 bytes per chunk, in file order: its digest in xxHash's canonical form, big-endian
// with the high half first (the bytes of its 32 hex digits).
//
// The digest of a rank's replicas names neither rank nor file number, so that it is the same on all
// ranks: XXH3-128 over
//
//   offset  bytes  field
//        0     16  "holdfast-repl-v1" (ASCII, no terminator)
//       16      8  attempt id, high half
//       24      8  attempt id, low half
//
// followed, for each replicated file in the order of the manifest, by 8 bytes length of its name,
// the name, 8 bytes length of the file, and 16 bytes per chunk as above.
#include <cstring>

#include "runtime/digest/digest.h"

namespace holdfast::digest {
namespace {

constexpr char kMagic[] = "holdfast-root-v1";
constexpr char kReplicaMagic[] = "holdfast-repl-v1";
constexpr size_t kMagicBytes = 16;
static_assert(sizeof(kMagic) == kMagicBytes + 1 && sizeof(kReplicaMagic) == kMagicBytes + 1);

class Packer {
 public:
  explicit Packer(unsigned char* out) : out_(out) {}
  void Little(uint64_t value, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) *out_++ = static_cast<unsigned char>(value >> (8 * i));
  }
  void Big(uint64_t value) {
    for (int shift = 56; shift >= 0; shift -= 8) {
      *out_++ = static_cast<unsigned char>(value >> shift);
    }
  }

 private:
  unsigned char* out_;
};

void AddChunk(const Digest& chunk, Stream* stream) {
  unsigned char bytes[16];
  Packer packer(bytes);
  packer.Big(chunk.high);
  packer.Big(chunk.low);
  stream->Update(bytes, sizeof(bytes));
}

void AddLittle(uint64_t value, Stream* stream) {
  unsigned char bytes[8];
  Packer(bytes).Little(value, sizeof(bytes));
  stream->Update(bytes, sizeof(bytes));
}

}  // namespace

RootStream::RootStream(const RootInput& input) {
  unsigned char bytes[56];
  std::memcpy(bytes, kMagic, kMagicBytes);
  Packer packer(bytes + kMagicBytes);
  packer.Little(input.attempt.high, 8);
  packer.Little(input.attempt.low, 8);
  packer.Little(input.rank, 4);
  packer.Little(input.world_size, 4);
  packer.Little(input.file, 4);
  packer.Little(kChunkBytes, 4);
  packer.Little(input.file_bytes, 8);
  stream_.Update(bytes, sizeof(bytes));
}

void RootStream::Add(const Digest& chunk) { AddChunk(chunk, &stream_); }

ReplicaStream::ReplicaStream(const AttemptId& attempt) {
  stream_.Update(kReplicaMagic, kMagicBytes);
  AddLittle(attempt.high, &stream_);
  AddLittle(attempt.low, &stream_);
}

void ReplicaStream::AddFile(const char* name, size_t name_bytes, uint64_t file_bytes) {
  AddLittle(name_bytes, &stream_);
  stream_.Update(name, name_bytes);
  AddLittle(file_bytes, &stream_);
}

void ReplicaStream::Add(const Digest& chunk) { AddChunk(chunk, &stream_); }

}  // namespace holdfast::digest
