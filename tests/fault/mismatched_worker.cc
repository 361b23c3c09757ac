// A worker program of another version of Holdfast, as after an upgrade during a run: reads the
// first message, finds another version, and ends like the real program.
#include <sys/socket.h>

#include "runtime/layout/wire.h"

int main() {
  constexpr unsigned kOurVersion = holdfast::layout::kLayoutVersion + 1;
  holdfast::layout::Message message;
  const ssize_t got = recv(holdfast::layout::kWorkerSocketFd, &message, sizeof(message), 0);
  const bool ours =
      got == static_cast<ssize_t>(sizeof(message)) && message.layout_version == kOurVersion;
  return ours ? 0 : holdfast::layout::kExitMismatch;
}
