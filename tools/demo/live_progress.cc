#include "tools/demo/live_progress.h"

#include <chrono>

namespace holdfast::demo {
namespace {

constexpr std::chrono::milliseconds kRedrawEvery{100};

}  // namespace

LiveProgress::LiveProgress(std::FILE* lines) : lines_(lines), thread_([this] { Run(); }) {}

LiveProgress::~LiveProgress() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void LiveProgress::Watch(const std::string& name, const SaveHandle& save) {
  const std::lock_guard<std::mutex> lock(mutex_);
  watched_.push_back({name, save});
}

void LiveProgress::Print(const std::string& line) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (bar_ != nullptr) bar_->Clear();
  std::fprintf(lines_, "%s\n", line.c_str());
  std::fflush(lines_);
}

void LiveProgress::Draw() {
  while (!watched_.empty() && watched_.front().save.IsDone()) {
    bar_.reset();
    watched_.pop_front();
  }
  if (watched_.empty()) return;
  if (bar_ == nullptr) {
    bar_ = std::make_unique<tools::ProgressBar>("saving " + watched_.front().name, stderr, true);
  }
  const SaveProgress progress = watched_.front().save.progress();
  bar_->Update(progress.bytes_written, progress.bytes_total);
}

void LiveProgress::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    Draw();
    changed_.wait_for(lock, kRedrawEvery, [this] { return stopping_; });
  }
}

}  // namespace holdfast::demo
