// Which checkpoint is the newest and which retention removes: by time and by series, not by
// step or name, and whatever else stands in the directory.
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "holdfast/checkpointer.h"
#include "holdfast/recovery.h"
#include "holdfast/verify.h"
#include "runtime/format/file_names.h"
#include "runtime/sys/system.h"
#include "tests/testing/save_test.h"
#include "tests/testing/small_checkpoint.h"

namespace holdfast::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::UnorderedElementsAre;

class Newest : public SaveTest {
 protected:
  void TearDown() override {
    sys::g_system = sys::kKernel;
    SaveTest::TearDown();
  }
  /// Each save ends, with its retention, before the next begins.
  void SaveEach(const std::vector<std::string>& names, const std::vector<uint64_t>& steps,
                Retention retention) {
    CheckpointerOptions options = SmallOptions(directory());
    options.launcher = Launcher::kThread;
    options.retention = retention;
    const std::unique_ptr<Checkpointer> checkpointer = Make(options);
    ASSERT_NE(checkpointer, nullptr);
    const TrainingState state = TrainingState::Uniform(1, 1000, 1);
    for (size_t i = 0; i < names.size(); ++i) {
      const auto saved = Save(checkpointer.get(), names[i], state, steps.empty() ? 0 : steps[i]);
      ASSERT_TRUE(saved.ok()) << saved.status();
      ASSERT_TRUE(checkpointer->Flush(kLong).ok());
    }
  }
  std::string NewestName() const {
    const auto newest = FindNewest(directory());
    return newest.ok() ? newest->name : std::string(newest.status().message());
  }
};

TEST_F(Newest, IsTheLastSavedWithoutSteps) {
  SaveEach({"step-8", "step-9", "step-10", "step-11", "step-12"}, {}, {.keep_last = 2});
  EXPECT_THAT(Names(directory()), UnorderedElementsAre("step-11", "step-12"));
  EXPECT_EQ(NewestName(), "step-12");
}

TEST_F(Newest, OfAnotherSeriesIsNoParentOfAProcessThatHasLoadedNothing) {
  const Retention retention = {.keep_last = 2};
  SaveEach({"eval-1"}, {}, retention);
  CheckpointerOptions options = SmallOptions(directory());
  options.launcher = Launcher::kThread;
  const std::unique_ptr<Checkpointer> other = Make(options);
  const TrainingState state = TrainingState::Uniform(1, 1000, 1);
  ASSERT_TRUE(Save(other.get(), "step-1", state, 1).ok());
  SaveEach({"eval-2"}, {}, retention);  // a process each
  ASSERT_TRUE(Save(other.get(), "step-2", state, 2).ok());
  SaveEach({"eval-3"}, {}, retention);
  EXPECT_THAT(Names(directory()), UnorderedElementsAre("step-1", "step-2", "eval-2", "eval-3"));
}

TEST_F(Newest, IsTheLastSavedAfterARollback) {
  SaveEach({"step-100", "step-200", "step-300"}, {100, 200, 300}, {});
  SaveEach({"step-110", "step-120", "step-130"}, {110, 120, 130}, {.keep_last = 2});
  EXPECT_THAT(Names(directory()), UnorderedElementsAre("step-120", "step-130"));
  EXPECT_EQ(NewestName(), "step-130");
}

/// The clock of the next machine: an hour behind the clock of the first.
int ClockOfAnHourAgo(clockid_t clock, timespec* now) {
  const int result = sys::kKernel.clock_gettime(clock, now);
  if (clock == CLOCK_REALTIME) now->tv_sec -= 3600;
  return result;
}

TEST_F(Newest, IsTheLastSavedThoughTheClockWentBack) {
  SaveEach({"step-1", "step-2"}, {1, 2}, {});
  sys::g_system.clock_gettime = ClockOfAnHourAgo;
  SaveEach({"step-3", "step-4", "step-5"}, {3, 4, 5}, {.keep_last = 2});
  EXPECT_THAT(Names(directory()), UnorderedElementsAre("step-4", "step-5"));
  EXPECT_EQ(NewestName(), "step-5");
}

TEST_F(Newest, IsSavedAfterTheLastOfAFramework) {
  const auto later = static_cast<uint64_t>(absl::ToUnixNanos(absl::Now() + absl::Hours(1)));
  SmallRank rank = {.checkpoint = "dcp-1", .attempt = {.high = 5, .low = 6}, .dcp_generation = 0};
  rank.saved_at_ns = later;
  WriteSmallCheckpoint(directory() + "/dcp-1", rank);
  const std::string record = directory() + "/dcp-1/" + format::CommitRecordName(rank.attempt);
  std::ofstream(record) << rank.record_text();
  std::ofstream(directory() + "/dcp-1/.metadata") << "pickle";
  SaveEach({"step-2", "step-3"}, {2, 3}, {});
  EXPECT_GT(InspectCheckpoint(directory() + "/step-2")->saved_at, absl::FromUnixNanos(later));
  EXPECT_EQ(NewestName(), "step-3");
}

TEST_F(Newest, RetentionLeavesOtherSeriesAlone) {
  SaveEach({"best", "epoch-1"}, {10, 20}, {});
  SaveEach({"step-60", "step-70", "step-80"}, {60, 70, 80}, {.keep_last = 1});
  EXPECT_THAT(Names(directory()), UnorderedElementsAre("best", "epoch-1", "step-80"));
}

/// As a file whose permissions or whose disk keep it from being read.
template <int kErrno>
int FailsForOld(int directory, const char* path, int flags, mode_t mode) {
  if (strstr(path, ".json") != nullptr) {  // the commit record, and the manifests
    char link[64];
    char where[4096];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", directory);
    const ssize_t length = sys::kKernel.readlinkat(-1, link, where, sizeof(where));
    if (length > 0 && std::string(where, static_cast<size_t>(length)).ends_with("/step-1")) {
      errno = kErrno;
      return -1;
    }
  }
  return sys::kKernel.openat(directory, path, flags, mode);
}

TEST_F(Newest, IsFoundBesideOneThatCannotBeRead) {
  SaveEach({"step-1", "step-2", "step-3"}, {1, 2, 3}, {});
  for (const auto failing : {FailsForOld<EIO>, FailsForOld<EACCES>}) {
    sys::g_system.openat = failing;
    EXPECT_EQ(NewestName(), "step-3");
    const auto recovered = Recover(directory(), {});
    ASSERT_TRUE(recovered.ok()) << recovered.status();
    EXPECT_EQ(recovered->complete.size(), 2u);
    ASSERT_EQ(recovered->kept_incomplete.size(), 1u);
    EXPECT_THAT(recovered->kept_incomplete[0], ::testing::StartsWith("step-1: "));
  }
}

TEST_F(Newest, IsHeldAgainstItsFilesThoughTheRecordIsSound) {
  SaveEach({"step-1", "step-2"}, {1, 2}, {});
  std::filesystem::remove(directory() + "/step-2/model-00000-of-00001.safetensors");
  std::vector<std::string> passed_over;
  const auto newest = FindNewest(directory(), &passed_over);
  ASSERT_TRUE(newest.ok()) << newest.status();
  EXPECT_EQ(newest->name, "step-1");
  EXPECT_THAT(passed_over, ElementsAre(::testing::StartsWith("step-2: model-00000")));
}

TEST_F(Newest, IsNotARecordAlone) {
  SaveEach({"step-1", "step-2"}, {1, 2}, {});
  std::filesystem::remove(directory() + "/step-2/rank-00000-of-00001.manifest.json");
  std::vector<std::string> passed_over;
  const auto newest = FindNewest(directory(), &passed_over);
  ASSERT_TRUE(newest.ok()) << newest.status();
  EXPECT_EQ(newest->name, "step-1");
  EXPECT_THAT(passed_over, ElementsAre(::testing::StartsWith("step-2: ")));
}

TEST_F(Newest, IsFoundByOneSmallReadForEachCheckpoint) {
  SaveEach({"step-1", "step-2", "step-3"}, {1, 2, 3}, {});
  static std::vector<std::string> opened;
  opened.clear();
  sys::g_system.openat = [](int parent, const char* path, int flags, mode_t mode) {
    if (strstr(path, ".json") != nullptr) opened.push_back(path);
    return sys::kKernel.openat(parent, path, flags, mode);
  };
  EXPECT_EQ(ListRecorded(directory())->size(), 3u);
  EXPECT_THAT(opened,
              ElementsAre("holdfast.commit.json", "holdfast.commit.json", "holdfast.commit.json"));
}

TEST_F(Newest, IsTheLastOfTheList) {
  SaveEach({"step-1", "step-2", "step-3"}, {1, 2, 3}, {});
  std::filesystem::remove(directory() + "/step-3/model-00000-of-00001.safetensors");
  std::filesystem::remove(directory() + "/step-2/rank-00000-of-00001.manifest.json");
  std::vector<std::string> passed_over;
  const auto listed = ListCheckpoints(directory(), &passed_over);
  ASSERT_TRUE(listed.ok()) << listed.status();
  ASSERT_EQ(listed->size(), 1u);
  EXPECT_EQ(listed->front().name, "step-1");
  EXPECT_THAT(passed_over, ElementsAre(::testing::StartsWith("step-2: "),
                                       ::testing::StartsWith("step-3: model-00000")));
  EXPECT_EQ(NewestName(), "step-1");
}

/// Runs once, when a file of a name is opened: another process works meanwhile.
std::string* g_opened = nullptr;
std::function<void()>* g_meanwhile = nullptr;
int OpensMeanwhile(int parent, const char* path, int flags, mode_t mode) {
  if (!g_opened->empty() && strstr(path, g_opened->c_str()) != nullptr) {
    g_opened->clear();
    (*g_meanwhile)();
  }
  return sys::kKernel.openat(parent, path, flags, mode);
}

class NewestMeanwhile : public Newest, public ::testing::WithParamInterface<const char*> {
 protected:
  /// The parameter is a file of the checkpoint; "": its directory.
  void Begin(const std::string& checkpoint, std::function<void()> meanwhile) {
    opened_ = *GetParam() == 0 ? checkpoint : GetParam();
    meanwhile_ = std::move(meanwhile);
    g_opened = &opened_;
    g_meanwhile = &meanwhile_;
    sys::g_system.openat = OpensMeanwhile;
  }
  /// As a save with retention, or in the place of a checkpoint, does at its end.
  void Replace(const std::string& old, const std::string& by) {
    std::filesystem::rename(directory() + "/" + old, directory() + "/.retired");
    std::filesystem::rename(spare(), directory() + "/" + by);
    std::filesystem::remove_all(directory() + "/.retired");
  }
  void SaveSpare(const std::string& name) {
    SaveEach({name}, {1}, {});
    std::filesystem::copy(directory() + "/" + name, spare());
  }
  std::string spare() const { return directory() + ".spare"; }
  void TearDown() override {
    std::filesystem::remove_all(spare());
    Newest::TearDown();
  }
  std::vector<std::string> Listed(absl::StatusOr<std::vector<CheckpointInfo>> found) {
    std::vector<std::string> names;
    if (!found.ok()) return {std::string(found.status().message())};
    for (const CheckpointInfo& one : *found) names.push_back(one.name);
    return names;
  }

 private:
  std::string opened_;
  std::function<void()> meanwhile_;
};

TEST_P(NewestMeanwhile, IsFoundWhileASaveReplacesIt) {
  SaveSpare("latest");
  const auto replace = [this] { Replace("latest", "latest"); };
  Begin("latest", replace);
  EXPECT_EQ(NewestName(), "latest");
  for (const auto list : {ListCheckpoints, ListRecorded}) {
    std::filesystem::copy(directory() + "/latest", spare());
    Begin("latest", replace);
    EXPECT_THAT(Listed(list(directory(), nullptr)), ElementsAre("latest"));
    std::filesystem::remove_all(spare());
  }
  std::filesystem::copy(directory() + "/latest", spare());
  Begin("latest", replace);
  const auto inspected = InspectCheckpoint(directory() + "/latest");
  EXPECT_TRUE(inspected.ok()) << inspected.status();
}

TEST_P(NewestMeanwhile, IsFoundWhileItMakesRoomForALaterOne) {
  SaveSpare("step-1");
  Begin("step-1", [this] { Replace("step-1", "step-2"); });
  EXPECT_EQ(NewestName(), "step-2");
  for (const auto list : {ListCheckpoints, ListRecorded}) {
    std::filesystem::copy(directory() + "/step-2", spare());
    Begin("step-2", [this] { Replace("step-2", "step-3"); });
    const auto names = Listed(list(directory(), nullptr));
    EXPECT_THAT(names, ::testing::SizeIs(1));
    std::filesystem::rename(directory() + "/" + names.front(), directory() + "/step-2");
    std::filesystem::remove_all(spare());
  }
}

INSTANTIATE_TEST_SUITE_P(At, NewestMeanwhile,
                         ::testing::Values("holdfast.commit.json", ".manifest.json", ""));

TEST_F(Newest, SaysWhatItDescendsFrom) {
  SaveEach({"step-1", "step-2"}, {1, 2}, {});
  SaveEach({"step-3"}, {3}, {});
  const auto listed = ListCheckpoints(directory());
  ASSERT_TRUE(listed.ok()) << listed.status();
  ASSERT_EQ(listed->size(), 3u);
  EXPECT_EQ((*listed)[0].parent, AttemptId{});
  EXPECT_EQ((*listed)[1].parent, (*listed)[0].attempt) << "the last one of the same front door";
  EXPECT_EQ((*listed)[2].parent, (*listed)[1].attempt) << "the newest when it was created";
  const auto whole = InspectCheckpoint(directory() + "/step-3");
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ(whole->parent, (*listed)[2].parent);
  EXPECT_EQ(whole->bytes, (*listed)[2].bytes);
  EXPECT_EQ(whole->saved_at, (*listed)[2].saved_at);

  CheckpointerOptions options = SmallOptions(directory());
  options.launcher = Launcher::kThread;
  const std::unique_ptr<Checkpointer> checkpointer = Make(options);
  const TrainingState state = TrainingState::Uniform(1, 1000, 1);
  const std::vector<TensorSource> sources = state.Sources();
  const auto save = checkpointer->SaveAsync(
      {.name = "step-4", .tensors = sources, .parent = (*listed)[0].attempt});
  ASSERT_TRUE(save.ok() && save->WaitDurable(kLong).ok());
  EXPECT_EQ(InspectCheckpoint(directory() + "/step-4")->parent, (*listed)[0].attempt)
      << "as the caller says";
}

TEST_F(Newest, DescendsFromASaveThatIsStillUnderWay) {
  CheckpointerOptions options = SmallOptions(directory());
  options.launcher = Launcher::kThread;
  const std::unique_ptr<Checkpointer> checkpointer = Make(options);
  const TrainingState state = TrainingState::Uniform(1, 1000, 1);
  const std::vector<TensorSource> sources = state.Sources();
  const auto save = [&](const std::string& name, bool confirm) {
    auto begun = checkpointer->SaveAsync({.name = name, .tensors = sources, .confirm = confirm});
    EXPECT_TRUE(begun.ok() && begun->WaitStaged(kLong).ok()) << begun.status();
    return *std::move(begun);
  };
  const SaveHandle first = save("step-1", /*confirm=*/true);  // not durable before it is confirmed
  const SaveHandle second = save("step-2", /*confirm=*/false);
  ASSERT_TRUE(first.Confirm(absl::OkStatus()).ok());
  ASSERT_TRUE(first.WaitDurable(kLong).ok() && second.WaitDurable(kLong).ok());
  const SaveHandle failing = save("step-3", /*confirm=*/true);
  ASSERT_TRUE(failing.Confirm(absl::DataLossError("torn")).ok());
  EXPECT_TRUE(absl::IsDataLoss(failing.WaitDurable(kLong).status()));
  ASSERT_TRUE(save("step-4", /*confirm=*/false).WaitDurable(kLong).ok());
  const auto of = [this](const char* name) { return *InspectCheckpoint(directory() + name); };
  EXPECT_EQ(of("/step-2").parent, of("/step-1").attempt);
  EXPECT_EQ(of("/step-4").parent, of("/step-2").attempt) << "a failed save is no parent";
}

TEST_F(Newest, IsNotOneWhoseRecordIsDamaged) {
  SaveEach({"step-1", "step-2"}, {1, 2}, {});
  std::filesystem::resize_file(directory() + "/step-2/holdfast.commit.json", 100);
  EXPECT_EQ(NewestName(), "step-1");
  EXPECT_TRUE(absl::IsDataLoss(InspectCheckpoint(directory() + "/step-2").status()));
  const auto verified = Verify(directory() + "/step-2", {});
  ASSERT_TRUE(verified.ok()) << verified.status();
  EXPECT_EQ(verified->verdict, Verdict::kCorrupt);
}

TEST_F(Newest, IsFoundWithAForeignFileThatIsCalledLikeAManifest) {
  SaveEach({"step-1", "step-2"}, {1, 2}, {});
  std::ofstream(directory() + "/step-2/rank-notes.manifest.json") << "notes";
  ExpectSound(directory() + "/step-2");
  EXPECT_EQ(NewestName(), "step-2");
}

}  // namespace
}  // namespace holdfast::testing
