// The queue's rung and reason when features of the machine are missing or forbidden.
#include <grp.h>
#include <liburing.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstddef>

#include "tests/testing/forbidden_calls.h"
#include "tests/unit/io_uring/queue_fixture.h"

namespace holdfast::io {
namespace {

class QueueLadderTest : public ::testing::Test {
 protected:
  QueueOptions Options() const {
    return {.region = region_.data(), .region_bytes = region_.bytes(), .may_register = true};
  }

  // Writes a block and reads the block back, which must work on any rung.
  static bool Works(Queue* queue, const Region& region) {
    const int fd = memfd_create("ladder", MFD_CLOEXEC);
    Completion end;
    const bool works =
        queue->Submit(
            {.opcode = Opcode::kWrite, .fd = fd, .buffer = region.data(), .bytes = 8192}) == 0 &&
        queue->Wait(&end, 1, 60'000, nullptr) == 1 && end.error == 0 && end.bytes == 8192;
    close(fd);
    return works;
  }

  void ExpectRung(EngineRung rung, const char* reason_part) {
    ASSERT_EQ(queue_->Open(Options()), 0) << queue_->reason();
    EXPECT_EQ(queue_->rung(), rung) << queue_->reason();
    EXPECT_NE(strstr(queue_->reason(), reason_part), nullptr) << queue_->reason();
    EXPECT_TRUE(Works(queue_.get(), region_));
    queue_->Close();
  }

  bool RingWorksHere() {
    Queue probe;
    return probe.Open({.rung = EngineRung::kUring}) == 0;
  }

  Region region_{1u << 20};
  std::unique_ptr<Queue> queue_ = std::make_unique<Queue>();
};

TEST_F(QueueLadderTest, TakesAndNamesTheBestRung) {
  ASSERT_EQ(queue_->Open(Options()), 0);
  EXPECT_NE(queue_->rung(), EngineRung::kAuto);
  EXPECT_GT(strlen(queue_->reason()), 0u);
  EXPECT_TRUE(Works(queue_.get(), region_));
}

TEST_F(QueueLadderTest, RegistersOnlyIfAllowed) {
  if (!RingWorksHere()) GTEST_SKIP() << "no io_uring here";
  QueueOptions options = Options();
  options.may_register = false;
  ASSERT_EQ(queue_->Open(options), 0);
  EXPECT_EQ(queue_->rung(), EngineRung::kUring);
  EXPECT_NE(strstr(queue_->reason(), "not asked for"), nullptr) << queue_->reason();
}

TEST_F(QueueLadderTest, ClimbsDownToThePlainRingIfRegistrationFails) {
  if (!RingWorksHere()) GTEST_SKIP() << "no io_uring here";
  static int error = 0;
  Planted planted(queue_.get());
  planted->uring_register_buffers = [](io_uring*, const iovec*, unsigned) { return -error; };
  error = ENOMEM;
  ExpectRung(EngineRung::kUring, "buffers not registered: ENOMEM (locked memory limit");
  error = EFAULT;
  ExpectRung(EngineRung::kUring, "buffers not registered: EFAULT");
  error = EOPNOTSUPP;
  ExpectRung(EngineRung::kUring, "buffers not registered: EOPNOTSUPP");
}

TEST_F(QueueLadderTest, DoesNotClimbDownFromARungThatWasAskedFor) {
  Planted planted(queue_.get());
  planted->uring_register_buffers = [](io_uring*, const iovec*, unsigned) { return -EFAULT; };
  QueueOptions options = Options();
  options.rung = EngineRung::kUringFixed;
  if (RingWorksHere()) {
    EXPECT_EQ(queue_->Open(options), EFAULT);
    EXPECT_NE(strstr(queue_->reason(), "EFAULT"), nullptr) << queue_->reason();
    EXPECT_EQ(queue_->rung(), EngineRung::kAuto);
  }
  planted->uring_queue_init_params = [](unsigned, io_uring*, io_uring_params*) { return -EPERM; };
  EXPECT_EQ(queue_->Open(options), EPERM);
  options.rung = EngineRung::kUring;
  EXPECT_EQ(queue_->Open(options), EPERM);
  EXPECT_EQ(queue_->Submit({.fd = 0, .buffer = region_.data(), .bytes = 1}), EBADF);
}

TEST_F(QueueLadderTest, DoesNotPinMoreThanTheLockLimit) {
  if (!RingWorksHere()) GTEST_SKIP() << "no io_uring here";
  static bool asked = false;
  Planted planted(queue_.get());
  planted->getrlimit = [](int, rlimit* out) {
    *out = {4096, 4096};
    return 0;
  };
  planted->capget = [](void*, void*) { return 0; };  // no capabilities
  planted->uring_register_buffers = [](io_uring*, const iovec*, unsigned) {
    asked = true;
    return 0;
  };
  ExpectRung(EngineRung::kUring, "ENOMEM (locked memory limit 4096 bytes)");
  EXPECT_FALSE(asked);
}

TEST_F(QueueLadderTest, ClimbsDownUnderARealLockLimit) {
  if (!RingWorksHere()) GTEST_SKIP() << "no io_uring here";
  if (geteuid() != 0) GTEST_SKIP() << "needs a capability to drop";
  const int status = InChild([this] {
    const rlimit limit = {512 * 1024, 512 * 1024};
    if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return 1;
    if (setgroups(0, nullptr) != 0 || setuid(65534) != 0) return 2;
    if (queue_->Open(Options()) != 0) return 3;
    if (strstr(queue_->reason(), "ENOMEM") == nullptr) return 4;
    return Works(queue_.get(), region_) ? 0 : 5;
  });
  EXPECT_EQ(status, 0);
}

TEST_F(QueueLadderTest, ClimbsDownToPwriteIfTheRingIsRefused) {
  static int error = 0;
  Planted planted(queue_.get());
  planted->uring_queue_init_params = [](unsigned, io_uring*, io_uring_params*) { return -error; };
  for (const auto& [number, name] : std::initializer_list<std::pair<int, const char*>>{
           {EPERM, "io_uring_setup: EPERM (seccomp filter or kernel.io_uring_disabled); pwrite"},
           {ENOSYS, "io_uring_setup: ENOSYS (not in this kernel"},
           {ENOMEM, "io_uring_setup: ENOMEM (memory limit)"},
           {EMFILE, "io_uring_setup: EMFILE; pwrite, threads: 2"}}) {
    error = number;
    ExpectRung(EngineRung::kPwrite, name);
  }
}

TEST_F(QueueLadderTest, DoesWithoutTheSetupFlagsOfNewKernels) {
  if (!RingWorksHere()) GTEST_SKIP() << "no io_uring here";
  Planted planted(queue_.get());
  planted->uring_queue_init_params = [](unsigned entries, io_uring* ring, io_uring_params* params) {
    if (params->flags != 0) return -EINVAL;
    return sys::kKernel.uring_queue_init_params(entries, ring, params);
  };
  ASSERT_EQ(queue_->Open(Options()), 0);
  EXPECT_NE(queue_->rung(), EngineRung::kPwrite) << queue_->reason();
  EXPECT_TRUE(Works(queue_.get(), region_));
}

TEST_F(QueueLadderTest, ClimbsDownIfTheKernelIsTooOld) {
  if (!RingWorksHere()) GTEST_SKIP() << "no io_uring here";
  Planted planted(queue_.get());
  planted->uring_queue_init_params = [](unsigned entries, io_uring* ring, io_uring_params* params) {
    const int result = sys::kKernel.uring_queue_init_params(entries, ring, params);
    ring->features &= ~static_cast<unsigned>(IORING_FEAT_EXT_ARG);
    return result;
  };
  ExpectRung(EngineRung::kPwrite, "too old");
}

TEST_F(QueueLadderTest, ClimbsDownIfTheRingCannotBeEntered) {
  if (!RingWorksHere()) GTEST_SKIP() << "no io_uring here";
  static int error = 0;
  Planted planted(queue_.get());
  planted->uring_submit = [](io_uring*) { return -error; };
  error = EPERM;
  ExpectRung(EngineRung::kPwrite, "io_uring_enter: EPERM");
  error = EAGAIN;  // permanently
  ExpectRung(EngineRung::kPwrite, "io_uring_enter: ETIMEDOUT");
}

TEST_F(QueueLadderTest, GoesOnWithTheThreadsThatItGets) {
  static int allowed = 0;
  Planted planted(queue_.get());
  planted->thread_create = [](pthread_t* out, const pthread_attr_t* attributes,
                              void* (*body)(void*), void* argument) {
    if (allowed-- <= 0) return EAGAIN;
    return pthread_create(out, attributes, body, argument);
  };
  QueueOptions options = {.rung = EngineRung::kPwrite, .threads = 4};
  allowed = 1;
  ASSERT_EQ(queue_->Open(options), 0);
  EXPECT_STREQ(queue_->reason(), "pwrite, threads: 1 (then EAGAIN)");
  EXPECT_TRUE(Works(queue_.get(), region_));
  queue_->Close();
  allowed = 0;
  ASSERT_EQ(queue_->Open(options), 0);
  EXPECT_STREQ(queue_->reason(), "pwrite in the caller: pthread_create: EAGAIN");
  EXPECT_TRUE(Works(queue_.get(), region_));
}

TEST_F(QueueLadderTest, ReportsAMissingEventfd) {
  Planted planted(queue_.get());
  planted->eventfd = [](unsigned, int) {
    errno = EMFILE;
    return -1;
  };
  EXPECT_EQ(queue_->Open({.rung = EngineRung::kPwrite, .threads = 1}), EMFILE);
  EXPECT_STREQ(queue_->reason(), "eventfd: EMFILE");
}

TEST_F(QueueLadderTest, RefusesOptionsOutOfRange) {
  EXPECT_EQ(queue_->Open({.depth = 0}), EINVAL);
  EXPECT_EQ(queue_->Open({.depth = kDepthMax + 1}), EINVAL);
  EXPECT_EQ(queue_->Open({.threads = kPwriteThreadsMax + 1}), EINVAL);
  EXPECT_EQ(queue_->Open({.rung = EngineRung::kUringFixed}) == 0, false);
}

TEST_F(QueueLadderTest, WorksWhereSeccompForbidsIoUring) {
  if (!RingWorksHere()) GTEST_SKIP() << "no io_uring here to forbid";
  for (const int number : {SYS_io_uring_setup, SYS_io_uring_enter}) {
    for (const int error : {EPERM, ENOSYS}) {
      const int status = InChild([&] {
        if (!holdfast::testing::ForbidCalls({number}, error)) return 77;
        QueueOptions options = Options();
        options.threads = 0;
        if (queue_->Open(options) != 0) return 1;
        if (queue_->rung() != EngineRung::kPwrite) return 2;
        if (strstr(queue_->reason(), error == EPERM ? "EPERM" : "ENOSYS") == nullptr) return 3;
        return Works(queue_.get(), region_) ? 0 : 4;
      });
      if (status == 77) GTEST_SKIP() << "no seccomp here";
      EXPECT_EQ(status, 0) << number << " " << error;
    }
  }
}

TEST_F(QueueLadderTest, ClimbsDownToPlainWhereSeccompForbidsRegistration) {
  if (!RingWorksHere()) GTEST_SKIP() << "no io_uring here";
  const int status = InChild([&] {
    if (!holdfast::testing::ForbidCalls({SYS_io_uring_register}, EPERM)) return 77;
    if (queue_->Open(Options()) != 0) return 1;
    if (queue_->rung() != EngineRung::kUring) return 2;
    return Works(queue_.get(), region_) ? 0 : 3;
  });
  if (status == 77) GTEST_SKIP() << "no seccomp here";
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace holdfast::io
