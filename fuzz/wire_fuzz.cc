// A worker's end of the socket: a message with file descriptors, and the attachment of an arena
// that an accepted message brings. No descriptor is left.
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "fuzz/expect.h"
#include "fuzz/input.h"
#include "fuzz/planted.h"
#include "runtime/layout/wire.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/worker/server.h"

namespace {

using namespace holdfast::worker;  // NOLINT: a fuzzer of this namespace
using holdfast::fuzz::Input;
using holdfast::layout::Message;
using holdfast::layout::MessageKind;

constexpr size_t kFdsMax = 8;
constexpr size_t kArenaBytes = 8192;
constexpr int kFdsSeen = 40;

enum Shape : uint8_t {
  kRaw = 1,     // any bytes instead of a message with the right magic and version
  kClosed = 2,  // the trainer has closed its end
};

/// One bit for each of the first descriptors that is open.
uint64_t OpenFds() {
  pollfd fds[kFdsSeen] = {};
  for (int fd = 0; fd < kFdsSeen; ++fd) fds[fd].fd = fd;
  HOLDFAST_EXPECT(poll(fds, kFdsSeen, 0) >= 0);
  uint64_t open = 0;
  for (int fd = 0; fd < kFdsSeen; ++fd) {
    open |= uint64_t{(fds[fd].revents & POLLNVAL) == 0} << fd;
  }
  return open;
}

void Send(int socket, const void* bytes, size_t length, const int* fds, size_t count) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kFdsMax)] = {};
  iovec part = {.iov_base = const_cast<void*>(bytes), .iov_len = length};
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (count > 0) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(sizeof(int) * count);
    cmsghdr* const item = CMSG_FIRSTHDR(&header);
    item->cmsg_level = SOL_SOCKET;
    item->cmsg_type = SCM_RIGHTS;
    item->cmsg_len = CMSG_LEN(sizeof(int) * count);
    std::memcpy(CMSG_DATA(item), fds, sizeof(int) * count);
  }
  HOLDFAST_EXPECT(sendmsg(socket, &header, MSG_NOSIGNAL) == static_cast<ssize_t>(length));
}

void ReceiveOne(Server* server, bool is_sound, const Message& sent, size_t fds) {
  Received received;
  const Receive how = ReceiveMessage(*server, &received);
  HOLDFAST_EXPECT((how == Receive::kMessage) == is_sound);
  HOLDFAST_EXPECT(received.fd_count <= holdfast::layout::kAttachFds);
  if (how == Receive::kMessage) {
    HOLDFAST_EXPECT(std::memcmp(&received.message, &sent, sizeof(sent)) == 0);
    HOLDFAST_EXPECT(static_cast<size_t>(received.fd_count) ==
                    std::min<size_t>(fds, holdfast::layout::kAttachFds));
    if (sent.kind == MessageKind::kAttach && Attach(server, &received) == 0) {
      HOLDFAST_EXPECT(fds >= holdfast::layout::kAttachFds && sent.bytes <= kArenaBytes);
      HOLDFAST_EXPECT(received.fd_count == 0);
      // The whole arena can be read.
      volatile char sum = 0;
      for (uint64_t at = 0; at < sent.bytes; at += 512) sum = sum ^ server->attached.arena[at];
    }
  }
  if (!(holdfast::fuzz::Planted() && how == Receive::kMismatch)) CloseAll(&received);
  Detach(server);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  // The arena's place holds a file of kArenaBytes.
  static const int arena = [] {
    const int fd = memfd_create("arena", MFD_CLOEXEC);
    HOLDFAST_EXPECT(ftruncate(fd, kArenaBytes) == 0);
    return fd;
  }();
  static Server* const server = new Server;
  const uint64_t before = OpenFds();

  Input input(data, bytes);
  const uint8_t shape = input.Byte();
  const size_t count = input.Below(kFdsMax + 1);
  const int fds[kFdsMax] = {arena, arena, arena, arena, arena, arena, arena, arena};
  uint8_t raw[sizeof(Message) + 8] = {};
  size_t length = sizeof(Message);
  Message sent;
  if ((shape & kRaw) != 0) {
    length = std::max<size_t>(1, input.Take(raw, sizeof(raw)));
  } else {
    input.Take(&sent.kind, sizeof(sent.kind));
    input.Take(&sent.bytes, sizeof(sent.bytes));
    std::memcpy(raw, &sent, sizeof(sent));
  }
  std::memcpy(static_cast<void*>(&sent), raw, sizeof(sent));
  const bool is_sound = length == sizeof(sent) && sent.magic == holdfast::layout::kWireMagic &&
                        sent.layout_version == holdfast::layout::kLayoutVersion;

  int ends[2] = {-1, -1};
  HOLDFAST_EXPECT(holdfast::sys::SocketPairOwned(SOCK_SEQPACKET, ends) == 0);
  server->options.socket = ends[0];
  Send(ends[1], raw, length, fds, count);
  if ((shape & kClosed) != 0) holdfast::sys::CloseOwned(ends[1]);
  ReceiveOne(server, is_sound, sent, count);
  if ((shape & kClosed) == 0) holdfast::sys::CloseOwned(ends[1]);
  holdfast::sys::CloseOwned(ends[0]);
  HOLDFAST_EXPECT(OpenFds() == before);
  return 0;
}
