// The walk over a file of several zip archives, as verify reads it: records lie in the file and do
// not overlap; reads and time are linear in the file's length.
//
// The first byte of an input may repeat the others up to 32 KiB, so that quadratic work shows.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "fuzz/expect.h"
#include "fuzz/input.h"
#include "fuzz/planted.h"
#include "fuzz/time_bound.h"
#include "runtime/sys/system.h"
#include "runtime/verify/zip_archives.h"

namespace {

using holdfast::fuzz::Input;

constexpr uint64_t kReadFixed = 192 << 10;
constexpr uint64_t kReadPerByte = 6;  // four of the walk's own bound, and a window
constexpr uint64_t kWorkPerRead = 64;

uint64_t g_work = 0;

ssize_t CountedRead(int fd, void* buffer, size_t bytes, off_t offset) {
  const ssize_t got = holdfast::sys::kKernel.pread(fd, buffer, bytes, offset);
  g_work += kWorkPerRead + (got > 0 ? static_cast<uint64_t>(got) : 0);
  return got;
}

std::string File(const uint8_t* data, size_t bytes) {
  Input input(data, bytes);
  const uint8_t choice = input.Byte();
  std::string once(input.left(), '\0');
  input.Take(once.data(), once.size());
  // Rarely, because it is slow.
  if (once.empty() || choice % 16 != 1) return once;
  const size_t least = size_t{256} << (choice / 16 % 8);
  std::string file;
  while (file.size() < least) file += once;
  return file;
}

size_t EndRecords(const std::string& file) {
  size_t count = 0;
  for (size_t at = 0; (at = file.find("PK\x05\x06", at)) != std::string::npos; ++at) ++count;
  return count;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  static const int fd = [] {
    holdfast::sys::g_system.pread = CountedRead;
    return memfd_create("archives", MFD_CLOEXEC);
  }();
  const std::string file = File(data, bytes);
  HOLDFAST_EXPECT(ftruncate(fd, static_cast<off_t>(file.size())) == 0);
  HOLDFAST_EXPECT(pwrite(fd, file.data(), file.size(), 0) == static_cast<ssize_t>(file.size()));
  holdfast::verify::ZipArchives found;
  holdfast::fuzz::ExpectLinearTime(file.size(), [&] {
    g_work = 0;
    // As if the search began again at each end record.
    size_t times = holdfast::fuzz::Planted() ? 1 + EndRecords(file) : 1;
    while (times-- > 0) {
      auto walked = holdfast::verify::FindZipArchives(fd, "archives", file.size());
      HOLDFAST_EXPECT(walked.ok());
      found = *std::move(walked);
    }
  });
  HOLDFAST_EXPECT(g_work <= kReadFixed + kReadPerByte * file.size());
  uint64_t end = 0;
  for (const auto& record : found.records) {
    HOLDFAST_EXPECT(record.begin >= end && record.begin <= file.size());
    HOLDFAST_EXPECT(record.bytes <= file.size() - record.begin);
    end = record.begin + record.bytes;
  }
  uint64_t before = file.size();
  for (const auto& gap : found.gaps) {
    HOLDFAST_EXPECT(gap.begin < gap.end && gap.end <= before && !gap.why.ok());
    before = gap.begin;
  }
  HOLDFAST_EXPECT(found.archives > 0 || found.records.empty());
  return 0;
}
