// The planted bug of this layer has its effect: pages are punched under a registration, and the
// registration keeps the old pages.
#include <liburing.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstring>

#include "gtest/gtest.h"
#include "runtime/base/planted_bugs.h"
#include "runtime/staging/staging_pool.h"

namespace holdfast::staging {
namespace {

constexpr uint64_t kArenaBytes = 4 * uint64_t{kChunkBytes};

// The arena's first page, registered with a separate ring.
class RingRegistrant final : public Registrant {
 public:
  explicit RingRegistrant(char* base) : page_{.iov_base = base, .iov_len = kIoAlignment} {}
  ~RingRegistrant() override {
    if (open_) io_uring_queue_exit(&ring_);
  }

  int Register() {
    int result = io_uring_queue_init(2, &ring_, 0);
    open_ = result == 0;
    if (open_) result = io_uring_register_buffers(&ring_, &page_, 1);
    return result;
  }
  absl::Status DropRegistration() override {
    EXPECT_EQ(io_uring_unregister_buffers(&ring_), 0);
    return absl::OkStatus();
  }
  absl::Status RestoreRegistration() override {
    EXPECT_EQ(io_uring_register_buffers(&ring_, &page_, 1), 0);
    return absl::OkStatus();
  }

  // Writes the registered page to `fd`, like the worker.
  void WriteTo(int fd) {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    io_uring_prep_write_fixed(sqe, fd, page_.iov_base, kIoAlignment, 0, 0);
    ASSERT_EQ(io_uring_submit(&ring_), 1);
    io_uring_cqe* cqe = nullptr;
    ASSERT_EQ(io_uring_wait_cqe(&ring_, &cqe), 0);
    ASSERT_EQ(cqe->res, static_cast<int>(kIoAlignment));
    io_uring_cqe_seen(&ring_, cqe);
  }

 private:
  iovec page_;
  io_uring ring_ = {};
  bool open_ = false;
};

class StagingPlantedTest : public ::testing::Test {
 protected:
  ~StagingPlantedTest() override {
    base::g_bug = base::Bug::kNone;
    if (file_ >= 0) close(file_);
  }

  void SetUp() override {
    absl::StatusOr<std::unique_ptr<StagingPool>> pool =
        StagingPool::Create({.arena_bytes = kArenaBytes});
    ASSERT_TRUE(pool.ok()) << pool.status();
    pool_ = *std::move(pool);
    registrant_ = std::make_unique<RingRegistrant>(pool_->arena().base());
    const int result = registrant_->Register();
    if (result < 0) GTEST_SKIP() << "io_uring: " << std::strerror(-result);
    pool_->AddRegistrant(registrant_.get());
    file_ = memfd_create("target", MFD_CLOEXEC);
    ASSERT_GE(file_, 0);
  }

  // Saves one byte value, trims, saves another value; returns the file's bytes after the second
  // write.
  char SaveTrimSave() {
    for (const char value : {'1', '2'}) {
      const uint64_t epoch = pool_->OpenEpoch();
      const absl::StatusOr<Lease> lease = pool_->TryAcquire(epoch, kIoAlignment);
      EXPECT_TRUE(lease.ok()) << lease.status();
      EXPECT_EQ(lease->offset, 0u);
      std::memset(pool_->arena().base(), value, kIoAlignment);
      registrant_->WriteTo(file_);
      EXPECT_EQ(pool_->arena().base()[0], value) << "memory shows the right bytes either way";
      pool_->Retire(epoch);
      EXPECT_TRUE(pool_->Trim().ok());
    }
    char found = 0;
    EXPECT_EQ(pread(file_, &found, 1, 0), 1);
    return found;
  }

  // before the pool, whose destructor drops the registrant
  std::unique_ptr<RingRegistrant> registrant_;
  std::unique_ptr<StagingPool> pool_;
  int file_ = -1;
};

TEST_F(StagingPlantedTest, WritesNewBytesAfterATrim) { EXPECT_EQ(SaveTrimSave(), '2'); }

TEST_F(StagingPlantedTest, WritesOldBytesAfterATrimUnderARegistration) {
  base::g_bug = base::Bug::kTrimUnderRegistration;
  EXPECT_EQ(SaveTrimSave(), '1') << "the bug is not there, so no test can prove that it finds it";
}

}  // namespace
}  // namespace holdfast::staging
