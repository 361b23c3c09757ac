// holdfast-demo: the main job, to be watched.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "tools/demo/live_progress.h"
#include "tools/demo/options.h"
#include "tools/demo/outcome.h"
#include "tools/demo/session.h"

namespace holdfast::demo {
namespace {

/// The directory of the checkpoints: given, or a temporary one that goes with this object.
class Directory {
 public:
  explicit Directory(Options* options) : options_(*options) {
    std::error_code error;
    if (!options->directory.empty()) {
      std::filesystem::create_directories(options->directory, error);
    } else {
      // /tmp is often a file system in memory, which is no place to show writing on.
      const char* const place = std::getenv("TMPDIR");
      std::string path =
          absl::StrCat(place != nullptr ? place : "/var/tmp", "/holdfast-demo-XXXXXX");
      if (mkdtemp(path.data()) == nullptr) error = std::error_code(errno, std::generic_category());
      options->directory = path;
      options->temporary = !error;
    }
    if (error) error_ = absl::StrCat(options->directory, ": ", error.message());
    options_ = *options;
  }
  ~Directory() {
    std::error_code ignored;
    if (options_.temporary) std::filesystem::remove_all(options_.directory, ignored);
  }
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;

  const std::string& error() const { return error_; }

 private:
  Options options_;
  std::string error_;
};

int Run(const Options& options) {
  std::FILE* const lines = options.json ? stderr : stdout;
  Outcome outcome;
  absl::Status status;
  {
    LiveProgress progress(lines);
    Session session(options, &progress);
    status = session.Prepare();
    if (status.ok()) {
      status = options.mischief == Mischief::kMutateAndRestore ? session.ShowReadBack()
                                                               : session.TrainAndSave();
    }
    outcome = session.outcome();
  }
  if (!status.ok()) {
    if (outcome.exit_status != kExitFaultMissed) outcome.exit_status = kExitFailed;
    outcome.findings.push_back(absl::StrCat("failed: ", status.ToString()));
  }
  std::fputs(Text(options, outcome).c_str(), lines);
  if (options.json) std::fputs(Json(options, outcome).c_str(), stdout);
  return outcome.exit_status;
}

}  // namespace
}  // namespace holdfast::demo

int main(int argc, char** argv) {
  int exit_status = 0;
  std::optional<holdfast::demo::Options> options =
      holdfast::demo::ParseOptions(argc, argv, &exit_status);
  if (!options.has_value()) return exit_status;
  const holdfast::demo::Directory directory(&*options);
  if (!directory.error().empty()) {
    std::fprintf(stderr, "holdfast-demo: %s\n", directory.error().c_str());
    return holdfast::demo::kExitFailed;
  }
  return holdfast::demo::Run(*options);
}
