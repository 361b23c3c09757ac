// Any failure of any rank ends the save of all ranks, with the rank and its reason in every error:
// in each phase, with real trainers and workers. The next save does not wait for the failed one.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "holdfast/recovery.h"
#include "runtime/sys/system.h"
#include "tests/testing/child_process.h"
#include "tests/testing/save_test.h"
#include "tests/testing/slow_device.h"

namespace holdfast::testing {
namespace {

enum class Fault {
  kCallRefused,
  kNeverCalls,
  kStagingFails,
  kCancelledAtOnce,
  kCancelledWhileWriting,
  kDiskRefuses,
  kWorkerKilledWhileWriting,
  kTrainerKilledWhileStaging,
  kNodeLostWhileWriting,
  kWorkerKilledAfterItsVote,
};

struct Row {
  friend void PrintTo(const Row& row, std::ostream* out) { *out << row.name; }
  Fault fault;
  const char* name;
  const char* reason;    // in the error of every other rank
  bool by_liveness;      // no process of the rank is left to report
  bool survives = true;  // the trainer takes part in the next save
  bool late = true;      // the rank calls while all other ranks wait
};
constexpr Row kRows[] = {
    {Fault::kCallRefused, "CallRefused", "control memory", false},
    {Fault::kNeverCalls, "NeverCalls", "not begun this save", true},
    {Fault::kStagingFails, "StagingFails", "context is lost", false},
    {Fault::kCancelledAtOnce, "CancelledAtOnce", "cancel", false},
    {Fault::kCancelledWhileWriting, "CancelledWhileWriting", "cancel", false, true, false},
    {Fault::kDiskRefuses, "DiskRefuses", "File too large", false},
    {Fault::kWorkerKilledWhileWriting, "WorkerKilledWhileWriting", "killed by signal 9", false,
     true, false},
    {Fault::kTrainerKilledWhileStaging, "TrainerKilledWhileStaging", "trainer", false, false,
     false},
    {Fault::kNodeLostWhileWriting, "NodeLostWhileWriting", "no sign of life", true, false, false},
    {Fault::kWorkerKilledAfterItsVote, "WorkerKilledAfterItsVote", "killed by signal 9", false,
     true, false},
};

// The promise is two seconds; a test machine may be busy. Without it the wait is half an hour.
constexpr absl::Duration kBound = absl::Seconds(60);
constexpr absl::Duration kLiveness = absl::Seconds(3);
constexpr uint64_t kSlow = 64u << 10;  // a second chunk takes a minute

using Case = std::tuple<Row, uint32_t, bool>;  // number of ranks; whether rank 0 fails

std::string NameOf(const ::testing::TestParamInfo<Case>& info) {
  const auto& [row, ranks, zero_fails] = info.param;
  return absl::StrCat(row.name, "_", zero_fails ? "Rank0" : "LastRank", "_Of", ranks);
}

class RankFailures : public SaveTest, public ::testing::WithParamInterface<Case> {
 protected:
  void TearDown() override {
    all_.clear();
    SaveTest::TearDown();
  }
  struct Rank {
    Mailbox mailbox;
    std::unique_ptr<ChildProcess> trainer;
    pid_t worker = 0;
  };

  const Row& row() const { return std::get<0>(GetParam()); }
  uint32_t ranks() const { return std::get<1>(GetParam()); }
  uint32_t failing() const { return std::get<2>(GetParam()) ? 0 : ranks() - 1; }
  /// Has not voted at the fault, so that the save cannot be committed before.
  uint32_t holder() const {
    if (row().fault != Fault::kWorkerKilledAfterItsVote) return failing();
    return failing() == 0 ? 1 : 0;
  }
  bool Is(Fault fault) const { return row().fault == fault; }

  CheckpointerOptions OptionsOf(uint32_t rank) const {
    CheckpointerOptions options = SmallOptions(directory());
    options.staging.arena_bytes = 16u << 20;  // one save
    options.rank = rank;
    options.world_size = ranks();
#ifndef HOLDFAST_WITHOUT_BOARD
    if (row().by_liveness) options.time_liveness_max = kLiveness;
#endif
    if (rank == holder() && (!row().late || Is(Fault::kCancelledAtOnce)))
      options.qos.bytes_per_second_max = kSlow;
    if (rank == failing() && Is(Fault::kCallRefused)) options.staging.control_bytes_max = 1;
    return options;
  }

  absl::StatusOr<SaveHandle> Begin(Checkpointer* checkpointer, uint32_t rank, SlowDevice* device,
                                   const std::string& name, const AttemptId& attempt) {
    const TrainingState state = TrainingState::Uniform(3, 3u << 20, rank);
    std::vector<TensorSource> sources = state.Sources();
    if (device != nullptr) {
      sources.push_back({.name = "device",
                         .dtype = "F32",
                         .shape = {1000},
                         .data = device->Allocate(4000),
                         .bytes = 4000,
                         .device = device});
    }
    return checkpointer->SaveAsync(
        {.name = name, .step = 1, .tensors = sources, .attempt = attempt});
  }

  /// Makes the fault in the failing rank's process.
  absl::Status FailingSave(Checkpointer* checkpointer, SlowDevice* device, Mailbox* mailbox) {
    const bool on_device = Is(Fault::kStagingFails) || Is(Fault::kTrainerKilledWhileStaging);
    if (Is(Fault::kStagingFails)) {
      device->FailCall(SlowDevice::Call::kOrderAfter, absl::InternalError("the context is lost"));
    }
    if (Is(Fault::kDiskRefuses)) LimitFileSize(1u << 20);
    const auto begun =
        Begin(checkpointer, failing(), on_device ? device : nullptr, "step-1", attempt_);
    if (!begun.ok()) return begun.status();
    if (Is(Fault::kCancelledAtOnce)) (void)begun->Cancel();
    if (!row().late) {
      const char* const phase =
          Is(Fault::kWorkerKilledAfterItsVote) ? "waiting for ranks" : nullptr;
      WaitFor([&] {
        const SaveProgress progress = begun->progress();
        return phase == nullptr ? progress.bytes_written > 0 : progress.phase == phase;
      });
      mailbox->ToParent(absl::StrCat(begun->worker_pid()));
    }
    if (Is(Fault::kCancelledWhileWriting)) {
      EXPECT_TRUE(mailbox->FromParent(kLong).has_value());
      (void)begun->Cancel();
    }
    const absl::Status ended = begun->WaitDurable(kLong).status();
    device->CompleteAll();
    return ended;
  }

  absl::Status OtherSave(Checkpointer* checkpointer, uint32_t rank, Mailbox* mailbox) {
    const auto begun = Begin(checkpointer, rank, nullptr, "step-1", attempt_);
    if (!begun.ok()) return begun.status();
    WaitFor([&] {
      const SaveProgress progress = begun->progress();
      return rank == holder() ? progress.bytes_written > 0 : progress.phase == "waiting for ranks";
    });
    mailbox->ToParent("begun");
    return begun->WaitDurable(kLong).status();
  }

  void Trainer(uint32_t rank, Mailbox* mailbox) {
    SlowDevice device;
    auto checkpointer = Make(OptionsOf(rank));
    ASSERT_NE(checkpointer, nullptr);
    mailbox->ToParent("ready");
    if (mailbox->FromParent(kLong) != "go") return;
    const absl::Status ended = rank == failing() ? FailingSave(checkpointer.get(), &device, mailbox)
                                                 : OtherSave(checkpointer.get(), rank, mailbox);
    mailbox->ToParent(absl::StrCat(sys::NowNs(), "|", ended.ToString()));
    if (mailbox->FromParent(kLong) != "next") return;
    ExpectMemoryBack(checkpointer.get());
    Next(checkpointer.get(), rank);
  }

  /// Saves at once, in an arena with room for one save only.
  void Next(Checkpointer* checkpointer, uint32_t rank) {
    std::unique_ptr<Checkpointer> beside;
    if (rank == failing() || rank == holder()) {
      // Without the limits of the fault.
      CheckpointerOptions options = SmallOptions(directory());
      options.rank = rank;
      options.world_size = ranks();
      LimitFileSize(1u << 30);
      beside = Make(options);
      checkpointer = beside.get();
    }
    const absl::Time begin = absl::Now();
    const auto begun = Begin(checkpointer, rank, nullptr, "step-2", next_);
    EXPECT_LT(absl::Now() - begin, kBound) << "the call";
    if (row().survives) {
      ASSERT_TRUE(begun.ok()) << begun.status();
      EXPECT_TRUE(begun->WaitDurable(kLong).ok()) << begun->WaitDurable(kLong).status();
    } else if (begun.ok()) {  // the save cannot be whole; otherwise another rank has cancelled it
      (void)begun->Cancel();
      EXPECT_FALSE(begun->WaitDurable(kLong).ok());
    }
  }

  void Start() {
    for (uint32_t rank = 0; rank < ranks(); ++rank) {
      auto& added = all_.emplace_back(std::make_unique<Rank>());
      Rank* const raw = added.get();
      raw->trainer = std::make_unique<ChildProcess>([=, this] { Trainer(rank, &raw->mailbox); });
    }
    for (const auto& rank : all_) ASSERT_EQ(rank->mailbox.FromChild(kLong), "ready");
    for (uint32_t rank = 0; rank < ranks(); ++rank) {
      if (rank != failing()) all_[rank]->mailbox.ToChild("go");
    }
    if (!row().late) all_[failing()]->mailbox.ToChild("go");
    for (uint32_t rank = 0; rank < ranks(); ++rank) {
      if (rank == failing() && row().late) continue;
      const std::string said = all_[rank]->mailbox.FromChild(kLong).value_or("nothing");
      if (rank == failing()) {
        ASSERT_TRUE(absl::SimpleAtoi(said, &all_[rank]->worker)) << said;
      } else {
        ASSERT_EQ(said, "begun") << rank;
      }
    }
  }

  void Break(const Subreaper& subreaper) {
    Rank& rank = *all_[failing()];
    switch (row().fault) {
      case Fault::kCallRefused:
      case Fault::kStagingFails:
      case Fault::kCancelledAtOnce:
      case Fault::kDiskRefuses:
        rank.mailbox.ToChild("go");
        return;
      case Fault::kNeverCalls:
        return;
      case Fault::kCancelledWhileWriting:
        rank.mailbox.ToChild("cancel");
        return;
      case Fault::kWorkerKilledWhileWriting:
      case Fault::kWorkerKilledAfterItsVote:
        SendSignal(rank.worker, SIGKILL);
        return;
      case Fault::kTrainerKilledWhileStaging:
        rank.trainer->Signal(SIGKILL);
        EXPECT_GT(rank.trainer->Wait(kLong), ChildProcess::kSignalBase);
        (void)subreaper.Reap(rank.worker, absl::Seconds(10));
        return;
      case Fault::kNodeLostWhileWriting:
        // Both stop before either can report the other's fault.
        SendSignal(rank.worker, SIGSTOP);
        rank.trainer->Signal(SIGKILL);
        EXPECT_GT(rank.trainer->Wait(kLong), ChildProcess::kSignalBase);
        SendSignal(rank.worker, SIGKILL);
        (void)subreaper.Reap(rank.worker, absl::Seconds(10));
        return;
    }
  }

  AttemptId attempt_ = NewAttemptId();
  AttemptId next_ = NewAttemptId();
  std::vector<std::unique_ptr<Rank>> all_;
};

TEST_P(RankFailures, EndTheSaveOfAllAndHoldNothing) {
  const Subreaper subreaper;
  Start();
  if (HasFatalFailure()) return;
  const uint64_t broken_ns = sys::NowNs();
  Break(subreaper);
  absl::Duration worst;
  const std::string named = absl::StrCat("rank ", failing());
  for (uint32_t rank = 0; rank < ranks(); ++rank) {
    if (rank == failing() && (!row().survives || Is(Fault::kNeverCalls))) continue;
    const std::string said =
        all_[rank]->mailbox.FromChild(kBound + kLiveness).value_or("0|nothing");
    const std::vector<std::string> parts = absl::StrSplit(said, absl::MaxSplits('|', 1));
    uint64_t ended_ns = 0;
    ASSERT_TRUE(absl::SimpleAtoi(parts[0], &ended_ns)) << said;
    ASSERT_NE(ended_ns, 0u) << "rank " << rank << " waits on";
    worst = std::max(worst, absl::Nanoseconds(ended_ns - broken_ns));
    EXPECT_NE(parts[1], "OK") << rank;
    if (rank == failing()) continue;
    EXPECT_TRUE(absl::StrContains(parts[1], named)) << rank << ": " << parts[1];
    EXPECT_TRUE(absl::StrContains(parts[1], row().reason)) << rank << ": " << parts[1];
  }
  const absl::Duration bound = kBound + (row().by_liveness ? kLiveness : absl::ZeroDuration());
  EXPECT_LT(worst, bound);
  std::cout << "worst: " << worst << "\n";
  RecordProperty("worst_ms", static_cast<int>(absl::ToInt64Milliseconds(worst)));
  EXPECT_THAT(Names(directory()), ::testing::Not(::testing::Contains("step-1")));
  // Every rank has failed and reported: the living trainers leave nothing for a recovery.
  if (row().survives && !Is(Fault::kNeverCalls)) {
    EXPECT_TRUE(WaitFor([&] { return Names(directory()).empty(); }))
        << ::testing::PrintToString(Names(directory()));
  }
  for (uint32_t rank = 0; rank < ranks(); ++rank) {
    if (rank == failing() && Is(Fault::kNeverCalls)) all_[rank]->mailbox.ToChild("go");
    if (rank != failing() || row().survives) all_[rank]->mailbox.ToChild("next");
  }
  for (uint32_t rank = 0; rank < ranks(); ++rank) {
    if (rank == failing() && !row().survives) continue;
    EXPECT_EQ(all_[rank]->trainer->Wait(kLong), 0) << rank;
  }
  if (row().survives) ExpectSound(absl::StrCat(directory(), "/step-2"));
  // Recovery removes the remaining files of dead ranks.
  const auto recovered = Recover(directory(), {.wait_for_orphans = absl::Seconds(30)});
  ASSERT_TRUE(recovered.ok()) << recovered.status();
  EXPECT_THAT(recovered->kept_incomplete, ::testing::IsEmpty());
  EXPECT_THAT(recovered->promoted, ::testing::IsEmpty());
  EXPECT_EQ(Names(directory()),
            row().survives ? std::vector<std::string>{"step-2"} : std::vector<std::string>{});
}
INSTANTIATE_TEST_SUITE_P(All, RankFailures,
                         ::testing::Combine(::testing::ValuesIn(kRows), ::testing::Values(2u, 8u),
                                            ::testing::Bool()),
                         NameOf);

}  // namespace
}  // namespace holdfast::testing
