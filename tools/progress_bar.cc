#include "tools/progress_bar.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace holdfast::tools {
namespace {

constexpr int kWidthDefault = 80;
constexpr std::chrono::milliseconds kRedrawEvery{100};

bool CanRedraw(std::FILE* stream) {
  if (isatty(fileno(stream)) == 0) return false;
  const char* terminal = std::getenv("TERM");
  return terminal != nullptr && std::strcmp(terminal, "dumb") != 0;
}

int WidthOf(std::FILE* stream) {
  struct winsize size = {};
  if (ioctl(fileno(stream), TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return kWidthDefault;
  return size.ws_col;
}

std::string FormatTime(double seconds) {
  const auto whole = static_cast<int64_t>(seconds + 0.5);
  return absl::StrFormat("%d:%02d", whole / 60, whole % 60);
}

}  // namespace

std::string FormatBytes(double bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < kUnits.size()) {
    bytes /= 1024;
    ++unit;
  }
  return unit == 0 ? absl::StrFormat("%.0f B", bytes)
                   : absl::StrFormat("%.1f %s", bytes, kUnits[unit]);
}

std::string FormatBar(const std::string& label, uint64_t done, uint64_t total, double seconds,
                      int width) {
  done = std::min(done, total);
  const double share = total == 0 ? 1 : static_cast<double>(done) / static_cast<double>(total);
  const double rate = seconds > 0 ? static_cast<double>(done) / seconds : 0;
  std::string right = absl::StrFormat(" %3.0f%% %s, %s/s", share * 100,
                                      FormatBytes(static_cast<double>(done)), FormatBytes(rate));
  if (rate > 0 && done < total) {
    absl::StrAppend(&right, ", ", FormatTime(static_cast<double>(total - done) / rate), " left");
  }
  constexpr int kBarMin = 10;
  constexpr int kBarMax = 40;
  // The last column stays empty: some terminals wrap as soon as it is written.
  const int room = width - 1 - static_cast<int>(right.size()) - 3;
  std::string left = label;
  const int label_room = std::max(0, room - kBarMin);
  if (static_cast<int>(left.size()) > label_room) left = left.substr(left.size() - label_room);
  const int bar = std::min(kBarMax, room - static_cast<int>(left.size()));
  if (bar < kBarMin) return right.substr(1, std::max(0, width - 1));
  const int filled = static_cast<int>(share * bar);
  return absl::StrCat(left, " [", std::string(filled, '#'), std::string(bar - filled, ' '), "]",
                      right);
}

ProgressBar::ProgressBar(std::string label, std::FILE* stream, bool wanted)
    : label_(std::move(label)), stream_(stream), enabled_(wanted && CanRedraw(stream)) {}

void ProgressBar::Update(uint64_t done, uint64_t total) {
  if (!enabled_) return;
  const Clock::time_point now = Clock::now();
  if (drawn_ && now - redrawn_ < kRedrawEvery) return;
  redrawn_ = now;
  const double seconds = std::chrono::duration<double>(now - started_).count();
  const std::string line = FormatBar(label_, done, total, seconds, WidthOf(stream_));
  // Back to the start of the line, the new text, and erase the rest of the old text.
  std::fprintf(stream_, "\r%s\x1b[K", line.c_str());
  std::fflush(stream_);
  drawn_ = true;
}

void ProgressBar::Clear() {
  if (!drawn_) return;
  std::fputs("\r\x1b[K", stream_);
  std::fflush(stream_);
  drawn_ = false;
}

}  // namespace holdfast::tools
