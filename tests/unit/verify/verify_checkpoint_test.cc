// Holdfast's own checkpoints: whatever is damaged is found, and named as exactly as digests allow.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/str_replace.h"
#include "absl/time/time.h"
#include "holdfast/checkpointer.h"
#include "holdfast/load.h"
#include "holdfast/verify.h"
#include "runtime/sys/system.h"
#include "tests/testing/checkpoint_files.h"
#include "tests/testing/training_state.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using testing::FlipBit;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::RankFiles;
using testing::ReadFileBytes;
using testing::ScratchDirectory;
using ::testing::SizeIs;
using testing::TrainingState;
using testing::WriteFileBytes;
using testing::WriteRank;

class VerifyCheckpoint : public ::testing::Test {
 protected:
  void TearDown() override { sys::g_system = sys::kKernel; }

  std::string Path(const std::string& name = "") const {
    return scratch_.path() + "/step-7" + (name.empty() ? "" : "/" + name);
  }
  SavePlan Write(const TrainingState& state, const RankFiles& rank = {}) {
    std::filesystem::create_directories(Path());
    return WriteRank(Path(), rank, state.Sources());
  }
  static VerifyReport Verified(const std::string& path, const VerifyOptions& options = {}) {
    auto report = Verify(path, options);
    EXPECT_TRUE(report.ok()) << report.status();
    return report.ok() ? *std::move(report) : VerifyReport{};
  }
  VerifyReport Verified() const { return Verified(Path()); }

  ScratchDirectory scratch_;
  const std::string model_ = RankFiles{}.model_name();
  const std::string manifest_ = RankFiles{}.manifest_name();
};

TEST_F(VerifyCheckpoint, FindsASoundOneSoundOnEveryRung) {
  const TrainingState state = TrainingState::Assorted(1);
  const SavePlan plan = Write(state);
  for (EngineRung rung : {EngineRung::kAuto, EngineRung::kPwrite}) {
    for (uint32_t threads : {1u, 2u}) {
      for (bool direct : {true, false}) {
        const VerifyReport report =
            Verified(Path(), {.threads = threads, .engine = rung, .direct_io = direct});
        EXPECT_EQ(report.verdict, Verdict::kSound);
        EXPECT_THAT(report.faults, IsEmpty());
        EXPECT_EQ(report.bytes, plan.files[0].bytes);
        EXPECT_EQ(report.files, 1u);
        EXPECT_EQ(report.tensors, state.tensors().size());
        EXPECT_EQ(report.step, 7u);
        EXPECT_EQ(report.attempt, RankFiles{}.attempt);
        EXPECT_EQ(report.checked, "XXH3-128 digests of the seal");
        EXPECT_EQ(report.note, "");
      }
    }
  }
}

TEST_F(VerifyCheckpoint, NamesTheOneTensorWhoseBitFlipped) {
  // Small tensors that share chunks, and tensors that cross borders and own chunks.
  for (uint64_t bytes : {100'000, 2'500'000, 9'000'001}) {
    const TrainingState state = TrainingState::Uniform(bytes < 1'000'000 ? 60 : 5, bytes, 2);
    const SavePlan plan = Write(state);
    for (size_t i = 0; i < plan.tensors.size(); i += plan.tensors.size() / 5) {
      const PlannedTensor& tensor = plan.tensors[i];
      for (uint64_t offset : {tensor.begin, (tensor.begin + tensor.end) / 2, tensor.end - 1}) {
        FlipBit(Path(model_), offset);
        const VerifyReport report = Verified();
        EXPECT_EQ(report.verdict, Verdict::kCorrupt);
        ASSERT_THAT(report.faults, SizeIs(1));
        const Fault& fault = report.faults[0];
        EXPECT_EQ(fault.file, model_);
        EXPECT_EQ(fault.tensor, tensor.name);
        EXPECT_EQ(fault.reason, "digest");
        EXPECT_LE(fault.begin, offset);
        EXPECT_GT(fault.end, offset);
        EXPECT_GE(fault.begin, tensor.begin) << "narrowed to the tensor's own bytes";
        EXPECT_LE(fault.end, tensor.end);
        EXPECT_LE(fault.end - fault.begin, kChunkBytes);
        EXPECT_THAT(fault.expected, SizeIs(32));
        EXPECT_NE(fault.expected, fault.found);
        FlipBit(Path(model_), offset);
      }
    }
    EXPECT_EQ(Verified().verdict, Verdict::kSound);
  }
}

TEST_F(VerifyCheckpoint, NamesAllTensorsThatAreDamagedInOneChunk) {
  const SavePlan plan = Write(TrainingState::Uniform(10, 100'000, 3));
  FlipBit(Path(model_), plan.tensors[2].begin + 5);
  FlipBit(Path(model_), plan.tensors[7].end - 1);
  const VerifyReport report = Verified();
  ASSERT_THAT(report.faults, SizeIs(2));
  EXPECT_EQ(report.faults[0].tensor, plan.tensors[2].name);
  EXPECT_EQ(report.faults[1].tensor, plan.tensors[7].name);
}

TEST_F(VerifyCheckpoint, NamesTheHeaderWhenNoTensorIsDamaged) {
  const SavePlan plan = Write(TrainingState::Uniform(3, 100'000, 4));
  for (uint64_t offset : {uint64_t{0}, uint64_t{20}, plan.tensors[0].begin - 1}) {
    FlipBit(Path(model_), offset);
    const VerifyReport report = Verified();
    EXPECT_EQ(report.verdict, Verdict::kCorrupt);
    ASSERT_THAT(report.faults, SizeIs(1));
    EXPECT_EQ(report.faults[0].tensor, "");
    EXPECT_EQ(report.faults[0].begin, 0u);
    EXPECT_LE(report.faults[0].end, plan.files[0].bytes);
    EXPECT_GT(report.faults[0].end, offset);
    FlipBit(Path(model_), offset);
  }
}

TEST_F(VerifyCheckpoint, FindsEveryFlippedBitOfASmallFileAndOfItsManifest) {
  Write(TrainingState::Uniform(2, 700, 5));
  for (const std::string& name : {model_, manifest_}) {
    const auto bytes = std::filesystem::file_size(Path(name));
    for (uint64_t offset = 0; offset < bytes; offset += 61) {
      FlipBit(Path(name), offset);
      const VerifyReport report = Verified();
      EXPECT_EQ(report.verdict, Verdict::kCorrupt) << name << " @ " << offset;
      ASSERT_FALSE(report.faults.empty());
      EXPECT_EQ(report.faults[0].file, name);
      EXPECT_EQ(report.faults[0].reason, name == manifest_ ? "manifest" : "digest");
      FlipBit(Path(name), offset);
    }
  }
  EXPECT_EQ(Verified().verdict, Verdict::kSound);
}

TEST_F(VerifyCheckpoint, CountsFaultsThatItDoesNotKeep) {
  const SavePlan plan = Write(TrainingState::Uniform(9, 10'000, 6));
  for (const PlannedTensor& tensor : plan.tensors) FlipBit(Path(model_), tensor.begin);
  const VerifyReport report = Verified(Path(), {.faults_max = 4});
  EXPECT_THAT(report.faults, SizeIs(4));
  EXPECT_EQ(report.faults_total, 9u);
}

TEST_F(VerifyCheckpoint, TellsWhatATruncatedFileHasLost) {
  const SavePlan plan = Write(TrainingState::Uniform(5, 2'500'000, 7));
  const PlannedTensor& cut = plan.tensors[3];
  std::filesystem::resize_file(Path(model_), cut.begin + 10);
  const VerifyReport report = Verified();
  EXPECT_EQ(report.verdict, Verdict::kCorrupt);
  std::vector<std::string> lost;
  bool size = false;
  for (const Fault& fault : report.faults) {
    if (fault.reason == "size") {
      size = true;
      EXPECT_EQ(fault.begin, cut.begin + 10);
      EXPECT_EQ(fault.end, plan.files[0].bytes);
    } else {
      EXPECT_EQ(fault.reason, "missing");
      lost.push_back(fault.tensor);
    }
  }
  EXPECT_TRUE(size);
  EXPECT_THAT(lost, ::testing::ElementsAre(cut.name, plan.tensors[4].name));
  EXPECT_GT(report.bytes, 0u) << "whole chunks are compared all the same";

  std::filesystem::resize_file(Path(model_), 0);
  EXPECT_EQ(Verified().verdict, Verdict::kCorrupt);
}

TEST_F(VerifyCheckpoint, FindsAnExtendedFile) {
  const SavePlan plan = Write(TrainingState::Uniform(2, 10'000, 8));
  std::filesystem::resize_file(Path(model_), plan.files[0].bytes + 3);
  const VerifyReport report = Verified();
  EXPECT_EQ(report.verdict, Verdict::kCorrupt);
  ASSERT_THAT(report.faults, SizeIs(1));
  EXPECT_EQ(report.faults[0].reason, "size");
  EXPECT_EQ(report.faults[0].begin, plan.files[0].bytes);
  EXPECT_EQ(report.faults[0].end, plan.files[0].bytes + 3);
}

TEST_F(VerifyCheckpoint, IsIncompleteWithoutAFileOrARank) {
  const TrainingState state = TrainingState::Uniform(2, 10'000, 9);
  const RankFiles second = {.rank = 1, .world_size = 2};
  Write(state, {.world_size = 2});
  VerifyReport report = Verified();
  EXPECT_EQ(report.verdict, Verdict::kIncomplete);
  ASSERT_THAT(report.faults, SizeIs(1));
  EXPECT_EQ(report.faults[0].file, second.manifest_name());

  Write(state, second);
  EXPECT_EQ(Verified().verdict, Verdict::kSound);
  std::filesystem::remove(Path(second.model_name()));
  report = Verified();
  EXPECT_EQ(report.verdict, Verdict::kIncomplete);
  ASSERT_THAT(report.faults, SizeIs(1));
  EXPECT_EQ(report.faults[0].reason, "missing");

  // Damage weighs more than what is missing.
  FlipBit(Path(RankFiles{.world_size = 2}.model_name()), 5000);
  EXPECT_EQ(Verified().verdict, Verdict::kCorrupt);
}

TEST_F(VerifyCheckpoint, IsIncompleteWhenRanksAreOfTwoAttemptsOrWorlds) {
  const TrainingState state = TrainingState::Uniform(2, 10'000, 10);
  Write(state, {.world_size = 2});
  Write(state, {.attempt = {9, 9}, .rank = 1, .world_size = 2});
  VerifyReport report = Verified();
  EXPECT_EQ(report.verdict, Verdict::kIncomplete);
  ASSERT_FALSE(report.faults.empty());
  EXPECT_EQ(report.faults[0].reason, "attempt");

  Write(state, {.rank = 1, .world_size = 2});
  EXPECT_EQ(Verified().verdict, Verdict::kSound);
  Write(state, {.rank = 2, .world_size = 3});
  report = Verified();
  EXPECT_EQ(report.verdict, Verdict::kIncomplete);
}

TEST_F(VerifyCheckpoint, IsIncompleteUnderAPartialNameHoweverWholeItIs) {
  const TrainingState state = TrainingState::Uniform(2, 10'000, 11);
  const std::string partial = scratch_.path() + "/step-7.partial-00112233445566778899aabbccddeeff";
  std::filesystem::create_directories(partial);
  EXPECT_EQ(Verified(partial).verdict, Verdict::kIncomplete);
  const SavePlan plan = WriteRank(partial, {}, state.Sources());
  VerifyReport report = Verified(partial + "/");
  EXPECT_EQ(report.verdict, Verdict::kIncomplete);
  EXPECT_THAT(report.note, HasSubstr("recovery"));
  EXPECT_EQ(Verified(partial + "/" + model_).verdict, Verdict::kIncomplete);
  // Also by another path.
  const std::string link = scratch_.path() + "/latest";
  std::filesystem::create_directory_symlink(partial, link);
  for (const std::string& path : {link, partial + "/."}) {
    EXPECT_EQ(Verified(path).verdict, Verdict::kIncomplete) << path;
    EXPECT_EQ(Verified(path + "/" + model_).verdict, Verdict::kIncomplete) << path;
  }
  FlipBit(partial + "/" + model_, plan.tensors[0].begin);
  report = Verified(partial);
  EXPECT_EQ(report.verdict, Verdict::kIncomplete);
  EXPECT_THAT(report.faults, SizeIs(2));
}

TEST_F(VerifyCheckpoint, IsIncompleteWhenARecoveryOrRetentionHasTakenItsNameAway) {
  const TrainingState state = TrainingState::Uniform(2, 10'000, 12);
  for (const char* const kind : {"fenced", "retired"}) {
    const std::string taken =
        scratch_.path() + "/step-7." + kind + "-00112233445566778899aabbccddeeff";
    std::filesystem::create_directories(taken);
    WriteRank(taken, {}, state.Sources());
    EXPECT_EQ(Verified(taken).verdict, Verdict::kIncomplete) << kind;
    EXPECT_EQ(Verified(taken + "/" + model_).verdict, Verdict::kIncomplete) << kind;
    EXPECT_FALSE(CheckpointReader::Open(taken).ok()) << kind;
    EXPECT_FALSE(CheckpointReader::OpenFile(taken + "/" + model_).ok()) << kind;
  }
}

TEST_F(VerifyCheckpoint, FindsManifestsThatLieUnderASoundSelfDigest) {
  const SavePlan plan = Write(TrainingState::Uniform(2, 10'000, 12));
  const std::string text = ReadFileBytes(Path(manifest_));
  const auto edited = [&](const std::string& from, const std::string& to) {
    EXPECT_NE(text.find(from), std::string::npos) << from;
    WriteFileBytes(Path(manifest_), testing::Resealed(absl::StrReplaceAll(text, {{from, to}})));
    return Verified();
  };
  // A path out of the directory, a root that is not of these chunks, another rank's name.
  EXPECT_EQ(edited(model_, "../" + model_.substr(3)).verdict, Verdict::kCorrupt);
  EXPECT_EQ(edited("\"root\":\"", "\"root\":\"0").verdict, Verdict::kCorrupt);
  const size_t root = text.find("\"root\":\"") + 8;
  std::string wrong = text;
  wrong[root] = wrong[root] == '0' ? '1' : '0';
  WriteFileBytes(Path(manifest_), testing::Resealed(wrong));
  EXPECT_EQ(Verified().verdict, Verdict::kCorrupt);
  EXPECT_EQ(edited("\"rank\":0,\"world_size\":1", "\"rank\":1,\"world_size\":2").verdict,
            Verdict::kCorrupt);
  WriteFileBytes(Path(manifest_), text);
  EXPECT_EQ(Verified().verdict, Verdict::kSound);
}

TEST_F(VerifyCheckpoint, RefusesASymlinkAndADirectoryInPlaceOfAFile) {
  Write(TrainingState::Uniform(2, 10'000, 13));
  const std::string outside = scratch_.path() + "/outside";
  std::filesystem::rename(Path(model_), outside);
  std::filesystem::create_symlink(outside, Path(model_));
  VerifyReport report = Verified();
  EXPECT_EQ(report.verdict, Verdict::kCorrupt);
  EXPECT_THAT(report.faults[0].found, HasSubstr("symbolic link"));
  std::filesystem::remove(Path(model_));
  std::filesystem::create_directory(Path(model_));
  report = Verified();
  EXPECT_EQ(report.verdict, Verdict::kCorrupt);
  EXPECT_THAT(report.faults[0].found, HasSubstr("directory"));
}

TEST_F(VerifyCheckpoint, NotesFilesThatNoManifestNames) {
  Write(TrainingState::Uniform(2, 1'000, 14));
  for (const char* name : {"a", "b", "c", "d"}) WriteFileBytes(Path(name), "x");
  const VerifyReport report = Verified();
  EXPECT_EQ(report.verdict, Verdict::kSound);
  EXPECT_THAT(report.note, HasSubstr("a, b, c and 1 more"));
}

TEST_F(VerifyCheckpoint, PassesOverWhatARankZeroThatDiedInItsCommitLeft) {
  Write(TrainingState::Uniform(2, 1'000, 14));
  for (const char* name : {"ranks.board", "holdfast.commit.json.tmp"})
    WriteFileBytes(Path(name), "x");
  const VerifyReport report = Verified();
  EXPECT_EQ(report.verdict, Verdict::kSound);
  EXPECT_EQ(report.note, "");
}

TEST_F(VerifyCheckpoint, ChecksOneFileThroughItsManifest) {
  const TrainingState state = TrainingState::Uniform(2, 10'000, 15);
  const RankFiles second = {.rank = 1, .world_size = 2};
  const RankFiles first = {.rank = 0, .world_size = 2};
  const SavePlan plan = Write(state, first);
  Write(state, second);
  FlipBit(Path(second.model_name()), plan.tensors[0].begin);
  VerifyReport report = Verified(Path(first.model_name()));
  EXPECT_EQ(report.verdict, Verdict::kSound);
  EXPECT_EQ(report.files, 1u);
  EXPECT_EQ(report.bytes, plan.files[0].bytes);
  EXPECT_EQ(Verified(Path(second.model_name())).verdict, Verdict::kCorrupt);
  EXPECT_EQ(Verified(Path(first.manifest_name())).verdict, Verdict::kSound);
  EXPECT_EQ(Verified(Path(second.manifest_name())).verdict, Verdict::kCorrupt);
  std::filesystem::resize_file(Path(first.model_name()), 10);
  EXPECT_EQ(Verified(Path(first.model_name())).verdict, Verdict::kCorrupt);
  FlipBit(Path(first.manifest_name()), 100);
  EXPECT_EQ(Verified(Path(first.manifest_name())).verdict, Verdict::kCorrupt);
}

TEST_F(VerifyCheckpoint, AnOrphanOfASaveIsIncomplete) {
  Write(TrainingState::Uniform(2, 10'000, 16));
  std::filesystem::remove(Path(manifest_));
  EXPECT_EQ(Verified().verdict, Verdict::kIncomplete);
  const VerifyReport report = Verified(Path(model_));
  EXPECT_EQ(report.verdict, Verdict::kIncomplete);
  EXPECT_EQ(report.faults[0].reason, "manifest");
}

TEST_F(VerifyCheckpoint, ACommitRecordAloneIsIncomplete) {
  CheckpointerOptions options;
  options.directory = scratch_.path();
  options.staging.arena_bytes = 16u << 20;
  options.launcher = Launcher::kThread;
  const auto checkpointer = Checkpointer::Create(options);
  ASSERT_TRUE(checkpointer.ok()) << checkpointer.status();
  const TrainingState state = TrainingState::Uniform(2, 10'000, 16);
  // The file has no attempt id: in itself it is as any safetensors file.
  const auto plan = PlanSafetensors("model.safetensors", state.Sources(), {});
  ASSERT_TRUE(plan.ok()) << plan.status();
  const auto handle = (*checkpointer)->SaveAsync({.name = "step-7", .plan = &*plan});
  ASSERT_TRUE(handle.ok()) << handle.status();
  ASSERT_TRUE(handle->WaitDurable(absl::Minutes(2)).ok());
  const std::string path = scratch_.path() + "/step-7";
  EXPECT_EQ(Verified(path).verdict, Verdict::kSound);
  std::filesystem::remove(path + "/" + manifest_);
  FlipBit(path + "/model.safetensors", 9000);
  const VerifyReport report = Verified(path);
  EXPECT_EQ(report.verdict, Verdict::kIncomplete) << report.note;
  ASSERT_FALSE(report.faults.empty());
  EXPECT_THAT(report.faults[0].file + report.faults[0].expected, HasSubstr("manifest"));
}

TEST_F(VerifyCheckpoint, OnlyMetadataOfDcpMarksACheckpoint) {
  for (const char* other : {"model.safetensors.metadata", "notes.metadata", "__x.metadata"}) {
    const std::string run = scratch_.path() + "/" + other + ".d";
    std::filesystem::create_directories(run + "/step-7");
    WriteRank(run + "/step-7", {}, TrainingState::Uniform(1, 1000, 1).Sources());
    WriteFileBytes(run + "/" + other, "x");
    EXPECT_THAT(FindCheckpoints(run).checkpoints, ElementsAre(run + "/step-7")) << other;
  }
  for (const char* of_dcp : {".metadata", "__3.metadata"}) {
    const std::string run = scratch_.path() + "/run" + of_dcp;
    std::filesystem::create_directories(run + "/step-7");
    WriteFileBytes(run + "/" + of_dcp, "x");
    EXPECT_THAT(FindCheckpoints(run).checkpoints, ElementsAre(run)) << of_dcp;
  }
}

TEST_F(VerifyCheckpoint, ADirectoryOfFsckHoldsNoCheckpoint) {
  const std::string run = scratch_.path() + "/run";
  for (const char* name : {"step-7", "lost+found", "closed"}) {
    std::filesystem::create_directories(run + "/" + name);
  }
  WriteRank(run + "/step-7", {}, TrainingState::Uniform(1, 1000, 1).Sources());
  // As for a user who is not root.
  sys::g_system.openat = [](int directory, const char* path, int flags, mode_t mode) {
    if (absl::EndsWith(path, "lost+found") || absl::EndsWith(path, "closed")) {
      errno = EACCES;
      return -1;
    }
    return sys::kKernel.openat(directory, path, flags, mode);
  };
  EXPECT_THAT(FindCheckpoints(run).checkpoints, ElementsAre(run + "/closed", run + "/step-7"));
  EXPECT_EQ(Verified(run + "/lost+found").verdict, Verdict::kUnreadable);
  sys::g_system = sys::kKernel;
}

TEST_F(VerifyCheckpoint, WhatCannotBeReadIsUnreadable) {
  EXPECT_EQ(Verified(Path("nothing")).verdict, Verdict::kUnreadable);
  EXPECT_EQ(Verified("").verdict, Verdict::kUnreadable);
  EXPECT_EQ(Verified("/dev/null").verdict, Verdict::kUnreadable);

  const SavePlan plan = Write(TrainingState::Uniform(4, 4'000'000, 17));
  // One bad block in the middle: the rest is compared, and the bad one is named.
  sys::g_system.pread = [](int fd, void* buffer, size_t bytes, off_t offset) -> ssize_t {
    if (offset == off_t{kChunkBytes}) {
      errno = EIO;
      return -1;
    }
    return sys::kKernel.pread(fd, buffer, bytes, offset);
  };
  VerifyReport report = Verified(Path(), {.engine = EngineRung::kPwrite});
  EXPECT_EQ(report.verdict, Verdict::kUnreadable);
  ASSERT_THAT(report.faults, SizeIs(1));
  EXPECT_EQ(report.faults[0].reason, "read");
  EXPECT_EQ(report.faults[0].begin, kChunkBytes);
  EXPECT_EQ(report.faults[0].end, 2 * kChunkBytes);
  EXPECT_THAT(report.faults[0].found, HasSubstr("Input/output error"));
  EXPECT_EQ(report.bytes, plan.files[0].bytes - kChunkBytes);
  // Proven damage elsewhere weighs more.
  FlipBit(Path(model_), 5000);
  report = Verified(Path(), {.engine = EngineRung::kPwrite});
  EXPECT_EQ(report.verdict, Verdict::kCorrupt);
  EXPECT_THAT(report.faults, SizeIs(2));
}

TEST_F(VerifyCheckpoint, AFileThatMayNotBeOpenedIsUnreadable) {
  Write(TrainingState::Uniform(2, 10'000, 18));
  sys::g_system.openat = [](int directory, const char* path, int flags, mode_t mode) {
    if (std::string(path).ends_with(".safetensors")) {
      errno = EACCES;
      return -1;
    }
    return sys::kKernel.openat(directory, path, flags, mode);
  };
  VerifyReport report = Verified();
  EXPECT_EQ(report.verdict, Verdict::kUnreadable);
  ASSERT_THAT(report.faults, SizeIs(1));
  EXPECT_THAT(report.faults[0].found, HasSubstr("Permission denied"));
  sys::g_system.openat = [](int directory, const char* path, int flags, mode_t mode) {
    if (std::string(path).ends_with(".json")) {
      errno = EACCES;
      return -1;
    }
    return sys::kKernel.openat(directory, path, flags, mode);
  };
  EXPECT_EQ(Verified().verdict, Verdict::kUnreadable);
  sys::g_system = sys::kKernel;
  sys::g_system.getdents64 = [](int, void*, size_t) -> ssize_t {
    errno = EIO;
    return -1;
  };
  EXPECT_EQ(Verified().verdict, Verdict::kUnreadable);
}

TEST_F(VerifyCheckpoint, SaysSoWhenNoEngineCanBeOpened) {
  Write(TrainingState::Uniform(2, 10'000, 19));
  sys::g_system.uring_queue_init_params = [](unsigned, struct io_uring*, struct io_uring_params*) {
    return -EPERM;
  };
  EXPECT_EQ(Verified().verdict, Verdict::kSound) << "the ladder has another rung";
  const VerifyReport report = Verified(Path(), {.engine = EngineRung::kUring});
  EXPECT_EQ(report.verdict, Verdict::kUnreadable);
  EXPECT_THAT(report.faults[0].found, HasSubstr("queue"));
}

TEST_F(VerifyCheckpoint, RefusesOptionsThatCannotWork) {
  EXPECT_EQ(Verify(Path(), {.buffer_bytes = 1}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Verify(Path(), {.threads = 100'000}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(VerifyCheckpoint, ReportsProgressUpToTheWhole) {
  const SavePlan plan = Write(TrainingState::Uniform(3, 4'000'000, 20));
  uint64_t last = 0;
  VerifyOptions options;
  options.progress = [&](uint64_t done, uint64_t total) {
    EXPECT_EQ(total, plan.files[0].bytes);
    EXPECT_GE(done, last);
    last = done;
  };
  Verified(Path(), options);
  EXPECT_EQ(last, plan.files[0].bytes);
}

}  // namespace
}  // namespace holdfast
