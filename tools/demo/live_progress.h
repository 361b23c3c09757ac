// What a person sees while saves are in flight: a bar on a terminal, and lines when something ends.
#ifndef HOLDFAST_TOOLS_DEMO_LIVE_PROGRESS_H_
#define HOLDFAST_TOOLS_DEMO_LIVE_PROGRESS_H_

#include <condition_variable>
#include <cstdio>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "holdfast/save.h"
#include "tools/progress_bar.h"

namespace holdfast::demo {

/// Shows the oldest save in flight on standard error, and prints lines without tearing it. Not a
/// terminal: lines only.
///
/// \threadsafety All methods may be called from any thread.
class LiveProgress {
 public:
  /// Lines go to `lines`.
  explicit LiveProgress(std::FILE* lines);
  ~LiveProgress();
  LiveProgress(const LiveProgress&) = delete;
  LiveProgress& operator=(const LiveProgress&) = delete;

  void Watch(const std::string& name, const SaveHandle& save);
  void Print(const std::string& line);

 private:
  struct Watched {
    std::string name;
    SaveHandle save;
  };

  void Run();
  void Draw();  // with mutex_ held

  std::FILE* const lines_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::deque<Watched> watched_;
  std::unique_ptr<tools::ProgressBar> bar_;  // of watched_.front()
  std::thread thread_;
};

}  // namespace holdfast::demo

#endif  // HOLDFAST_TOOLS_DEMO_LIVE_PROGRESS_H_
