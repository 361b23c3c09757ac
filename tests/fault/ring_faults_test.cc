// Faults beyond the reach of a filter of system calls (integrity-fuzz --faults): failed and short
// transfers of a ring, failed set-ups and waits of a ring, failed calls of close and munmap with a
// done effect. Each call fails once, at the n-th use, until a save has fewer uses.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <new>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "runtime/sys/system.h"
#include "tests/testing/save_test.h"

namespace holdfast::testing {
namespace {

constexpr int kShort = 1 << 20;       // in place of an errno: half of the bytes
constexpr int kNone = (1 << 20) + 1;  // no byte, and no error

/// Shared with forked workers: the fault happens once in all of them together.
struct Shared {
  std::atomic<long> calls{0};
  std::atomic<bool> fired{false};
};
Shared* g_shared = nullptr;
long g_fail_at = 0;
int g_error = 0;

bool FailNow() {
  if (++g_shared->calls != g_fail_at) return false;
  return !g_shared->fired.exchange(true);
}

int FaultyClose(int fd) {
  const int result = sys::kKernel.close(fd);
  if (!FailNow()) return result;
  errno = g_error;
  return -1;
}
int FaultyUnmap(void* address, size_t bytes) {
  const int result = sys::kKernel.munmap(address, bytes);
  if (!FailNow()) return result;
  errno = g_error;
  return -1;
}
int FaultyWait(idtype_t type, id_t id, siginfo_t* out, int options) {
  const int result = sys::kKernel.waitid(type, id, out, options);
  if (!FailNow()) return result;
  errno = g_error;
  return -1;
}
int FaultyThread(pthread_t* out, const pthread_attr_t* attributes, void* (*body)(void*),
                 void* argument) {
  return FailNow() ? g_error : sys::kKernel.thread_create(out, attributes, body, argument);
}
int FaultyInit(unsigned entries, io_uring* ring, io_uring_params* parameters) {
  return FailNow() ? -g_error : sys::kKernel.uring_queue_init_params(entries, ring, parameters);
}
int FaultyBuffers(io_uring* ring, const iovec* buffers, unsigned count) {
  return FailNow() ? -g_error : sys::kKernel.uring_register_buffers(ring, buffers, count);
}
int FaultyFiles(io_uring* ring, const int* fds, unsigned count) {
  return FailNow() ? -g_error : sys::kKernel.uring_register_files(ring, fds, count);
}
int FaultyUpdate(io_uring* ring, unsigned index, const int* fds, unsigned count) {
  return FailNow() ? -g_error : sys::kKernel.uring_register_files_update(ring, index, fds, count);
}
int FaultySubmit(io_uring* ring) { return FailNow() ? -g_error : sys::kKernel.uring_submit(ring); }
int FaultyRingWait(io_uring* ring, io_uring_cqe** out, int64_t timeout_ns) {
  return FailNow() ? -g_error : sys::kKernel.uring_wait(ring, out, timeout_ns);
}
int32_t FaultyResult(uint8_t, uint64_t, int32_t result) {
  if (result <= 0 || !FailNow()) return result;
  if (g_error == kNone) return 0;
  return g_error == kShort ? result / 2 / 4096 * 4096 : -g_error;
}

struct Call {
  const char* name;
  void (*install)();
  std::vector<int> errors;
};

const std::vector<Call>& Calls() {
  static const auto* const calls = new std::vector<Call>{
      {"close", [] { sys::g_system.close = FaultyClose; }, {EIO, EINTR, ENOSPC, EDQUOT}},
      {"munmap", [] { sys::g_system.munmap = FaultyUnmap; }, {ENOMEM}},
      {"waitid", [] { sys::g_system.waitid = FaultyWait; }, {ECHILD, EINTR}},
      {"thread", [] { sys::g_system.thread_create = FaultyThread; }, {EAGAIN, ENOMEM}},
      {"ring", [] { sys::g_system.uring_queue_init_params = FaultyInit; }, {EPERM, ENOMEM, ENOSYS}},
      {"buffers", [] { sys::g_system.uring_register_buffers = FaultyBuffers; }, {ENOMEM, EFAULT}},
      {"files", [] { sys::g_system.uring_register_files = FaultyFiles; }, {ENOMEM, EMFILE}},
      {"update", [] { sys::g_system.uring_register_files_update = FaultyUpdate; }, {ENOMEM, EBADF}},
      {"submit", [] { sys::g_system.uring_submit = FaultySubmit; }, {EAGAIN, EBUSY, EINTR, EIO}},
      {"wait", [] { sys::g_system.uring_wait = FaultyRingWait; }, {EINTR, EAGAIN, EIO}},
      {"transfer",
       [] { sys::g_system.uring_result = FaultyResult; },
       {EIO, ENOSPC, EDQUOT, EFBIG, EAGAIN, EINTR, ECANCELED, ENOMEM, EINVAL, EOPNOTSUPP, kShort,
        kNone}},
  };
  return *calls;
}

/// Launchers whose workers inherit the table.
class RingFaults : public SaveTest, public ::testing::WithParamInterface<Setting> {
 protected:
  void SetUp() override {
    SaveTest::SetUp();
    void* const memory =
        mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    g_shared = new (memory) Shared;
  }
  void TearDown() override {
    sys::g_system = sys::kKernel;
    munmap(g_shared, sizeof(Shared));
    SaveTest::TearDown();
  }

  /// One save with the n-th use of a call failing. Returns false if the call was used less often.
  bool SaveWithFault(const Call& call, int error, long n) {
    SCOPED_TRACE(absl::StrCat(call.name, " ", n, " fails with ", error));
    CheckpointerOptions options = SmallOptions(directory());
    std::tie(options.launcher, options.engine) = GetParam();
    options.read_back = true;
    const TrainingState state = TrainingState::Uniform(2, 300'000, 7);
    const std::string path = absl::StrCat(directory(), "/victim");
    g_shared->calls = 0;
    g_shared->fired = false;
    g_fail_at = n;
    g_error = error;
    {
      const auto checkpointer = Make(options);
      if (checkpointer == nullptr) return false;
      call.install();
      const auto report = Save(checkpointer.get(), "victim", state);
      const absl::Status cleared = checkpointer->Flush(kLong);
      sys::g_system = sys::kKernel;
      if (report.ok()) {
        ExpectSound(path);
        EXPECT_TRUE(state.CompareWith(path).ok()) << state.CompareWith(path);
      } else {
        EXPECT_TRUE(absl::StrContains(report.status().message(), "victim") ||
                    absl::StrContains(report.status().message(), "staging"))
            << report.status();
        EXPECT_FALSE(std::filesystem::exists(path) && !cleared.ok()) << cleared;
      }
      std::filesystem::remove_all(path);
      ExpectRecovered(checkpointer.get());
      std::filesystem::remove_all(absl::StrCat(directory(), "/next"));
    }
    return g_shared->fired;
  }
};
INSTANTIATE_TEST_SUITE_P(All, RingFaults,
                         ::testing::Values(Setting(Launcher::kThread, EngineRung::kUringFixed),
                                           Setting(Launcher::kFork, EngineRung::kUring),
                                           Setting(Launcher::kFork, EngineRung::kPwrite)),
                         SettingName);

TEST_P(RingFaults, EachEndsInASoundCheckpointOrAnError) {
  SavePrevious(directory());
  // Every error at every use in the long run, else a few, drawn from a fixed seed.
  const bool every = std::getenv("HOLDFAST_LONG") != nullptr;
  std::mt19937 random(7);
  int fired = 0;
  for (const Call& call : Calls()) {
    const size_t drawn = random() % call.errors.size();
    for (size_t i = 0; i < call.errors.size(); ++i) {
      if (!every && i != drawn) continue;
      for (long n = 1; n < 500; n += every ? 1 : 1 + static_cast<long>(random() % 30)) {
        if (!SaveWithFault(call, call.errors[i], n)) break;
        ++fired;
        if (HasFailure()) return;
      }
    }
  }
  std::cout << fired << " faults\n";
  EXPECT_GE(fired, 6);
}

using KeptRing = RingFaults;
INSTANTIATE_TEST_SUITE_P(All, KeptRing,
                         ::testing::Values(Setting(Launcher::kThread, EngineRung::kUringFixed)),
                         SettingName);

TEST_P(KeptRing, IsNotKeptWhenItBrokeBehindTheLastTransfer) {
  SavePrevious(directory());
  const Call submit = {"submit", [] { sys::g_system.uring_submit = FaultySubmit; }, {EIO}};
  long n = 1;
  while (SaveWithFault(submit, EIO, n) && !HasFailure()) ++n;
  EXPECT_GT(n, 3);
}

}  // namespace
}  // namespace holdfast::testing
