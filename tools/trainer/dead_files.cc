#include "tools/trainer/dead_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/trainer/state.h"

namespace holdfast::trainer {
namespace {

namespace fs = std::filesystem;

constexpr size_t kPageBytes = 4096;
constexpr char kForeign[] = "no save had this";
constexpr char kManifestEnd[] = ".manifest.json";

/// The bytes of `file` once its save is complete.
std::vector<char> ImageOf(const PlannedFile& file) {
  std::vector<char> image(file.bytes);
  for (const Segment& segment : file.segments) {
    const void* const from =
        segment.tensor == Segment::kLiteral ? segment.literal.data() : segment.data;
    std::memcpy(image.data() + segment.file_offset, from, segment.bytes);
  }
  return image;
}

struct Found {
  uint64_t bytes_written = 0;
  uint64_t bytes_foreign = 0;
};

/// A byte of zero was reserved, or is beyond a short write.
Found Compare(int fd, std::vector<char> image) {
  image.resize((image.size() + kPageBytes - 1) / kPageBytes * kPageBytes);  // as direct writes
  Found found;
  char page[kPageBytes];
  for (size_t at = 0;; at += kPageBytes) {
    const ssize_t got = pread(fd, page, sizeof(page), static_cast<off_t>(at));
    if (got <= 0) return found;
    const size_t bytes = static_cast<size_t>(got);
    if (std::all_of(page, page + bytes, [](char byte) { return byte == 0; })) continue;
    found.bytes_written += bytes;
    if (at < image.size() && std::memcmp(page, image.data() + at, bytes) == 0) continue;
    for (size_t i = 0; i < bytes; ++i) {
      const char expected = at + i < image.size() ? image[at + i] : '\0';
      if (page[i] != 0 && page[i] != expected) ++found.bytes_foreign;
    }
  }
}

/// True for a checkpoint that another save has replaced: an exchange gives it the partial name
/// until it is removed, and its manifest goes last.
bool IsOfAnother(const std::string& directory, const std::string& attempt) {
  std::error_code error;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    if (!entry->path().string().ends_with(kManifestEnd)) continue;
    std::ifstream manifest(entry->path());
    const std::string text((std::istreambuf_iterator<char>(manifest)), {});
    if (!absl::StrContains(text, attempt)) return true;
  }
  return false;
}

}  // namespace

DeadFiles::~DeadFiles() {
  for (const Held& held : held_) close(held.fd);
}

void DeadFiles::Hold(uint64_t number) {
  const auto action = std::find_if(task_.actions.begin(), task_.actions.end(),
                                   [number](const Action& each) { return each.number == number; });
  if (action == task_.actions.end()) return;
  const std::string attempt =
      absl::StrFormat("%016x%016x", action->attempt.high, action->attempt.low);
  const std::string partial =
      absl::StrCat(task_.options.directory, "/", action->name, ".partial-", attempt);
  const int directory = open(partial.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory < 0) return;
  // By the descriptor: an exchange may come at any moment.
  const std::string path = absl::StrCat("/proc/self/fd/", directory, "/");
  const bool is_ours = !IsOfAnother(path, attempt);
  const std::lock_guard lock(mutex_);
  held_.reserve(held_.size() + action->files);  // so that no descriptor waits for memory
  for (uint32_t i = 0; is_ours && i < action->files; ++i) {
    DeadFile file = {.number = number, .files = action->files, .attempt = action->attempt};
    file.name = FileName(i, action->files, task_.options.rank, task_.options.world_size);
    for (const char* const ending : {".tmp", ""}) {
      const int fd = open(absl::StrCat(path, file.name, ending).c_str(), O_RDWR | O_CLOEXEC);
      if (fd < 0) continue;
      held_.push_back({fd, std::move(file)});
      break;
    }
  }
  close(directory);
}

void DeadFiles::Spoil() {
  const std::lock_guard lock(mutex_);
  for (const Held& held : held_) (void)!pwrite(held.fd, kForeign, sizeof(kForeign), 2 * kPageBytes);
}

void DeadFiles::Look(const std::vector<uint64_t>& pool) {
  const std::lock_guard lock(mutex_);
  for (const Held& held : held_) {
    Tell(held.fd, held.file, pool);
    close(held.fd);
  }
  held_.clear();
}

absl::Status DeadFiles::LookAt(const DeadFile& file, const std::vector<uint64_t>& pool) {
  const int fd = open(file.path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("open ", file.path));
  Tell(fd, file, pool);
  close(fd);
  return absl::OkStatus();
}

void DeadFiles::Tell(int fd, const DeadFile& file, const std::vector<uint64_t>& pool) {
  (void)fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, kPageBytes);  // waits for direct writes under way
  const CheckpointerOptions& options = task_.options;
  const State state(task_.states.at(file.number), pool, file.number, options.rank);
  const auto plan = state.Plan(file.files, options.rank, options.world_size, file.attempt);
  if (!plan.ok()) return teller_->TellFailure("crashed", file.number, plan.status());
  for (const PlannedFile& planned : plan->files) {
    if (planned.name != file.name) continue;
    const Found found = Compare(fd, ImageOf(planned));
    teller_->Tell("looked", {{"n", file.number},
                             {"file", file.name},
                             {"written", found.bytes_written},
                             {"foreign", found.bytes_foreign}});
  }
}

}  // namespace holdfast::trainer
