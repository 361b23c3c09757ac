#include "tests/crash/kill_switch.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>

#include "runtime/sys/system.h"

namespace holdfast::testing {
namespace {

std::atomic<int> g_calls_left = 0;  // the threads of a save count together

void Count() {
  if (--g_calls_left == 0) raise(SIGKILL);
}

}  // namespace

std::string Scratch() { return access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp"; }

void ArmKillSwitch(int call) {
  g_calls_left = call;
  sys::SystemCalls& table = sys::g_system;
  table.openat = [](int directory, const char* path, int flags, mode_t mode) {
    if ((flags & O_CREAT) != 0) Count();
    return sys::kKernel.openat(directory, path, flags, mode);
  };
  table.mkdirat = [](int directory, const char* path, mode_t mode) {
    Count();
    return sys::kKernel.mkdirat(directory, path, mode);
  };
  table.write = [](int fd, const void* buffer, size_t bytes) {
    Count();
    return sys::kKernel.write(fd, buffer, bytes);
  };
  table.pwrite = [](int fd, const void* buffer, size_t bytes, off_t offset) {
    Count();
    return sys::kKernel.pwrite(fd, buffer, bytes, offset);
  };
  table.fsync = [](int fd) {
    Count();
    return sys::kKernel.fsync(fd);
  };
  table.renameat2 = [](int a, const char* from, int b, const char* to, unsigned flags) {
    Count();
    return sys::kKernel.renameat2(a, from, b, to, flags);
  };
  table.unlinkat = [](int directory, const char* path, int flags) {
    Count();
    return sys::kKernel.unlinkat(directory, path, flags);
  };
  table.flock = [](int fd, int operation) {
    Count();
    return sys::kKernel.flock(fd, operation);
  };
  table.fcntl = [](int fd, int command, long argument) {
    Count();
    return sys::kKernel.fcntl(fd, command, argument);
  };
}

}  // namespace holdfast::testing
