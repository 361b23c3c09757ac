// Opening checkpoints and loading tensors: what comes back equals what was written, and nothing
// unproven is handed out.
#include "holdfast/load.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>

#include "absl/strings/str_replace.h"
#include "runtime/sys/system.h"
#include "tests/testing/checkpoint_files.h"
#include "tests/testing/training_state.h"

namespace holdfast {
namespace {

using testing::FlipBit;
using ::testing::HasSubstr;
using testing::RankFiles;
using testing::ReadFileBytes;
using testing::ScratchDirectory;
using testing::TensorOf;
using testing::TrainingState;
using testing::WriteFileBytes;
using testing::WriteRank;

/// Room for every tensor of a reader.
class Targets {
 public:
  explicit Targets(const CheckpointReader& reader) {
    for (const PlannedTensor& tensor : reader.tensors()) Add(tensor);
  }
  void Add(const PlannedTensor& tensor) {
    std::string& bytes = bytes_[tensor.name];
    bytes.assign(tensor.end - tensor.begin, '\x55');
    targets_.push_back({.name = tensor.name, .data = bytes.data(), .bytes = bytes.size()});
  }
  std::vector<TensorTarget>& targets() { return targets_; }
  const std::string& operator[](const std::string& name) const { return bytes_.at(name); }
  void ExpectEqual(const TrainingState& state) const {
    ASSERT_EQ(bytes_.size(), state.tensors().size());
    for (const TrainingState::Tensor& tensor : state.tensors()) {
      EXPECT_TRUE(bytes_.at(tensor.name) ==
                  std::string_view(tensor.bytes.data(), tensor.bytes.size()))
          << tensor.name;
    }
  }

 private:
  std::map<std::string, std::string> bytes_;
  std::vector<TensorTarget> targets_;
};

/// The bytes of a plan's only file.
std::string ContentOf(const SavePlan& plan) {
  std::string content;
  for (const Segment& segment : plan.files[0].segments) {
    content += segment.tensor == Segment::kLiteral
                   ? segment.literal
                   : std::string(static_cast<const char*>(segment.data), segment.bytes);
  }
  return content;
}

class CheckpointReaderTest : public ::testing::Test {
 protected:
  void TearDown() override { sys::g_system = sys::kKernel; }

  std::string Path(const std::string& name = "step-7") const {
    return scratch_.path() + "/" + name;
  }
  SavePlan Write(const TrainingState& state, const RankFiles& rank = {},
                 const std::string& name = "step-7") {
    std::filesystem::create_directories(Path(name));
    return WriteRank(Path(name), rank, state.Sources());
  }
  std::unique_ptr<CheckpointReader> Opened(uint32_t rank = 0) {
    auto reader = CheckpointReader::Open(Path(), rank);
    EXPECT_TRUE(reader.ok()) << reader.status();
    return reader.ok() ? *std::move(reader) : nullptr;
  }
  absl::Status OpenStatus(const std::string& name = "step-7") {
    return CheckpointReader::Open(Path(name)).status();
  }

  ScratchDirectory scratch_;
  const std::string model_ = RankFiles{}.model_name();
  const std::string manifest_ = RankFiles{}.manifest_name();
};

TEST_F(CheckpointReaderTest, LoadsEveryKindOfTensorOnEveryRung) {
  const TrainingState state = TrainingState::Assorted(1);
  Write(state);
  const auto reader = Opened();
  ASSERT_NE(reader, nullptr);
  EXPECT_EQ(reader->step(), 7u);
  EXPECT_EQ(reader->world_size(), 1u);
  EXPECT_EQ(reader->attempt(), RankFiles{}.attempt);
  EXPECT_EQ(reader->tensors().size(), state.tensors().size());
  for (EngineRung rung : {EngineRung::kAuto, EngineRung::kUring, EngineRung::kPwrite}) {
    for (bool verify : {true, false}) {
      for (uint32_t threads : {1u, 2u}) {
        Targets targets(*reader);
        const auto report = reader->Load(
            targets.targets(),
            {.verify = verify, .buffer_bytes = 8u << 20, .threads = threads, .engine = rung});
        if (rung == EngineRung::kUring && !report.ok()) continue;  // forbidden in some containers
        ASSERT_TRUE(report.ok()) << report.status();
        targets.ExpectEqual(state);
        EXPECT_EQ(report->verified, verify);
        EXPECT_EQ(report->bytes, state.bytes());
        EXPECT_GE(report->bytes_read, report->bytes);
        EXPECT_NE(report->engine, EngineRung::kAuto);
      }
    }
  }
}

TEST_F(CheckpointReaderTest, LoadsTensorsThatCrossChunkBordersAnywhere) {
  const TrainingState state = TrainingState::Uniform(7, 3'000'001, 2);
  Write(state);
  const auto reader = Opened();
  Targets targets(*reader);
  ASSERT_TRUE(reader->Load(targets.targets(), {}).ok());
  targets.ExpectEqual(state);
}

TEST_F(CheckpointReaderTest, ReadsLittleMoreThanASmallTensorItself) {
  const TrainingState state = TrainingState::Uniform(40, 500'000, 3);
  const SavePlan plan = Write(state);
  const auto reader = Opened();
  const PlannedTensor& wanted = plan.tensors[17];
  std::string bytes(wanted.end - wanted.begin, '\0');
  const TensorTarget target{.name = wanted.name, .data = bytes.data(), .bytes = bytes.size()};
  const auto report = reader->Load({&target, 1}, {});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(report->verified);
  EXPECT_LE(report->bytes_read, bytes.size() + 4 * kIoAlignment);
  for (const TrainingState::Tensor& tensor : state.tensors()) {
    if (tensor.name == wanted.name) {
      EXPECT_TRUE(bytes == std::string_view(tensor.bytes.data(), tensor.bytes.size()));
    }
  }
}

TEST_F(CheckpointReaderTest, LoadsTheRankThatIsAskedFor) {
  const TrainingState first = TrainingState::Uniform(3, 1000, 4);
  const TrainingState second = TrainingState::Uniform(3, 1000, 5);
  Write(first, {.rank = 0, .world_size = 2});
  Write(second, {.rank = 1, .world_size = 2});
  const auto reader = Opened(1);
  EXPECT_EQ(reader->world_size(), 2u);
  Targets targets(*reader);
  ASSERT_TRUE(reader->Load(targets.targets(), {}).ok());
  targets.ExpectEqual(second);
  EXPECT_EQ(CheckpointReader::Open(Path(), 2).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(CheckpointReaderTest, AFlippedBitOfAnyTensorIsFoundAndNamedAndItsBytesAreNotHandedOut) {
  const TrainingState state = TrainingState::Uniform(5, 2'500'000, 6);
  const SavePlan plan = Write(state);
  const auto reader = Opened();
  for (const PlannedTensor& tensor : plan.tensors) {
    for (uint64_t offset : {tensor.begin, (tensor.begin + tensor.end) / 2, tensor.end - 1}) {
      FlipBit(Path() + "/" + model_, offset);
      for (bool alone : {true, false}) {
        Targets targets(*reader);
        if (alone) {
          std::erase_if(targets.targets(),
                        [&](const TensorTarget& target) { return target.name != tensor.name; });
        }
        const auto report = reader->Load(targets.targets(), {.threads = 1});
        ASSERT_EQ(report.status().code(), absl::StatusCode::kDataLoss) << report.status();
        EXPECT_THAT(std::string(report.status().message()),
                    ::testing::AllOf(HasSubstr("\"" + tensor.name + "\""), HasSubstr(model_),
                                     HasSubstr("expected"), HasSubstr("found")));
        EXPECT_EQ(targets[tensor.name][offset - tensor.begin], '\x55')
            << "unproven bytes were handed out";
      }
      // The other tensors are as sound as before.
      Targets others(*reader);
      std::erase_if(others.targets(),
                    [&](const TensorTarget& target) { return target.name == tensor.name; });
      EXPECT_TRUE(reader->Load(others.targets(), {}).ok());
      FlipBit(Path() + "/" + model_, offset);
    }
  }
  Targets targets(*reader);
  EXPECT_TRUE(reader->Load(targets.targets(), {}).ok());
}

TEST_F(CheckpointReaderTest, WithoutVerificationSaysSo) {
  const TrainingState state = TrainingState::Uniform(1, 1000, 7);
  const SavePlan plan = Write(state);
  FlipBit(Path() + "/" + model_, plan.tensors[0].begin);
  const auto reader = Opened();
  Targets targets(*reader);
  const auto report = reader->Load(targets.targets(), {.verify = false});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_FALSE(report->verified);
}

TEST_F(CheckpointReaderTest, RefusesTargetsThatDoNotFit) {
  const TrainingState state = TrainingState::Uniform(2, 1000, 8);
  const SavePlan plan = Write(state);
  const auto reader = Opened();
  const std::string& name = plan.tensors[0].name;
  std::string bytes(plan.tensors[0].end - plan.tensors[0].begin, '\0');
  const TensorTarget good{.name = name, .data = bytes.data(), .bytes = bytes.size()};
  const auto code = [&](std::vector<TensorTarget> targets, LoadOptions options = {}) {
    const auto report = reader->Load(targets, options);
    return report.status().code();
  };
  EXPECT_EQ(code({good}), absl::StatusCode::kOk);
  TensorTarget wrong = good;
  wrong.name = "no such tensor";
  EXPECT_EQ(code({wrong}), absl::StatusCode::kNotFound);
  wrong = good;
  wrong.bytes -= 1;
  EXPECT_EQ(code({wrong}), absl::StatusCode::kInvalidArgument);
  wrong = good;
  wrong.data = nullptr;
  EXPECT_EQ(code({wrong}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({good, good}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({good}, {.buffer_bytes = 1}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({}), absl::StatusCode::kOk);
}

TEST_F(CheckpointReaderTest, StaysWithinItsBuffer) {
  const TrainingState state = TrainingState::Uniform(4, 16u << 20, 9);
  Write(state);
  const auto reader = Opened();
  Targets targets(*reader);
  static std::atomic<size_t> mapped{0};
  static std::atomic<size_t> peak{0};
  static std::atomic<void*> base{nullptr};
  sys::g_system.mmap = [](void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    void* mapping = sys::kKernel.mmap(at, bytes, protection, flags, fd, offset);
    if (fd < 0 && bytes >= kChunkBytes) {
      base = mapping;
      mapped += bytes;
      peak = std::max(peak.load(), mapped.load());
    }
    return mapping;
  };
  sys::g_system.munmap = [](void* at, size_t bytes) {
    if (at == base) mapped -= bytes;
    return sys::kKernel.munmap(at, bytes);
  };
  ASSERT_TRUE(reader->Load(targets.targets(), {.buffer_bytes = 8u << 20}).ok());
  EXPECT_EQ(mapped.load(), 0u) << "the buffer was left behind";
  EXPECT_GE(peak.load(), 8u << 20);
  EXPECT_LE(peak.load(), (8u << 20) + (2u << 20)) << "8 MiB and the room to align it";
}

TEST_F(CheckpointReaderTest, AFileCutAfterOpeningIsDataLoss) {
  const TrainingState state = TrainingState::Uniform(3, 3'000'000, 10);
  const SavePlan plan = Write(state);
  const auto reader = Opened();
  std::filesystem::resize_file(Path() + "/" + model_, plan.files[0].bytes - 1);
  Targets targets(*reader);
  const auto report = reader->Load(targets.targets(), {});
  EXPECT_EQ(report.status().code(), absl::StatusCode::kDataLoss) << report.status();
  EXPECT_THAT(std::string(report.status().message()), HasSubstr("the file ends at"));
}

TEST_F(CheckpointReaderTest, AReplacedCheckpointIsNeitherReadNorCalledDamaged) {
  Write(TrainingState::Uniform(2, 5000, 1));
  const auto reader = Opened();
  ASSERT_NE(reader, nullptr);
  std::filesystem::rename(Path(), Path("aside"));
  const TrainingState newer = TrainingState::Uniform(2, 5000, 2);
  Write(newer);
  for (const bool verify : {true, false}) {
    Targets targets(*reader);
    const absl::Status refused = reader->Load(targets.targets(), {.verify = verify}).status();
    EXPECT_TRUE(absl::IsAborted(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("open it anew"));
    for (const PlannedTensor& tensor : reader->tensors())
      EXPECT_EQ(targets[tensor.name].find_first_not_of('\x55'), std::string::npos);
  }
  EXPECT_TRUE(absl::IsAborted(reader->Add(0)));
  const auto anew = Opened();
  ASSERT_NE(anew, nullptr);
  Targets targets(*anew);
  EXPECT_TRUE(anew->Load(targets.targets(), {}).ok());
  targets.ExpectEqual(newer);
}

TEST_F(CheckpointReaderTest, AReplacedCheckpointWithTheSameInodeIsNotRead) {
  const auto inode = [](const std::string& path) {
    struct stat status = {};
    return ::stat(path.c_str(), &status) == 0 ? status.st_ino : 0;
  };
  Write(TrainingState::Uniform(2, 5000, 1));
  const auto reader = Opened();
  ASSERT_NE(reader, nullptr);
  const ino_t first = inode(Path());
  // ext4 gives the number of a removed directory to the next one.
  for (int i = 0; i < 100 && (i == 0 || inode(Path()) != first); ++i) {
    std::filesystem::remove_all(Path());
    Write(TrainingState::Uniform(2, 5000, 2));
  }
  if (inode(Path()) != first) GTEST_SKIP() << "this file system uses no inode number twice";
  Targets targets(*reader);
  const absl::Status refused = reader->Load(targets.targets(), {.verify = false}).status();
  EXPECT_TRUE(absl::IsAborted(refused)) << refused;
}

TEST_F(CheckpointReaderTest, AReadErrorIsReportedWithFileAndOffset) {
  const TrainingState state = TrainingState::Uniform(3, 3'000'000, 11);
  Write(state);
  const auto reader = Opened();
  Targets targets(*reader);
  sys::g_system.pread = [](int, void*, size_t, off_t) -> ssize_t {
    errno = EIO;
    return -1;
  };
  const auto report = reader->Load(targets.targets(), {.engine = EngineRung::kPwrite});
  EXPECT_THAT(std::string(report.status().message()),
              ::testing::AllOf(HasSubstr("read " + Path() + "/" + model_),
                               HasSubstr("Input/output error")));
}

TEST_F(CheckpointReaderTest, RefusesWhatIsNoCompleteCheckpoint) {
  const TrainingState state = TrainingState::Uniform(2, 1000, 12);
  EXPECT_EQ(OpenStatus().code(), absl::StatusCode::kNotFound);
  std::filesystem::create_directories(Path());
  EXPECT_EQ(OpenStatus().code(), absl::StatusCode::kFailedPrecondition);

  Write(state, {.rank = 0, .world_size = 2});
  EXPECT_EQ(OpenStatus().code(), absl::StatusCode::kFailedPrecondition) << "rank 1 is missing";
  EXPECT_THAT(std::string(OpenStatus().message()), HasSubstr("rank-00001-of-00002"));

  Write(state, {.attempt = {1, 1}, .rank = 1, .world_size = 2});
  EXPECT_EQ(OpenStatus().code(), absl::StatusCode::kFailedPrecondition) << "two attempts";
  EXPECT_THAT(std::string(OpenStatus().message()), HasSubstr("attempt"));

  Write(state, {.rank = 1, .world_size = 2});
  EXPECT_TRUE(OpenStatus().ok()) << OpenStatus();

  std::filesystem::remove(Path() + "/" + RankFiles{.rank = 1, .world_size = 2}.model_name());
  EXPECT_EQ(OpenStatus().code(), absl::StatusCode::kFailedPrecondition) << "a file is missing";

  const std::string partial = "step-8.partial-00112233445566778899aabbccddeeff";
  Write(state, {}, partial);
  EXPECT_EQ(OpenStatus(partial).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(OpenStatus(partial + "/.").code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(CheckpointReaderTest, RefusesDamagedManifestsAndSizes) {
  const TrainingState state = TrainingState::Uniform(2, 1000, 13);
  Write(state);
  const std::string manifest = ReadFileBytes(Path() + "/" + manifest_);
  for (size_t at = 0; at < manifest.size(); at += 97) {
    FlipBit(Path() + "/" + manifest_, at);
    EXPECT_EQ(OpenStatus().code(), absl::StatusCode::kDataLoss) << at;
    FlipBit(Path() + "/" + manifest_, at);
  }
  EXPECT_TRUE(OpenStatus().ok());
  WriteFileBytes(Path() + "/" + manifest_, "");
  EXPECT_EQ(OpenStatus().code(), absl::StatusCode::kDataLoss);
  WriteFileBytes(Path() + "/" + manifest_, manifest);
  const auto size = std::filesystem::file_size(Path() + "/" + model_);
  std::filesystem::resize_file(Path() + "/" + model_, size + 1);
  EXPECT_EQ(OpenStatus().code(), absl::StatusCode::kDataLoss);
}

TEST_F(CheckpointReaderTest, RefusesASymlinkInPlaceOfAFile) {
  const TrainingState state = TrainingState::Uniform(2, 1000, 14);
  Write(state);
  std::filesystem::rename(Path() + "/" + model_, Path("elsewhere"));
  std::filesystem::create_symlink(Path("elsewhere"), Path() + "/" + model_);
  EXPECT_EQ(OpenStatus().code(), absl::StatusCode::kDataLoss);
}

TEST_F(CheckpointReaderTest, RefusesAManifestThatNamesAFileElsewhere) {
  const TrainingState state = TrainingState::Uniform(2, 1000, 15);
  Write(state);
  std::string text = ReadFileBytes(Path() + "/" + manifest_);
  // As long as the true name, so that nothing else changes.
  std::string outside = "../" + model_.substr(3);
  text = testing::Resealed(absl::StrReplaceAll(text, {{model_, outside}}));
  WriteFileBytes(Path() + "/" + manifest_, text);
  EXPECT_EQ(OpenStatus().code(), absl::StatusCode::kDataLoss);
}

TEST_F(CheckpointReaderTest, OpensAPlainSafetensorsFileAndSaysThatNothingWasVerified) {
  const TrainingState state = TrainingState::Assorted(16);
  auto plan = PlanSafetensors("plain.safetensors", state.Sources(), {});
  ASSERT_TRUE(plan.ok());
  WriteFileBytes(Path("plain.safetensors"), ContentOf(*plan));
  std::filesystem::create_symlink("plain.safetensors", Path("link"));
  for (const char* name : {"plain.safetensors", "link"}) {
    const auto reader = CheckpointReader::OpenFile(Path(name));
    ASSERT_TRUE(reader.ok()) << reader.status();
    Targets targets(**reader);
    const auto report = (*reader)->Load(targets.targets(), {.verify = true});
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_FALSE(report->verified);
    targets.ExpectEqual(state);
  }
  EXPECT_EQ(CheckpointReader::OpenFile(Path("none")).status().code(), absl::StatusCode::kNotFound);
  WriteFileBytes(Path("short"), "abc");
  EXPECT_EQ(CheckpointReader::OpenFile(Path("short")).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(CheckpointReader::OpenFile(Path(".")).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(CheckpointReaderTest, AReplacedFileIsNeitherReadNorCalledDamaged) {
  const TrainingState state = TrainingState::Uniform(2, 1000, 17);
  Write(state);
  const auto plain = PlanSafetensors("plain.safetensors", state.Sources(), {});
  ASSERT_TRUE(plain.ok());
  WriteFileBytes(Path("plain.safetensors"), ContentOf(*plain));
  for (const std::string& file : {Path() + "/" + model_, Path("plain.safetensors")}) {
    const auto reader = CheckpointReader::OpenFile(file);
    ASSERT_TRUE(reader.ok()) << reader.status();
    WriteFileBytes(Path("other"), std::string(1 << 20, 'x'));
    std::filesystem::rename(Path("other"), file);
    for (const bool verify : {true, false}) {
      Targets targets(**reader);
      const absl::Status refused = (*reader)->Load(targets.targets(), {.verify = verify}).status();
      EXPECT_TRUE(absl::IsAborted(refused)) << refused;
      EXPECT_THAT(std::string(refused.message()),
                  ::testing::AllOf(HasSubstr(file), HasSubstr("open it anew")));
    }
  }
}

TEST_F(CheckpointReaderTest, VerifiesAFileOfACheckpointThroughItsManifest) {
  const TrainingState state = TrainingState::Uniform(2, 1000, 17);
  const SavePlan plan = Write(state);
  auto reader = CheckpointReader::OpenFile(Path() + "/" + model_);
  ASSERT_TRUE(reader.ok()) << reader.status();
  Targets targets(**reader);
  auto report = (*reader)->Load(targets.targets(), {});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(report->verified);
  std::filesystem::remove(Path() + "/" + manifest_);
  EXPECT_EQ(CheckpointReader::OpenFile(Path() + "/" + model_).status().code(),
            absl::StatusCode::kFailedPrecondition)
      << "a file of a save without its manifest is of a save that did not end";
}

TEST_F(CheckpointReaderTest, IsRefusedInAChildOfAFork) {
  const TrainingState state = TrainingState::Uniform(1, 1000, 18);
  Write(state);
  const auto reader = Opened();
  Targets targets(*reader);
  const pid_t child = fork();
  if (child == 0) {
    const auto report = reader->Load(targets.targets(), {});
    _exit(report.status().code() == absl::StatusCode::kFailedPrecondition ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace holdfast
