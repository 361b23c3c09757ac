// Returning memory: every registration first, the pages afterwards, and both restored later.
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/base/clock.h"
#include "runtime/base/status.h"
#include "runtime/staging/staging_pool.h"
#include "tests/unit/staging/scoped_system.h"

namespace holdfast::staging {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kArenaBytes = 4 * uint64_t{kChunkBytes};

std::vector<std::string>* g_log = nullptr;

// Records its calls and the presence of pages at each call.
class Recorder final : public Registrant {
 public:
  Recorder(std::string name, const Arena& arena) : name_(std::move(name)), fd_(arena.fd()) {}
  absl::Status DropRegistration() override { return Log("drop ", drop_status); }
  absl::Status RestoreRegistration() override { return Log("restore ", restore_status); }

  absl::Status drop_status;
  absl::Status restore_status;

 private:
  absl::Status Log(const std::string& what, const absl::Status& status) {
    struct stat info = {};
    EXPECT_EQ(fstat(fd_, &info), 0);
    g_log->push_back(what + name_ + (info.st_blocks > 0 ? "" : " without pages"));
    return status;
  }

  const std::string name_;
  const int fd_;
};

int LoggingFallocate(int fd, int mode, off_t offset, off_t bytes) {
  g_log->push_back("punch");
  return sys::kKernel.fallocate(fd, mode, offset, bytes);
}
int FailingFallocate(int, int, off_t, off_t) {
  errno = EIO;
  return -1;
}
int FailingMadvise(void*, size_t, int) {
  errno = ENOMEM;
  return -1;
}

class StagingTrimTest : public ::testing::Test {
 protected:
  StagingTrimTest() {
    absl::StatusOr<std::unique_ptr<StagingPool>> pool =
        StagingPool::Create({.arena_bytes = kArenaBytes});
    EXPECT_TRUE(pool.ok()) << pool.status();
    pool_ = *std::move(pool);
    first_ = std::make_unique<Recorder>("first", pool_->arena());
    second_ = std::make_unique<Recorder>("second", pool_->arena());
    g_log = &log_;
    system_->fallocate = LoggingFallocate;
  }

  void AddBoth() {
    pool_->AddRegistrant(first_.get());
    pool_->AddRegistrant(second_.get());
  }
  uint64_t BytesInFile() const {
    struct stat info = {};
    EXPECT_EQ(fstat(pool_->arena().fd(), &info), 0);
    return static_cast<uint64_t>(info.st_blocks) * 512;
  }
  absl::StatusOr<Lease> TakeAndRetire() {
    const uint64_t epoch = pool_->OpenEpoch();
    absl::StatusOr<Lease> lease = pool_->Acquire(epoch, kChunkBytes, absl::InfinitePast());
    pool_->Retire(epoch);
    return lease;
  }

  std::vector<std::string> log_;
  ScopedSystem system_;
  std::unique_ptr<Recorder> first_;
  std::unique_ptr<Recorder> second_;
  std::unique_ptr<StagingPool> pool_;  // destroyed first: drops the remaining registrations
};

TEST_F(StagingTrimTest, DropsEveryRegistrationThenPunches) {
  AddBoth();
  ASSERT_TRUE(pool_->Trim().ok());
  EXPECT_THAT(log_, ElementsAre("drop first", "drop second", "punch"));
  EXPECT_FALSE(pool_->stats().resident);
  EXPECT_EQ(pool_->stats().trims, 1u);
}

TEST_F(StagingTrimTest, ReallyGivesTheMemoryBackAndItsContentWithIt) {
  std::memset(pool_->arena().base(), 0x5a, kArenaBytes);
  EXPECT_GE(BytesInFile(), kArenaBytes);
  ASSERT_TRUE(pool_->Trim().ok());
  EXPECT_EQ(BytesInFile(), 0u);
  ASSERT_TRUE(TakeAndRetire().ok());
  EXPECT_GE(BytesInFile(), kArenaBytes);
  EXPECT_TRUE(std::all_of(pool_->arena().base(), pool_->arena().base() + kArenaBytes,
                          [](char c) { return c == 0; }));
}

TEST_F(StagingTrimTest, RestoresRegistrationsWithTheNextLease) {
  AddBoth();
  ASSERT_TRUE(pool_->Trim().ok());
  log_.clear();
  const uint64_t epoch = pool_->OpenEpoch();
  EXPECT_THAT(log_, IsEmpty());
  ASSERT_TRUE(pool_->TryAcquire(epoch, 1).ok());
  EXPECT_THAT(log_, ElementsAre("restore first", "restore second"));
  EXPECT_TRUE(pool_->stats().resident);
  ASSERT_TRUE(pool_->TryAcquire(epoch, 1).ok());
  EXPECT_EQ(log_.size(), 2u) << "once is enough";
}

TEST_F(StagingTrimTest, DoesNothingTwice) {
  AddBoth();
  ASSERT_TRUE(pool_->Trim().ok());
  ASSERT_TRUE(pool_->Trim().ok());
  EXPECT_EQ(log_.size(), 3u);
  EXPECT_EQ(pool_->stats().trims, 1u);
}

TEST_F(StagingTrimTest, RefusesWhileAnyByteIsHeld) {
  AddBoth();
  const uint64_t epoch = pool_->OpenEpoch();
  ASSERT_TRUE(pool_->TryAcquire(epoch, 1).ok());
  EXPECT_EQ(pool_->Trim().code(), absl::StatusCode::kFailedPrecondition);
  pool_->Quarantine(epoch, "a test");
  EXPECT_EQ(pool_->Trim().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(log_, IsEmpty());
  EXPECT_GE(BytesInFile(), kArenaBytes);
}

TEST_F(StagingTrimTest, KeepsThePagesWhenARegistrationCannotBeDropped) {
  AddBoth();
  std::memset(pool_->arena().base(), 0x5a, kArenaBytes);
  second_->drop_status = absl::DeadlineExceededError("no answer");
  const absl::Status status = pool_->Trim();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(status.message(), HasSubstr("no answer"));
  EXPECT_THAT(log_, ElementsAre("drop first", "drop second", "restore first"));
  EXPECT_GE(BytesInFile(), kArenaBytes);
  EXPECT_EQ(pool_->arena().base()[0], 0x5a);
  EXPECT_TRUE(pool_->stats().resident);
  EXPECT_EQ(pool_->stats().trims, 0u);
  EXPECT_TRUE(TakeAndRetire().ok());
  EXPECT_EQ(log_.size(), 3u) << "nothing was left to restore";
  second_->drop_status = absl::OkStatus();
  EXPECT_TRUE(pool_->Trim().ok());
}

TEST_F(StagingTrimTest, RestoresDroppedRegistrationsWhenPunchingFails) {
  AddBoth();
  system_->fallocate = FailingFallocate;
  const absl::Status status = pool_->Trim();
  EXPECT_EQ(base::ErrnoOf(status), EIO);
  EXPECT_THAT(log_, ElementsAre("drop first", "drop second", "restore first", "restore second"));
  EXPECT_TRUE(pool_->stats().resident);
}

TEST_F(StagingTrimTest, FailsTheLeaseWhenThePagesCannotBeTakenAgain) {
  AddBoth();
  ASSERT_TRUE(pool_->Trim().ok());
  log_.clear();
  system_->madvise = FailingMadvise;
  EXPECT_EQ(TakeAndRetire().status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(log_, ElementsAre("punch")) << "nobody registers half an arena";
  EXPECT_FALSE(pool_->stats().resident);
  EXPECT_EQ(pool_->stats().bytes_held, 0u);
  system_->madvise = sys::kKernel.madvise;
  EXPECT_TRUE(TakeAndRetire().ok());
  EXPECT_THAT(log_, ElementsAre("punch", "restore first", "restore second"));
}

TEST_F(StagingTrimTest, TriesARegistrationAgainWithTheNextLease) {
  AddBoth();
  ASSERT_TRUE(pool_->Trim().ok());
  log_.clear();
  first_->restore_status = absl::ResourceExhaustedError("no memory to lock");
  EXPECT_EQ(TakeAndRetire().status(), first_->restore_status);
  EXPECT_THAT(log_, ElementsAre("restore first", "restore second"));
  first_->restore_status = absl::OkStatus();
  EXPECT_TRUE(TakeAndRetire().ok());
  EXPECT_THAT(log_, ElementsAre("restore first", "restore second", "restore first"));
}

TEST_F(StagingTrimTest, DoesNotRestoreARemovedRegistrant) {
  AddBoth();
  ASSERT_TRUE(pool_->Trim().ok());
  pool_->RemoveRegistrant(first_.get());
  log_.clear();
  ASSERT_TRUE(TakeAndRetire().ok());
  EXPECT_THAT(log_, ElementsAre("restore second"));
}

TEST_F(StagingTrimTest, TrimsAgainAfterARegistrationWithoutASave) {
  ASSERT_TRUE(pool_->Trim().ok());
  pool_->AddRegistrant(first_.get());
  pool_->arena().base()[0] = 'x';  // as registering does: the page is present again
  log_.clear();
  ASSERT_TRUE(pool_->Trim().ok());
  EXPECT_THAT(log_, ElementsAre("drop first", "punch"));
  EXPECT_EQ(BytesInFile(), 0u);
}

TEST_F(StagingTrimTest, DropsRegistrationsBeforeItUnmaps) {
  AddBoth();
  pool_.reset();
  EXPECT_THAT(log_, ElementsAre("drop first", "drop second"));
}

bool IsMapped(const char* base) {
  std::ostringstream start;
  start << std::hex << reinterpret_cast<uintptr_t>(base) << "-";
  std::ifstream in("/proc/self/maps");
  std::string line;
  while (std::getline(in, line)) {
    if (line.rfind(start.str(), 0) == 0) return true;
  }
  return false;
}

TEST_F(StagingTrimTest, NeverUnmapsRegisteredMemory) {
  AddBoth();
  first_->drop_status = absl::InternalError("cudaHostUnregister");
  const char* const base = pool_->arena().base();
  pool_.reset();
  EXPECT_TRUE(IsMapped(base));
}

// Blocks in DropRegistration until released.
class SlowRegistrant final : public Registrant {
 public:
  absl::Status DropRegistration() override {
    dropping = true;
    while (!let_go) std::this_thread::yield();
    return absl::OkStatus();
  }
  absl::Status RestoreRegistration() override {
    restored = true;
    return absl::OkStatus();
  }

  std::atomic<bool> dropping{false};
  std::atomic<bool> let_go{false};
  std::atomic<bool> restored{false};
};

TEST_F(StagingTrimTest, GivesNoLeaseDuringATrimAndBlocksNoOtherCall) {
  SlowRegistrant slow;
  pool_->AddRegistrant(&slow);
  std::thread trimmer([&] { EXPECT_TRUE(pool_->Trim().ok()); });
  while (!slow.dropping) std::this_thread::yield();
  const uint64_t epoch = pool_->OpenEpoch();
  EXPECT_EQ(pool_->TryAcquire(epoch, 1).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(pool_->Acquire(epoch, 1, base::Now()).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(pool_->stats().resident);
  std::thread waiter([&] {
    EXPECT_TRUE(pool_->Acquire(epoch, 1, absl::InfiniteFuture()).ok());
    EXPECT_TRUE(slow.restored);
  });
  slow.let_go = true;
  trimmer.join();
  waiter.join();
  pool_->RemoveRegistrant(&slow);
}

// A device registers while no save is in flight. A page punched without notice would live on in its
// registration: copies would go there, and the file would get the new pages' zeros.
TEST_F(StagingTrimTest, WaitsForARegistrationUnderWayAndKnowsOfItAfterwards) {
  class Device : public Registrant {
   public:
    explicit Device(StagingPool* pool) : pool_(pool) {}
    absl::Status DropRegistration() override {
      EXPECT_TRUE(pool_->stats().resident);
      dropped = true;
      return absl::OkStatus();
    }
    absl::Status RestoreRegistration() override {
      registering = true;
      while (!let_go) std::this_thread::yield();
      return absl::OkStatus();
    }
    std::atomic<bool> registering{false};
    std::atomic<bool> let_go{false};
    std::atomic<bool> dropped{false};

   private:
    StagingPool* pool_;
  };
  Device device(pool_.get());
  std::thread registers([&] { EXPECT_TRUE(pool_->Register(&device).ok()); });
  while (!device.registering) std::this_thread::yield();
  std::thread trims([&] { EXPECT_TRUE(pool_->Trim().ok()); });
  for (int i = 0; i < 1000; ++i) std::this_thread::yield();
  EXPECT_TRUE(pool_->stats().resident);
  device.let_go = true;
  registers.join();
  trims.join();
  EXPECT_TRUE(device.dropped);
  EXPECT_FALSE(pool_->stats().resident);
  pool_->RemoveRegistrant(&device);
}

TEST_F(StagingTrimTest, RegistersLateRegistrantsWhenPagesAreTakenAgain) {
  ASSERT_TRUE(pool_->Trim().ok());
  log_.clear();
  ASSERT_TRUE(pool_->Register(first_.get()).ok());
  EXPECT_TRUE(log_.empty());
  EXPECT_TRUE(TakeAndRetire().ok());
  EXPECT_THAT(log_, ElementsAre("restore first"));
}

TEST_F(StagingTrimTest, DoesNotAddARegistrantThatCannotRegister) {
  first_->restore_status = absl::InternalError("no");
  EXPECT_FALSE(pool_->Register(first_.get()).ok());
  log_.clear();
  EXPECT_TRUE(pool_->Trim().ok());
  EXPECT_THAT(log_, ElementsAre("punch"));
}

TEST_F(StagingTrimTest, DoesNotLetARegistrantGoWhileItIsBeingCalled) {
  auto slow = std::make_unique<SlowRegistrant>();
  pool_->AddRegistrant(slow.get());
  std::atomic<bool> removed{false};
  std::thread trimmer([&] { EXPECT_TRUE(pool_->Trim().ok()); });
  while (!slow->dropping) std::this_thread::yield();
  std::thread remover([&] {
    pool_->RemoveRegistrant(slow.get());
    removed = true;
  });
  for (int i = 0; i < 1000; ++i) std::this_thread::yield();
  EXPECT_FALSE(removed);
  slow->let_go = true;
  trimmer.join();
  remover.join();
  slow.reset();
  EXPECT_TRUE(TakeAndRetire().ok());
}

}  // namespace
}  // namespace holdfast::staging
