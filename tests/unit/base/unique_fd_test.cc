#include "runtime/base/unique_fd.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <utility>

#include "gtest/gtest.h"
#include "runtime/sys/owned_fds.h"

namespace holdfast::base {
namespace {

bool IsOpen(int fd) { return fcntl(fd, F_GETFD) >= 0; }

/// Runs `body` in a forked child and returns its exit status.
template <typename Body>
int InChild(Body body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(UniqueFd, ClosesAtTheEndOfItsScope) {
  int number = -1;
  {
    UniqueFd fd(sys::OpenOwned(AT_FDCWD, "/dev/null", O_RDONLY | O_CLOEXEC, 0));
    number = fd.get();
    EXPECT_TRUE(IsOpen(number));
  }
  EXPECT_FALSE(IsOpen(number));
}

TEST(UniqueFd, ForeignForkClosesTheChildsCopyOnly) {
  UniqueFd fd(sys::OpenOwned(AT_FDCWD, "/dev/null", O_RDONLY | O_CLOEXEC, 0));
  EXPECT_EQ(InChild([&] { return IsOpen(fd.get()) ? 1 : 0; }), 0);
  EXPECT_TRUE(IsOpen(fd.get()));
}

TEST(UniqueFd, OwnForkKeepsTheChildsCopy) {
  UniqueFd fd(sys::OpenOwned(AT_FDCWD, "/dev/null", O_RDONLY | O_CLOEXEC, 0));
  const ForkScope own;
  EXPECT_EQ(InChild([&] { return IsOpen(fd.get()) ? 0 : 1; }), 0);
}

TEST(UniqueFd, ChildDoesNotCloseAReusedNumber) {
  UniqueFd fd(sys::OpenOwned(AT_FDCWD, "/dev/null", O_RDONLY | O_CLOEXEC, 0));
  EXPECT_EQ(InChild([&] {
              const int reused = dup2(STDERR_FILENO, fd.get());
              fd.Reset();
              return IsOpen(reused) ? 0 : 1;
            }),
            0);
}

TEST(UniqueFd, ChildDoesNotCloseAnFdOfItsOwnOfTheSameNumber) {
  UniqueFd fd(sys::OpenOwned(AT_FDCWD, "/dev/null", O_RDONLY | O_CLOEXEC, 0));
  EXPECT_EQ(InChild([&] {
              const UniqueFd own(sys::OpenOwned(AT_FDCWD, "/dev/null", O_RDONLY | O_CLOEXEC, 0));
              if (own.get() != fd.get()) return 2;
              UniqueFd moved = std::move(fd);
              moved.Reset();
              return IsOpen(own.get()) && !moved.valid() ? 0 : 1;
            }),
            0);
  EXPECT_TRUE(IsOpen(fd.get()));
}

TEST(UniqueFd, OwnChildClosesItsCopy) {
  UniqueFd fd(sys::OpenOwned(AT_FDCWD, "/dev/null", O_RDONLY | O_CLOEXEC, 0));
  const ForkScope own;
  EXPECT_EQ(InChild([&] {
              const int number = fd.get();
              fd.Reset();
              return IsOpen(number) ? 1 : 0;
            }),
            0);
}

TEST(ForkGuard, KnowsAChild) {
  const ForkGuard guard;
  EXPECT_TRUE(guard.InCreator());
  EXPECT_EQ(InChild([&] { return guard.InCreator() ? 1 : 0; }), 0);
}

}  // namespace
}  // namespace holdfast::base
