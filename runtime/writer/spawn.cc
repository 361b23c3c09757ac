#include "runtime/writer/spawn.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <unistd.h>

#include "absl/cleanup/cleanup.h"
#include "runtime/base/status.h"
#include "runtime/layout/wire.h"
#include "runtime/sys/system.h"

namespace holdfast::writer {

absl::StatusOr<pid_t> SpawnWorker(const std::string& program, const std::string& title, bool kept,
                                  int socket) {
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  if (int error = posix_spawn_file_actions_init(&actions); error != 0) {
    return base::ErrnoStatus("start", program, error);
  }
  const absl::Cleanup free_actions = [&actions] { posix_spawn_file_actions_destroy(&actions); };
  if (int error = posix_spawnattr_init(&attributes); error != 0)
    return base::ErrnoStatus("start", program, error);
  const absl::Cleanup free_attributes = [&attributes] { posix_spawnattr_destroy(&attributes); };

  // The socket first: the remaining actions may overwrite its number.
  int error = posix_spawn_file_actions_adddup2(&actions, socket, layout::kWorkerSocketFd);
  if (error == 0)
    error = posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  if (error == 0)
    error = posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  // A launcher, a CI job or a log collector reads the trainer's standard error to its end, and a
  // worker may outlive its trainer.
  if (error == 0)
    error = posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  // The host's fds that are not close-on-exec (a listening socket, a CUDA device) are closed by the
  // worker itself: older C libraries have no action for it.
  sigset_t none;
  sigset_t all;
  sigemptyset(&none);
  sigfillset(&all);
  if (error == 0) error = posix_spawnattr_setsigmask(&attributes, &none);
  if (error == 0) error = posix_spawnattr_setsigdefault(&attributes, &all);
  if (error == 0) {
    error = posix_spawnattr_setflags(
        &attributes,
        static_cast<short>(POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSID));
  }
  if (error != 0) return base::ErrnoStatus("start", program, error);

  std::string name = "holdfast-worker";
  std::string mode = kept ? "--kept" : "--one-job";
  std::string what = title;
  char* const arguments[] = {name.data(), mode.data(), what.data(), nullptr};
  pid_t pid = -1;
  error = sys::Sys().posix_spawn(&pid, program.c_str(), &actions, &attributes, arguments, environ);
  if (error != 0) return base::ErrnoStatus("start worker program", program, error);
  return pid;
}

}  // namespace holdfast::writer
