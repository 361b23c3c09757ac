#include "tools/bench/fio.h"

#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"

namespace holdfast::bench {
namespace {

/// In single quotes, as a shell takes it.
std::string Quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

absl::StatusOr<std::string> Output(const std::string& command) {
  std::FILE* const pipe = popen(command.c_str(), "re");
  if (pipe == nullptr) return absl::UnavailableError("start fio");
  std::string out;
  std::array<char, 4096> buffer;
  for (size_t got = 0; (got = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) {
    out.append(buffer.data(), got);
  }
  if (pclose(pipe) != 0) return absl::UnavailableError("fio failed or is not installed");
  return out;
}

/// Bytes per second of the whole job: fio counts its fsync at the end as run time.
absl::StatusOr<double> Rate(const std::string& text, const char* direction) {
  const size_t begin = text.find('{');  // Notes may stand in front of the document.
  nlohmann::json json;
  if (begin != std::string::npos) json = nlohmann::json::parse(text.substr(begin), nullptr, false);
  const nlohmann::json::json_pointer at(std::string("/jobs/0/") + direction);
  if (json.is_discarded() || !json.contains(at)) {
    return absl::UnavailableError("fio's output is not understood");
  }
  const double bytes = json[at].value("io_bytes", 0.0);
  const double milliseconds = json[at].value("runtime", 0.0);
  if (milliseconds <= 0) return absl::UnavailableError("fio measured no time");
  constexpr double kMsPerSecond = 1e3;
  return bytes / milliseconds * kMsPerSecond;
}

absl::StatusOr<double> Run(const std::string& path, uint64_t bytes, const char* direction,
                           const char* more) {
  absl::StatusOr<double> rate = absl::UnavailableError("fio was not run");
  // Where io_uring is forbidden, the next best.
  for (const char* engine :
       {"--ioengine=io_uring --fixedbufs=1 --registerfiles=1", "--ioengine=libaio"}) {
    const absl::StatusOr<std::string> text = Output(absl::StrCat(
        "fio --name=raw --filename=", Quoted(path), " --rw=", direction, " --size=", bytes,
        " --bs=4m --iodepth=8 --direct=1 --invalidate=0 --output-format=json ", engine, " ", more,
        " 2>/dev/null"));
    rate = text.ok() ? Rate(*text, direction) : absl::StatusOr<double>(text.status());
    if (rate.ok()) break;
  }
  return rate;
}

}  // namespace

absl::StatusOr<double> FioWrite(const std::string& path, uint64_t bytes) {
  return Run(path, bytes, "write", "--fallocate=native --end_fsync=1");
}

absl::StatusOr<double> FioRead(const std::string& path, uint64_t bytes) {
  return Run(path, bytes, "read", "--allow_file_create=0");
}

}  // namespace holdfast::bench
