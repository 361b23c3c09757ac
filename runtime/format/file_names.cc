#include "runtime/format/file_names.h"

#include <algorithm>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "holdfast/pod.h"
#include "runtime/digest/digest.h"
#include "runtime/format/text.h"
#include "runtime/layout/board.h"
#include "runtime/layout/job.h"

namespace holdfast::format {
namespace {

constexpr size_t kNewNameBytesMax = kNameBytes - sizeof(".tmp");
constexpr absl::string_view kManifestPrefix = "rank-";
constexpr absl::string_view kManifestSuffix = ".manifest.json";
constexpr absl::string_view kCommitPrefix = "holdfast.commit-";
constexpr absl::string_view kCommitSuffix = ".json";
constexpr absl::string_view kCompanionInfix = ".holdfast-";
constexpr absl::string_view kDrainLockPrefix = ".holdfast-drain-";
constexpr absl::string_view kDrainLockSuffix = ".lock";
constexpr size_t kDrainNumberDigits = 8;
constexpr absl::string_view kBesideRecordName = "holdfast.beside.json";
constexpr absl::string_view kManifestOfFile = ".json";
constexpr absl::string_view kTemporary = ".tmp";
// ".NAME.holdfast-<32 hex>.json.tmp" is the longest name.
constexpr size_t kSingleNameBytesMax = kNameBytes - 1 - 1 - kCompanionInfix.size() -
                                       digest::kHexDigits - kManifestOfFile.size() -
                                       kTemporary.size();

absl::string_view SuffixOf(CompanionKind kind) {
  switch (kind) {
    case CompanionKind::kManifest:
      return kManifestOfFile;
    case CompanionKind::kManifestTemporary:
      return ".json.tmp";
    case CompanionKind::kTemporary:
      break;
  }
  return kTemporary;
}

}  // namespace

const char* WrongComponent(absl::string_view name) {
  if (name.empty()) return "the name is empty";
  if (name == "." || name == "..") return "the name is a directory's";
  if (absl::StrContains(name, '/')) return "the name has a '/'";
  if (absl::StrContains(name, '\0')) return "the name has a zero byte";
  if (name.size() > kNameBytes - 1) return "the name has more than 255 bytes";
  if (!IsUtf8(name)) return "the name is not UTF-8";
  return nullptr;
}

const char* WrongDataFileName(absl::string_view name) {
  const char* const wrong = WrongComponent(name);
  if (wrong != nullptr) return wrong;
  if (absl::StartsWith(name, kManifestPrefix) && absl::EndsWith(name, kManifestSuffix)) {
    return "the name is a rank manifest's";
  }
  if (name == layout::kCommitRecordName || ParseCommitRecordName(std::string(name)).has_value()) {
    return "the name is a commit record's";
  }
  if (ParseCompanionName(std::string(name)).has_value()) {
    return "the name is that of a single file's manifest";
  }
  if (absl::EndsWith(name, ".tmp")) return "the name ends in \".tmp\"";
  return nullptr;
}

const char* WrongNewFileName(absl::string_view name) {
  static_assert(kNewNameBytesMax == 251);
  if (name.size() > kNewNameBytesMax && name.size() < kNameBytes)
    return "the name has more than 251 bytes, and the file is written as NAME.tmp first";
  if (name == layout::kBoardName) return "the name is the rank board's";
  if (name == kBesideRecordName) return "the name is that of a drain's record";
  return WrongDataFileName(name);
}

bool IsDrainLock(absl::string_view name) {
  return absl::ConsumePrefix(&name, kDrainLockPrefix) &&
         absl::ConsumeSuffix(&name, kDrainLockSuffix) && name.size() == kDrainNumberDigits &&
         std::all_of(name.begin(), name.end(), absl::ascii_isxdigit);
}

const char* WrongSingleFileName(absl::string_view name) {
  static_assert(kSingleNameBytesMax == 203);
  if (name.size() > kSingleNameBytesMax && name.size() < kNameBytes)
    return "the name has more than 203 bytes, and the manifest beside the file has a longer one";
  return WrongNewFileName(name);
}

std::string ManifestPrefix() { return std::string(kManifestPrefix); }

std::string ManifestSuffix(uint32_t world_size) {
  return absl::StrFormat("-of-%05d.manifest.json", world_size);
}

std::string ManifestName(uint32_t rank, uint32_t world_size) {
  return absl::StrFormat("rank-%05d-of-%05d.manifest.json", rank, world_size);
}

std::string ManifestName(uint32_t rank, uint32_t world_size, const AttemptId& attempt) {
  return absl::StrFormat("rank-%05d-of-%05d-%016x%016x.manifest.json", rank, world_size,
                         attempt.high, attempt.low);
}

std::optional<ManifestIdentity> ParseManifestName(const std::string& name) {
  constexpr size_t kDigitsAt = kManifestPrefix.size();
  if (!absl::StartsWith(name, kManifestPrefix)) return std::nullopt;
  const size_t of = name.find("-of-", kDigitsAt);
  const size_t dot = name.find('.', kDigitsAt);
  if (of == std::string::npos || dot == std::string::npos || dot < of) return std::nullopt;
  const size_t dash = std::min(name.find('-', of + 4), dot);
  ManifestIdentity identity;
  if (!absl::SimpleAtoi(name.substr(kDigitsAt, of - kDigitsAt), &identity.rank) ||
      !absl::SimpleAtoi(name.substr(of + 4, dash - of - 4), &identity.world_size)) {
    return std::nullopt;
  }
  if (dash < dot) {
    const std::string hex = name.substr(dash + 1, dot - dash - 1);
    AttemptId attempt;
    if (hex.size() != digest::kHexDigits || !digest::FromHex(hex.c_str(), &attempt))
      return std::nullopt;
    identity.attempt = attempt;
  }
  // Only the canonical spelling is a manifest: "rank-1-of-2..." and "rank-00001.tmp" are not.
  if (identity.world_size == 0 || identity.rank >= identity.world_size) return std::nullopt;
  const std::string canonical =
      identity.attempt.has_value()
          ? ManifestName(identity.rank, identity.world_size, *identity.attempt)
          : ManifestName(identity.rank, identity.world_size);
  if (canonical != name) return std::nullopt;
  return identity;
}

std::string CommitRecordName(const AttemptId& attempt) {
  return absl::StrFormat("%s%016x%016x%s", kCommitPrefix, attempt.high, attempt.low, kCommitSuffix);
}

std::optional<AttemptId> ParseCommitRecordName(const std::string& name) {
  AttemptId attempt;
  if (name.size() != kCommitPrefix.size() + digest::kHexDigits + kCommitSuffix.size() ||
      !absl::StartsWith(name, kCommitPrefix) || !absl::EndsWith(name, kCommitSuffix) ||
      !digest::FromHex(name.c_str() + kCommitPrefix.size(), &attempt)) {
    return std::nullopt;
  }
  return attempt;
}

bool IsCommitFile(const std::string& name) {
  return name == layout::kCommitRecordName || ParseManifestName(name).has_value() ||
         ParseCommitRecordName(name).has_value();
}

std::string CompanionName(const Companion& companion) {
  return absl::StrFormat(".%s%s%016x%016x%s", companion.file, kCompanionInfix,
                         companion.attempt.high, companion.attempt.low, SuffixOf(companion.kind));
}

std::optional<Companion> ParseCompanionName(const std::string& name) {
  for (const CompanionKind kind :
       {CompanionKind::kManifest, CompanionKind::kManifestTemporary, CompanionKind::kTemporary}) {
    const size_t tail = kCompanionInfix.size() + digest::kHexDigits + SuffixOf(kind).size();
    if (name.size() < 2 + tail || name[0] != '.' || !absl::EndsWith(name, SuffixOf(kind))) continue;
    const size_t infix = name.size() - tail;
    Companion companion = {.file = name.substr(1, infix - 1), .kind = kind, .attempt = {}};
    if (absl::string_view(name).substr(infix, kCompanionInfix.size()) != kCompanionInfix ||
        !digest::FromHex(name.c_str() + infix + kCompanionInfix.size(), &companion.attempt)) {
      continue;
    }
    return companion;
  }
  return std::nullopt;
}

std::string ModelFileName(uint32_t rank, uint32_t world_size) {
  return absl::StrFormat("model-%05d-of-%05d.safetensors", rank, world_size);
}

}  // namespace holdfast::format
