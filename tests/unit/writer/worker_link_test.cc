// A kept worker that takes no job any more.
#include "runtime/writer/worker_link.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/sys/system.h"
#include "runtime/writer/worker_program.h"

namespace holdfast::writer {
namespace {

using ::testing::HasSubstr;

TEST(WorkerLink, WaitsNotForEverForAWorkerThatTakesNothing) {
  const auto program = FindWorkerProgram("");
  ASSERT_TRUE(program.ok()) << program.status();
  constexpr uint64_t kBytes = 4096;
  const int arena = ::memfd_create("test-arena", MFD_CLOEXEC);
  ASSERT_EQ(::ftruncate(arena, kBytes), 0);
  const auto link = WorkerLink::Launch({.launcher = Launcher::kPersistent,
                                        .program = *program,
                                        .title = "test",
                                        .arena_fd = arena,
                                        .arena_bytes = kBytes,
                                        .time_take_max = absl::Milliseconds(200)});
  ASSERT_TRUE(link.ok()) << link.status();
  ASSERT_EQ(::syscall(SYS_pidfd_send_signal, (*link)->pidfd(), SIGSTOP, nullptr, 0), 0);
  const int parent = ::open("/tmp", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  absl::Status refused;
  for (int i = 0; i < 10'000 && refused.ok(); ++i)
    refused = (*link)->Run(arena, 4096, parent, arena);
  EXPECT_TRUE(absl::IsDeadlineExceeded(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("it took none for 200ms"));
  (*link)->Kill();
  ::close(parent);
  ::close(arena);
}

/// As where the receiver has no descriptor left: see SCM_RIGHTS in unix(7).
ssize_t ReceiveWithoutDescriptors(int socket, msghdr* message, int flags) {
  const ssize_t got = sys::kKernel.recvmsg(socket, message, flags);
  if (got < 0) return got;
  for (cmsghdr* part = CMSG_FIRSTHDR(message); part != nullptr; part = CMSG_NXTHDR(message, part)) {
    for (size_t i = 0; i < (part->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
      int fd = -1;
      memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(fd));
      ::close(fd);
    }
  }
  message->msg_controllen = 0;
  message->msg_flags |= MSG_CTRUNC;
  return got;
}

TEST(WorkerLink, SaysThatAThreadHadNoDescriptorLeft) {
  constexpr uint64_t kBytes = 4096;
  const int arena = ::memfd_create("test-arena", MFD_CLOEXEC);
  ASSERT_EQ(::ftruncate(arena, kBytes), 0);
  sys::g_system.recvmsg = ReceiveWithoutDescriptors;
  auto link = WorkerLink::Launch(
      {.launcher = Launcher::kThread, .title = "test", .arena_fd = arena, .arena_bytes = kBytes});
  ASSERT_TRUE(link.ok()) << link.status();
  const absl::Time deadline = absl::Now() + absl::Minutes(1);
  while (!(*link)->IsGone() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_TRUE((*link)->IsGone());
  EXPECT_THAT((*link)->Reap(), HasSubstr("could not take its descriptors"));
  link->reset();  // joins the thread, which has used the table
  sys::g_system = sys::kKernel;
  ::close(arena);
}

}  // namespace
}  // namespace holdfast::writer
