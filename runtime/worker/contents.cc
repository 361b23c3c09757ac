#include "runtime/worker/contents.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "runtime/digest/digest.h"
#include "runtime/layout/job.h"
#include "runtime/sys/assert.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/retry.h"
#include "runtime/sys/system.h"
#include "runtime/worker/listing.h"
#include "runtime/worker/rank_board.h"

namespace holdfast::worker {
namespace {

constexpr char kManifestPrefix[] = "rank-";
constexpr char kManifestSuffix[] = ".manifest.json";
constexpr char kTemporarySuffix[] = ".tmp";
// As format/directory_names, which is unavailable below the fork line.
constexpr char kPartial[] = ".partial-";
constexpr char kFenced[] = ".fenced-";
// An element of a manifest's `files` in its written form: {"name":"NAME","bytes":N,...
constexpr char kElement[] = "{\"name\":\"";
constexpr char kBytes[] = "\",\"bytes\":";
constexpr size_t kElementBytes = sizeof(kElement) - 1;
constexpr size_t kBytesBytes = sizeof(kBytes) - 1;
// FORMAT.md: no larger manifest is read.
constexpr uint64_t kManifestBytesMax = uint64_t{1} << 30;
constexpr size_t kRankDigits = 5;

bool EndsWith(const char* text, size_t length, const char* suffix) {
  const size_t bytes = strlen(suffix);
  return length >= bytes && memcmp(text + length - bytes, suffix, bytes) == 0;
}

uint64_t KeyOf(const char* name, size_t bytes) { return digest::Of(name, bytes).low; }

/// Returns the first place of `what` in [at, end), or `end`.
const char* Find(const char* at, const char* end, const char* what, size_t bytes) {
  while (static_cast<size_t>(end - at) >= bytes) {
    at = static_cast<const char*>(memchr(at, what[0], static_cast<size_t>(end - at) - bytes + 1));
    if (at == nullptr) return end;
    if (memcmp(at, what, bytes) == 0) return at;
    ++at;
  }
  return end;
}

/// The value behind `"KEY":` in a manifest's head, quotes and blanks skipped, or `end`.
const char* ValueOf(const char* text, const char* end, const char* key) {
  const char* at = Find(text, end, key, strlen(key));
  if (at == end) return end;
  at += strlen(key);
  while (at < end && (*at == ':' || *at == ' ' || *at == '"')) ++at;
  return at;
}

uint64_t HexValue(const char* digits, bool* ok) {
  uint64_t value = 0;
  for (size_t i = 0; i < digest::kHexDigits / 2; ++i) {
    const char digit = digits[i];
    const bool decimal = digit >= '0' && digit <= '9';
    if (!decimal && (digit < 'a' || digit > 'f')) *ok = false;
    value = value << 4 | static_cast<uint64_t>(decimal ? digit - '0' : digit - 'a' + 10);
  }
  return value;
}

void ReadHead(const char* text, const char* end, Contents* contents) {
  const char* const digits = ValueOf(text, end, "\"attempt\"");
  bool ok = static_cast<size_t>(end - digits) >= digest::kHexDigits;
  if (ok) {
    const AttemptId attempt = {.high = HexValue(digits, &ok),
                               .low = HexValue(digits + digest::kHexDigits / 2, &ok)};
    if (ok) contents->attempt = attempt;
  }
  for (const char* at = ValueOf(text, end, "\"step\""); at < end && *at >= '0' && *at <= '9'; ++at)
    contents->step = contents->step * 10 + static_cast<uint64_t>(*at - '0');
}

bool SkipText(const char** at, const char* text) {
  const size_t bytes = strlen(text);
  if (strncmp(*at, text, bytes) != 0) return false;
  *at += bytes;
  return true;
}

/// Returns the character of the escape at `*at`, and moves `*at` behind it. Escapes that
/// format/text does not write give a zero byte, which no file name has.
char Unescaped(const char** at, const char* end) {
  constexpr size_t kHexEscapeBytes = 6;  // \u00XX
  const auto left = static_cast<size_t>(end - *at);
  const char kind = left < 2 ? '\0' : (*at)[1];
  if (kind == 'u' && left >= kHexEscapeBytes) {
    unsigned value = 0;
    for (const char* digit = *at + 2; digit < *at + kHexEscapeBytes; ++digit) {
      const bool decimal = *digit >= '0' && *digit <= '9';
      if (!decimal && (*digit < 'a' || *digit > 'f')) return '\0';
      value = value << 4 | static_cast<unsigned>(decimal ? *digit - '0' : *digit - 'a' + 10);
    }
    *at += kHexEscapeBytes;
    return value < 0x80 ? static_cast<char>(value) : '\0';
  }
  *at += 2;
  if (kind == '"' || kind == '\\') return kind;
  return kind == 'n' ? '\n' : kind == 't' ? '\t' : kind == 'r' ? '\r' : '\0';
}

/// Sets `*key` to that of the name that a manifest writes as [at, end). Returns false for a name
/// that no entry can have.
bool KeyOfWritten(const char* at, const char* end, uint64_t* key) {
  char name[kNameBytes];
  size_t bytes = 0;
  while (at < end) {
    const char next = *at == '\\' ? Unescaped(&at, end) : *at++;
    if (next == '\0' || bytes == sizeof(name)) return false;
    name[bytes++] = next;
  }
  *key = KeyOf(name, bytes);
  return true;
}

/// Reads a rank or a world size: five digits, or more without a leading zero.
bool SkipRank(const char** at, uint64_t* value) {
  const char* const begin = *at;
  for (*value = 0; **at >= '0' && **at <= '9' && *value <= UINT32_MAX; ++*at)
    *value = *value * 10 + static_cast<uint64_t>(**at - '0');
  const auto digits = static_cast<size_t>(*at - begin);
  return *value <= UINT32_MAX && (digits == kRankDigits || (digits > kRankDigits && *begin != '0'));
}

/// Returns W of a manifest's name "rank-RRRRR-of-WWWWW.manifest.json"; 0 for any other name.
uint64_t WorldOf(const char* name) {
  uint64_t rank = 0;
  uint64_t world_size = 0;
  const char* at = name;
  const bool named = SkipText(&at, kManifestPrefix) && SkipRank(&at, &rank) &&
                     SkipText(&at, "-of-") && SkipRank(&at, &world_size) &&
                     strcmp(at, kManifestSuffix) == 0;
  return named && rank < world_size ? world_size : 0;
}

}  // namespace

Inventory::~Inventory() {
  if (memory_ != nullptr) sys::Sys().munmap(memory_, memory_bytes_);
}

/// Maps room for the largest manifest, and for a key of each element that all manifests could hold.
int Inventory::Map(int directory, char* buffer, Contents* contents) {
  uint64_t total = 0;
  int error = 0;
  const int listed = ForEachEntry(directory, buffer, [&](const char* name) {
    contents->empty = false;
    struct stat status = {};
    if (!IsManifestName(name)) return true;
    if (sys::Sys().fstatat(directory, name, &status, AT_SYMLINK_NOFOLLOW) != 0) error = errno;
    if (error != 0 || !S_ISREG(status.st_mode)) return error == 0;
    const auto bytes = static_cast<uint64_t>(status.st_size);
    if (bytes > kManifestBytesMax) error = EFBIG;
    total += bytes;
    text_max_ = std::max(text_max_, bytes);
    ++count_;
    if (contents->manifest[0] == '\0' || strcmp(name, contents->manifest) < 0)
      memcpy(contents->manifest, name, strlen(name) + 1);
    return error == 0;
  });
  if (listed != 0 || error != 0) return listed != 0 ? listed : error;
  contents->whole = count_ != 0 && count_ == WorldOf(contents->manifest);
  if (text_max_ == 0) return 0;
  HOLDFAST_ASSERT(count_ > 0 && total >= text_max_ && memory_ == nullptr);
  keys_max_ = total / (kElementBytes + kBytesBytes) + 1;
  memory_bytes_ = keys_max_ * sizeof(uint64_t) + text_max_;
  void* const memory = sys::Sys().mmap(nullptr, memory_bytes_, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return errno;
  memory_ = memory;
  keys_ = static_cast<uint64_t*>(memory);
  text_ = static_cast<char*>(memory) + keys_max_ * sizeof(uint64_t);
  return 0;
}

int Inventory::ReadOne(int directory, const char* name, Contents* contents) {
  HOLDFAST_ASSERT(text_ != nullptr && text_max_ > 0);
  const int fd = sys::OpenOwned(directory, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0);
  if (fd < 0) return errno;
  uint64_t bytes = 0;
  int error = 0;
  while (bytes < text_max_) {
    const ssize_t got = sys::Uninterrupted([&] {
      return sys::Sys().pread(fd, text_ + bytes, text_max_ - bytes, static_cast<off_t>(bytes));
    });
    if (got < 0) error = errno;
    if (got <= 0) break;
    bytes += static_cast<uint64_t>(got);
  }
  sys::CloseOwned(fd);
  if (error != 0) return error;
  if (strcmp(name, contents->manifest) == 0) ReadHead(text_, text_ + bytes, contents);
  AddNames(text_, text_ + bytes);
  return 0;
}

void Inventory::AddNames(const char* at, const char* end) {
  while ((at = Find(at, end, kElement, kElementBytes)) != end) {
    at += kElementBytes;
    const char* last = at;
    while (last < end && *last != '"') last += *last == '\\' ? 2 : 1;
    const auto left = static_cast<size_t>(last < end ? end - last : 0);
    // "dtype" follows a tensor's name.
    const bool names_file = left >= kBytesBytes && memcmp(last, kBytes, kBytesBytes) == 0;
    uint64_t key = 0;
    if (names_file && key_count_ < keys_max_ && KeyOfWritten(at, last, &key))
      keys_[key_count_++] = key;
  }
}

int Inventory::Read(int directory, char* buffer, Contents* contents) {
  int error = Map(directory, buffer, contents);
  if (error != 0 || memory_ == nullptr) return error;
  const int listed = ForEachEntry(directory, buffer, [&](const char* name) {
    if (IsManifestName(name)) error = ReadOne(directory, name, contents);
    return error == 0;
  });
  HOLDFAST_ASSERT(key_count_ <= keys_max_);
  std::sort(keys_, keys_ + key_count_);
  return listed != 0 ? listed : error;
}

bool Inventory::Holds(const char* name) const {
  char bare[kNameBytes] = {};
  size_t length = strnlen(name, sizeof(bare));
  if (length == sizeof(bare)) return false;  // exFAT and FUSE have longer names.
  if (EndsWith(name, length, kTemporarySuffix)) length -= sizeof(kTemporarySuffix) - 1;
  HOLDFAST_ASSERT(length < sizeof(bare) && key_count_ <= keys_max_);
  memcpy(bare, name, length);
  return strcmp(bare, layout::kBoardName) == 0 || IsCommitFile(bare) ||
         std::binary_search(keys_, keys_ + key_count_, KeyOf(bare, length));
}

namespace {

/// Returns the bytes of `name` before ".KIND-<32 digits>", or 0 if `name` has another form.
size_t BytesBefore(const char* name, const char* infix) {
  const size_t length = strlen(name);
  const size_t kind = strlen(infix);
  if (length <= kind + digest::kHexDigits) return 0;
  bool ok = true;
  HexValue(name + length - digest::kHexDigits, &ok);
  HexValue(name + length - digest::kHexDigits / 2, &ok);
  const size_t before = length - digest::kHexDigits - kind;
  HOLDFAST_ASSERT(before > 0 && before + kind <= length);
  return ok && memcmp(name + before, infix, kind) == 0 ? before : 0;
}

bool CarriesAttempt(const char* name, const AttemptId& attempt) {
  char digits[digest::kHexDigits];
  digest::ToHex(attempt, digits);
  HOLDFAST_ASSERT(strlen(name) >= digest::kHexDigits);
  return memcmp(name + strlen(name) - digest::kHexDigits, digits, digest::kHexDigits) == 0;
}

/// Returns true when the directory's name says that `attempt` wrote there and never committed.
bool IsUncommitted(const char* name, const AttemptId& attempt) {
  return (BytesBefore(name, kPartial) != 0 || BytesBefore(name, kFenced) != 0) &&
         CarriesAttempt(name, attempt);
}

}  // namespace

bool IsManifestName(const char* name) { return WorldOf(name) != 0; }

bool IsCommitFile(const char* name) {
  return strcmp(name, layout::kCommitRecordName) == 0 || IsManifestName(name);
}

bool IsMark(const char* name) {
  return strcmp(name, kMarkName) == 0 || strcmp(name, layout::kBoardName) == 0;
}

bool IsProof(const char* name) {
  char bare[kNameBytes] = {};
  size_t length = strnlen(name, sizeof(bare) - 1);
  if (EndsWith(name, length, kTemporarySuffix)) length -= sizeof(kTemporarySuffix) - 1;
  HOLDFAST_ASSERT(length < sizeof(bare));
  memcpy(bare, name, length);
  return IsMark(name) || IsCommitFile(bare);
}

bool HoldsOnlyMarks(int directory, char* buffer) {
  bool only = true;
  const int error =
      ForEachEntry(directory, buffer, [&only](const char* name) { return only = IsMark(name); });
  return only && error == 0;
}

bool MustKeep(const Contents& contents, const char* directory_name) {
  HOLDFAST_ASSERT(directory_name[0] != '\0');
  return contents.whole && contents.foreign[0] != '\0' &&
         !IsUncommitted(directory_name, contents.attempt);
}

size_t CommittedBytes(const Contents& contents, const char* directory_name) {
  if (contents.attempt == AttemptId{}) return 0;
  if (const size_t bytes = BytesBefore(directory_name, kPartial); bytes != 0) {
    return CarriesAttempt(directory_name, contents.attempt) ? 0 : bytes;
  }
  return IsRetiredName(directory_name) ? 0 : BytesBefore(directory_name, kRetired);
}

bool IsRetiredName(const char* directory_name) {
  return directory_name[0] == '.' && BytesBefore(directory_name, kRetired) > 1;
}

Contents LookInto(int directory, char* buffer) {
  Inventory inventory;
  return LookInto(directory, buffer, &inventory);
}

Contents LookInto(int directory, char* buffer, Inventory* inventory) {
  HOLDFAST_ASSERT(directory >= 0 && buffer != nullptr);
  Contents contents;
  contents.error_number = inventory->Read(directory, buffer, &contents);
  if (contents.error_number != 0) return contents;
  int error = 0;
  const int listed = ForEachEntry(directory, buffer, [&](const char* name) {
    struct stat status = {};
    if (sys::Sys().fstatat(directory, name, &status, AT_SYMLINK_NOFOLLOW) != 0) {
      error = errno == ENOENT ? 0 : errno;  // Removed since the listing.
      return error == 0;
    }
    contents.holds_directory = S_ISDIR(status.st_mode);
    if (S_ISREG(status.st_mode) && inventory->Holds(name)) return true;
    if (contents.holds_directory || contents.foreign[0] == '\0')
      CopyText(name, contents.foreign, sizeof(contents.foreign));
    return !contents.holds_directory;
  });
  contents.error_number = listed != 0 ? listed : error;
  return contents;
}

}  // namespace holdfast::worker
