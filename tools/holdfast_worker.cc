// The spawned helper: serves the save jobs that its trainer sends over the socket at fd 3.
//
// A separate, small program. Its start costs the same for any size of trainer, and it holds no CUDA
// contexts, locks or fds of the trainer.
#include <cstdio>
#include <cstring>

#include "runtime/layout/wire.h"
#include "runtime/worker/serve.h"

namespace {

constexpr char kUsage[] =
    "holdfast-worker: writes checkpoints for a Holdfast trainer, which starts it by itself.\n"
    "It is not for use by hand. Arguments: --one-job or --kept, and a title for ps(1).\n";

}  // namespace

int main(int argc, char** argv) {
  using holdfast::Launcher;
  const char* const mode = argc > 1 ? argv[1] : "";
  if (std::strcmp(mode, "--help") == 0) {
    std::fputs(kUsage, stdout);
    return 0;
  }
  if (std::strcmp(mode, "--version") == 0) {
    std::printf("holdfast-worker %s, layout version %u\n", HOLDFAST_VERSION,
                holdfast::layout::kLayoutVersion);
    return 0;
  }
  const bool kept = std::strcmp(mode, "--kept") == 0;
  if ((!kept && std::strcmp(mode, "--one-job") != 0) ||
      !holdfast::worker::IsWorkerSocket(holdfast::layout::kWorkerSocketFd)) {
    std::fputs(kUsage, stderr);
    return holdfast::layout::kExitUsage;
  }
  return holdfast::worker::Serve({
      .socket = holdfast::layout::kWorkerSocketFd,
      .launcher = kept ? Launcher::kPersistent : Launcher::kSpawn,
      .jobs_max = kept ? 0u : 1u,
  });
}
