// Fills the fixed-width slots of a manifest template in place, with the worker's values.
//
// An unfilled slot is blank, and an unfilled digest slot holds '-'. An incomplete template is
// neither JSON nor has digests, so no reader accepts it as a manifest. Below the fork line: no
// heap, only byte stores.
//
// Order of completion: the sealers' digests (digest::ToHex) are already present. Fill the file
// roots, then every slot of ManifestSlots but the last, and finally
//
//   digest::ToHex(digest::Of(manifest, slots.self_digest.offset),
//                 manifest + slots.self_digest.offset);
//
// The self-digest covers every byte in front of its own 32 digits.
#ifndef HOLDFAST_RUNTIME_LAYOUT_MANIFEST_SLOTS_H_
#define HOLDFAST_RUNTIME_LAYOUT_MANIFEST_SLOTS_H_

#include <cstdint>

#include "holdfast/pod.h"
#include "runtime/layout/job.h"

namespace holdfast::layout {

/// Widths of the slots, including the quotes of a text. A reason has at most 159 bytes
/// (CompletionSlot::reason); the rest of its slot leaves room for escapes. A number needs 20
/// digits.
inline constexpr uint32_t kEngineSlotBytes = 20;
inline constexpr uint32_t kReasonSlotBytes = 192;
inline constexpr uint32_t kDirectIoSlotBytes = 12;
inline constexpr uint32_t kBoolSlotBytes = 5;
inline constexpr uint32_t kNumberSlotBytes = 20;
/// Hex digits of a digest, and what stands in the place of each until they are known.
inline constexpr uint32_t kDigestSlotBytes = 32;
inline constexpr char kNoDigest = '-';

/// Manifest words for engine, direct I/O and pages; "none" before a choice.
inline const char* ManifestWord(EngineRung engine) {
  return engine == EngineRung::kAuto ? "none" : WordOf(engine);
}
inline const char* ManifestWord(DirectIo direct_io) { return WordOf(direct_io); }
inline const char* ManifestWord(PageRung pages) {
  return pages == PageRung::kAuto ? "none" : WordOf(pages);
}

/// Writes `text` as a JSON string into `slot`, followed by blanks. Quote and backslash are escaped;
/// control characters become blanks; bytes beyond ASCII become '?' (a cut sequence would not be
/// UTF-8). A long text is cut at a character's border. A slot without room for "" stays unchanged.
inline void FillText(char* manifest, const Slot& slot, const char* text) {
  if (slot.width < 2) return;
  char* const begin = manifest + slot.offset;
  char* const end = begin + slot.width;
  char* out = begin;
  *out++ = '"';
  for (; *text != '\0'; ++text) {
    const unsigned char byte = static_cast<unsigned char>(*text);
    const bool escape = byte == '"' || byte == '\\';
    if (out + (escape ? 2 : 1) >= end) break;  // One byte stays for the closing quote.
    if (escape) *out++ = '\\';
    *out++ = byte < 0x20 ? ' ' : byte >= 0x80 ? '?' : *text;
  }
  *out++ = '"';
  while (out < end) *out++ = ' ';
}

/// Writes `true` and a blank, or `false`, into a slot of kBoolSlotBytes. A slot of another width
/// stays unchanged.
inline void FillBool(char* manifest, const Slot& slot, bool value) {
  if (slot.width != kBoolSlotBytes) return;
  const char* const word = value ? "true " : "false";
  for (uint32_t i = 0; i < kBoolSlotBytes; ++i) manifest[slot.offset + i] = word[i];
}

/// Writes `value` in decimal, blanks in front. A number that does not fit leaves only blanks, which
/// is not JSON: a wrong number is never written. A slot of width 0 stays unchanged.
inline void FillNumber(char* manifest, const Slot& slot, uint64_t value) {
  if (slot.width == 0) return;  // There is no slot; its offset is unchecked.
  char* const begin = manifest + slot.offset;
  char* out = begin + slot.width;
  do {
    if (out == begin) {
      for (uint32_t i = 0; i < slot.width; ++i) begin[i] = ' ';
      return;
    }
    *--out = static_cast<char>('0' + value % 10);
    value /= 10;
  } while (value != 0);
  while (out > begin) *--out = ' ';
}

}  // namespace holdfast::layout

#endif  // HOLDFAST_RUNTIME_LAYOUT_MANIFEST_SLOTS_H_
