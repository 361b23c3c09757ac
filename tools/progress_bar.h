// A progress bar for programs: a line that redraws itself on a terminal, no output elsewhere.
#ifndef HOLDFAST_TOOLS_PROGRESS_BAR_H_
#define HOLDFAST_TOOLS_PROGRESS_BAR_H_

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

namespace holdfast::tools {

/// "3.1 GiB", "12 B".
std::string FormatBytes(double bytes);

/// Returns a line of at most `width` columns: label, bar, percentage, bytes, rate, time left.
std::string FormatBar(const std::string& label, uint64_t done, uint64_t total, double seconds,
                      int width);

/// \threadsafety One thread.
class ProgressBar {
 public:
  /// Draws on `stream` only if `wanted` is set and `stream` is a terminal that can redraw a line.
  ProgressBar(std::string label, std::FILE* stream, bool wanted);
  ~ProgressBar() { Clear(); }
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  /// Redraws at most ten times a second. Clamps `done` to `total`.
  void Update(uint64_t done, uint64_t total);

  /// Erases the bar, so that the program can print further lines.
  void Clear();

 private:
  using Clock = std::chrono::steady_clock;
  const std::string label_;
  std::FILE* const stream_;
  const bool enabled_;
  bool drawn_ = false;
  const Clock::time_point started_ = Clock::now();
  Clock::time_point redrawn_;
};

}  // namespace holdfast::tools

#endif  // HOLDFAST_TOOLS_PROGRESS_BAR_H_
