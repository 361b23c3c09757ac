// Filling the fixed-width slots of a manifest template in place: what the worker does to the fields
// that only it knows.
//
// A slot is blank until it is filled, and a digest slot holds '-', so a template that was not
// filled completely is neither JSON nor has it digests: no reader takes it for a manifest. Below
// the fork line: no heap, nothing but byte stores.
//
// The order for whoever completes a manifest: the sealers' digests (digest::ToHex) stand in it
// already; fill the file roots, then every slot of ManifestSlots but the last, and last of all
//
//   digest::ToHex(digest::Of(manifest, slots.self_digest.offset),
//                 manifest + slots.self_digest.offset);
//
// because the self-digest covers every byte in front of its own 32 digits.
#ifndef HOLDFAST_RUNTIME_LAYOUT_MANIFEST_SLOTS_H_
#define HOLDFAST_RUNTIME_LAYOUT_MANIFEST_SLOTS_H_

#include <cstdint>

#include "holdfast/pod.h"
#include "runtime/layout/job.h"

namespace holdfast::layout {

/// Widths of the slots, the quotes of a text included. A reason is at most 159 bytes long
/// (CompletionSlot::reason), the rest of its slot is room for escapes; a number needs 20 digits.
inline constexpr uint32_t kEngineSlotBytes = 20;
inline constexpr uint32_t kReasonSlotBytes = 192;
inline constexpr uint32_t kDirectIoSlotBytes = 12;
inline constexpr uint32_t kBoolSlotBytes = 5;
inline constexpr uint32_t kNumberSlotBytes = 20;
/// Hex digits of a digest, and what stands in their place until there is one.
inline constexpr uint32_t kDigestSlotBytes = 32;
inline constexpr char kNoDigest = '-';

/// The words of the manifest for what the worker found out; where nothing was chosen, "none".
inline const char* ManifestWord(EngineRung engine) {
  return engine == EngineRung::kAuto ? "none" : WordOf(engine);
}
inline const char* ManifestWord(DirectIo direct_io) { return WordOf(direct_io); }
inline const char* ManifestWord(PageRung pages) {
  return pages == PageRung::kAuto ? "none" : WordOf(pages);
}

/// Writes `text` as a JSON string into `slot`, followed by blanks. Quote and backslash are escaped,
/// control characters become blanks, bytes beyond ASCII '?' (a cut sequence would not be UTF-8);
/// what does not fit is left out at a character's border. A slot without room for "" is left alone.
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

/// Writes `true` and a blank, or `false`, into a slot of kBoolSlotBytes. Another one is left alone.
inline void FillBool(char* manifest, const Slot& slot, bool value) {
  if (slot.width != kBoolSlotBytes) return;
  const char* const word = value ? "true " : "false";
  for (uint32_t i = 0; i < kBoolSlotBytes; ++i) manifest[slot.offset + i] = word[i];
}

/// Writes `value` in decimal, blanks in front. A number that does not fit leaves only blanks, which
/// is not JSON: a wrong figure is never written.
inline void FillNumber(char* manifest, const Slot& slot, uint64_t value) {
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
