// One-shot and running XXH3-128, and a chunk with its parts in one pass over memory.
#include "runtime/digest/digest.h"

#define XXH_STATIC_LINKING_ONLY  // for the size of XXH3_state_t: XXH3_createState would allocate
#include <xxhash.h>
#if HOLDFAST_XXHASH_DISPATCH
#include <xxh_x86dispatch.h>  // Redirects XXH3_128bits and XXH3_128bits_update by macro.
#endif

#include <new>
#include <type_traits>

namespace holdfast::digest {
namespace {

// The whole chunk's digest has just loaded the block into the first-level cache, where the part's
// digest reads the bytes again. 16 to 32 KiB were a quarter slower: with the prefetched lines such
// blocks no longer fit.
constexpr size_t kPartBlockBytes = 4096;

Digest FromXxh(XXH128_hash_t hash) { return {.low = hash.low64, .high = hash.high64}; }

XXH3_state_t* StateIn(unsigned char* bytes) {
  return std::launder(reinterpret_cast<XXH3_state_t*>(bytes));
}

// Adds the bytes of a chunk to the digests of its parts, block by block.
class PartFeeder {
 public:
  PartFeeder(const char* chunk, const Part* parts, size_t count)
      : chunk_(chunk), next_(parts), end_(parts + count) {}

  // [from, to) of the chunk is in the cache now.
  void Feed(size_t from, size_t to) {
    for (; next_ != end_ && next_->offset < to; ++next_) {
      if (next_->out == nullptr) continue;
      const size_t part_end = size_t{next_->offset} + next_->bytes;
      if (next_->offset >= from && part_end <= to) {
        *next_->out = Of(chunk_ + next_->offset, next_->bytes);
      } else {
        if (next_->offset >= from) stream_.Reset();
        const size_t begin = next_->offset > from ? next_->offset : from;
        stream_.Update(chunk_ + begin, (part_end < to ? part_end : to) - begin);
        if (part_end > to) return;
        *next_->out = stream_.Finish();
      }
    }
  }

  // Empty parts at the very end of the chunk.
  void FeedRest() {
    for (; next_ != end_; ++next_) {
      if (next_->out != nullptr) *next_->out = Of(chunk_, 0);
    }
  }

 private:
  const char* chunk_;
  const Part* next_;
  const Part* end_;
  Stream stream_;
};

// A part that needs a second pass over its bytes.
bool NeedsPass(const Part& part, size_t chunk_bytes) {
  return part.out != nullptr && part.bytes != 0 && part.bytes != chunk_bytes;
}

}  // namespace

static_assert(alignof(XXH3_state_t) <= 64);
static_assert(std::is_trivially_copyable_v<XXH3_state_t>);

Digest Of(const void* data, size_t bytes) { return FromXxh(XXH3_128bits(data, bytes)); }

Digest OfChunk(const void* chunk, size_t bytes, const Part* parts, size_t part_count) {
  bool needs_pass = false;
  for (size_t i = 0; i < part_count; ++i) needs_pass |= NeedsPass(parts[i], bytes);
  const char* data = static_cast<const char*>(chunk);
  if (!needs_pass) {
    const Digest whole = Of(data, bytes);
    for (size_t i = 0; i < part_count; ++i) {
      if (parts[i].out != nullptr) *parts[i].out = parts[i].bytes == 0 ? Of(data, 0) : whole;
    }
    return whole;
  }
  Stream whole;
  PartFeeder feeder(data, parts, part_count);
  for (size_t at = 0; at < bytes; at += kPartBlockBytes) {
    const size_t block = bytes - at < kPartBlockBytes ? bytes - at : kPartBlockBytes;
    whole.Update(data + at, block);
    feeder.Feed(at, at + block);
  }
  feeder.FeedRest();
  return whole.Finish();
}

void Stream::Reset() {
  static_assert(sizeof(state_) >= sizeof(XXH3_state_t));
  // Fails only for a null state.
  (void)XXH3_128bits_reset(new (state_) XXH3_state_t);
}

void Stream::Update(const void* data, size_t bytes) {
  if (bytes == 0) return;  // XXH3 refuses a null pointer, which an empty span may have.
  (void)XXH3_128bits_update(StateIn(state_), data, bytes);
}

Digest Stream::Finish() const {
  return FromXxh(XXH3_128bits_digest(std::launder(reinterpret_cast<const XXH3_state_t*>(state_))));
}

}  // namespace holdfast::digest
