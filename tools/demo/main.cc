// holdfast-demo: the main job, to be watched.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "holdfast/version.h"
#include "tools/demo/session.h"
#include "tools/standard_output.h"
#include "tools/words.h"

namespace holdfast::demo {
namespace {

constexpr char kAbout[] =
    "Trains a model's state and saves checkpoints of it while the training goes on.\n"
    "\n"
    "Every step changes every element of the state. Saves run in the background; at the end all\n"
    "checkpoints are verified, and the newest is loaded back and compared with the state as it "
    "was\n"
    "when the save was asked for.";

constexpr char kMore[] =
    "Exit status: 0 everything is sound; 1 damage was found (with --mutate-sealed: as it should\n"
    "be); 2 damage was done and not found; 3 a save, a load or the set-up failed; 64 the command\n"
    "line is wrong.\n"
    "\n"
    "Examples:\n"
    "  holdfast-demo --dir /data/checkpoints\n"
    "  holdfast-demo model.safetensors --dir /data/checkpoints --saves 5 --launcher persistent\n"
    "  holdfast-demo --arena-bytes 512M        a save larger than the staging memory streams\n"
    "  holdfast-demo --mutate-sealed           a save whose memory was overwritten is refused\n";

void Declare(CLI::App* app, Options* options) {
  app->add_option("FILE", options->file,
                  "A safetensors file whose tensors are trained; without it, parameters and\n"
                  "optimizer state of the size of GPT-2 (1.4 GiB)")
      ->check(CLI::ExistingFile);
  app->add_option("--dir", options->directory,
                  "Where checkpoints are kept; made if it does not exist. Without it a temporary\n"
                  "directory, removed at the end");
  app->add_option("--saves", options->saves, "Number of checkpoints")
      ->check(CLI::Range(1u, 100000u))
      ->capture_default_str();
  app->add_option("--steps-between", options->steps_between, "Training steps from save to save")
      ->check(CLI::Range(1u, 1000000u))
      ->capture_default_str();
  app->add_option("--launcher", options->launcher, "How the writing side is started")
      ->transform(CLI::CheckedTransformer(tools::LauncherWords(), CLI::ignore_case))
      ->default_str("spawn");
  app->add_option("--engine", options->engine, "How bytes reach the file")
      ->transform(CLI::CheckedTransformer(tools::EngineWords(), CLI::ignore_case))
      ->default_str("auto");
  app->add_option("--arena-bytes", options->arena_bytes,
                  "Staging memory, as 512M or 2GiB; 0 is as much as the state needs")
      ->transform(CLI::AsSizeValue(false));
  app->add_option("--threads", options->threads, "Threads of the training step; 0 is one per CPU")
      ->check(CLI::Range(0u, 256u));
  app->add_option("--seed", options->seed, "Of the training's noise")->capture_default_str();
  app->add_option("--keep-last", options->keep_last,
                  "Keep the newest N checkpoints and delete older ones; 0 keeps all");
  app->add_flag("--read-back", options->read_back,
                "Compare what is really on disk before a checkpoint counts");
  app->add_flag("--replace", options->replace, "Replace checkpoints of the same name");
  app->add_flag("--json", options->json, "One JSON document on standard output");
  app->add_flag("--mutate-sealed", options->mutate_sealed,
                "Overwrite sealed staging memory before it is written, as a framework's\n"
                "allocator would: the save must be refused");
}

/// Makes the directory of the checkpoints: the given directory, or a temporary directory.
std::error_code MakeDirectory(Options* options) {
  std::error_code error;
  if (!options->directory.empty()) {
    std::filesystem::create_directories(options->directory, error);
    return error;
  }
  // /tmp is often a file system in memory, unfit for a demo of writing.
  const char* const place = std::getenv("TMPDIR");
  options->directory = std::string(place != nullptr ? place : "/var/tmp") + "/holdfast-demo-XXXXXX";
  options->temporary = mkdtemp(options->directory.data()) != nullptr;
  return options->temporary ? error : std::error_code(errno, std::generic_category());
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app(kAbout, "holdfast-demo");
  app.footer(kMore);
  app.set_version_flag("--version", absl::StrCat("holdfast-demo ", Version()));
  Declare(&app, &options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int status = app.exit(error) == 0 ? kExitSound : kExitUsage;
    return tools::ExitStatus("holdfast-demo", status, kExitFailed);
  }
  if (const std::error_code error = MakeDirectory(&options); error) {
    std::fprintf(stderr, "holdfast-demo: %s: %s\n", options.directory.c_str(),
                 error.message().c_str());
    return kExitFailed;
  }
  const absl::Cleanup remove = [&options] {
    std::error_code ignored;
    if (options.temporary) std::filesystem::remove_all(options.directory, ignored);
  };
  const Outcome outcome = RunSession(options);
  std::fputs(Text(options, outcome).c_str(), Lines(options));
  if (options.json) std::fputs(Json(options, outcome).c_str(), stdout);
  return tools::ExitStatus("holdfast-demo", outcome.exit_status, kExitFailed);
}

}  // namespace
}  // namespace holdfast::demo

int main(int argc, char** argv) { return holdfast::demo::Main(argc, argv); }
